"""TF-IDF: cosine of a document with a label's own text and the texts of its training documents, taken together.

Words and character n-grams within words, sublinear term frequency. Of the variants measured on Debian, WordNet and the
demo (label texts alone, training documents alone, nearest training documents' labels, words or character n-grams alone)
this one ranks best in nearly every metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import FeatureUnion
from sklearn.preprocessing import normalize

from ramen.data.dataset import Dataset
from ramen.peers import Rank, Task
from ramen.peers.sparse import search_sparse
from ramen.retrieval import RETRIEVED

SHORT = 200
"""Mean characters of a training document up to which character n-grams are used; full text would have thousands."""
TERMS = 1000
"""Terms kept per label, the heaviest: thousands of training documents have most of the vocabulary."""
ROWS = 4096
"""Labels whose terms are summed at a time."""


def fit(task: Task) -> Rank:
    """Fit the vectoriser and the labels' vectors."""
    problem = task.problem
    vectoriser = make_vectoriser(problem.train.texts)
    vectoriser.fit([*problem.train.texts, *problem.labels.texts])
    labels = label_vectors(problem, vectoriser)

    def rank() -> Any:
        documents = normalize(vectoriser.transform(problem.test.texts))
        return search_sparse(documents, labels, RETRIEVED, problem.candidates)

    return rank


def make_vectoriser(texts: Sequence[str]) -> FeatureUnion:
    """Words, and for short texts character n-grams as well; both with equal weight."""
    common = {"sublinear_tf": True, "dtype": np.float32}
    kinds = [("words", TfidfVectorizer(**common))]
    if sum(map(len, texts)) <= SHORT * len(texts):
        kinds.append(("characters", TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), **common)))
    return FeatureUnion(kinds)


def label_vectors(problem: Dataset, vectoriser: FeatureUnion) -> sp.csr_matrix:
    """Sum of the unit vectors of a label's text and of its training documents' texts: CSR L x V, unit norm."""
    own = normalize(vectoriser.transform(problem.labels.texts))
    documents = normalize(vectoriser.transform(problem.train.texts))
    members = sp.csr_matrix(problem.positives.T)
    blocks = [
        _heaviest(sp.csr_matrix(own[start : start + ROWS] + members[start : start + ROWS] @ documents))
        for start in range(0, len(problem.labels), ROWS)
    ]
    return normalize(sp.vstack(blocks, "csr"))


def _heaviest(vectors: sp.csr_matrix) -> sp.csr_matrix:
    """Keep the first `TERMS` terms of each row by weight."""
    for row in np.flatnonzero(np.diff(vectors.indptr) > TERMS):
        weights = vectors.data[vectors.indptr[row] : vectors.indptr[row + 1]]
        weights[np.argpartition(-weights, TERMS)[TERMS:]] = 0
    vectors.eliminate_zeros()
    return vectors
