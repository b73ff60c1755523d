"""TF-IDF: cosine between a document and the sum of a label's text and the texts of its training documents.

Features are words and character n-grams within words, with sublinear term frequency. This variant was the best in
nearly every metric on Debian, WordNet and the demo, compared with label texts only, training documents only, labels of
the nearest training documents, words only and character n-grams only.
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
"""Character n-grams are used if training documents have at most this many characters on average."""
TERMS = 1000
"""Terms kept per label, by weight; the sum over thousands of training documents has most of the vocabulary."""
ROWS = 4096
"""Labels processed at a time."""


def fit(task: Task) -> Rank:
    """Fit the vectoriser and compute the labels' vectors."""
    problem = task.problem
    vectoriser = make_vectoriser(problem.train.texts)
    vectoriser.fit([*problem.train.texts, *problem.labels.texts])
    labels = label_vectors(problem, vectoriser)

    def rank() -> Any:
        documents = normalize(vectoriser.transform(problem.test.texts))
        return search_sparse(documents, labels, RETRIEVED, problem.candidates)

    return rank


def make_vectoriser(texts: Sequence[str]) -> FeatureUnion:
    """Return a vectoriser of words and, for short texts, character n-grams with equal weight."""
    common = {"sublinear_tf": True, "dtype": np.float32}
    kinds = [("words", TfidfVectorizer(**common))]
    if sum(map(len, texts)) <= SHORT * len(texts):
        kinds.append(("characters", TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), **common)))
    return FeatureUnion(kinds)


def label_vectors(problem: Dataset, vectoriser: FeatureUnion) -> sp.csr_matrix:
    """Return the normalised sum of the unit vectors of a label's text and its training documents: CSR L x V."""
    label_texts = normalize(vectoriser.transform(problem.labels.texts))
    documents = normalize(vectoriser.transform(problem.train.texts))
    members = sp.csr_matrix(problem.positives.T)
    blocks = [
        _keep_heaviest(sp.csr_matrix(label_texts[start : start + ROWS] + members[start : start + ROWS] @ documents))
        for start in range(0, len(problem.labels), ROWS)
    ]
    return normalize(sp.vstack(blocks, "csr"))


def _keep_heaviest(vectors: sp.csr_matrix) -> sp.csr_matrix:
    """Keep the `TERMS` terms with the largest weights in each row."""
    for row in np.flatnonzero(np.diff(vectors.indptr) > TERMS):
        weights = vectors.data[vectors.indptr[row] : vectors.indptr[row + 1]]
        weights[np.argpartition(-weights, TERMS)[TERMS:]] = 0
    vectors.eliminate_zeros()
    return vectors
