"""Candidate and holder on the same test documents, where the holder was evaluated on another dataset.

Data that are ingested every day are another dataset every day, so the figures on a version's tags never fit together.
The holder is therefore asked the candidate's test documents, and labels that it does not know are labels it misses:
that is what it would serve today. Its vectors are searched exactly, as the candidate's were: what an index loses is
`index.min_recall`'s matter. Documents that it was trained on flatter it; a split by time has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import DEPTH, apply_filter, inverse_propensity
from ramen.evaluation.per_document import read_propensity
from ramen.evaluation.predictions import PREDICTIONS, read_labels
from ramen.evaluation.quantiles import overall_and_thirds
from ramen.index.build import held_vectors
from ramen.index.retriever import Retriever
from ramen.index.statistics import evenly
from ramen.retrieval import RETRIEVED, search

DOCUMENTS = 10_000
"""Test documents that are asked at most."""


@dataclass(frozen=True)
class HoldoutComparison:
    """What both had on the same test documents.

    Attributes:
        candidate, holder: metrics in percent under the keys of metrics.json, overall and head, torso, tail.
        documents: how many were asked.
    """

    candidate: dict[str, float]
    holder: dict[str, float]
    documents: int


Ask = Callable[[Retriever], HoldoutComparison]
"""Asks a holder."""


def compare_on_holdout(dataset: Path, evaluation: Path) -> Ask:
    """What asks a retriever the test documents of a dataset, beside the predictions of an evaluation on it.

    Args:
        dataset: folder of the artifact.
        evaluation: folder of the candidate's evaluation on it: predictions and propensity parameters.
    """

    def ask(holder: Retriever) -> HoldoutComparison:
        problem = Dataset.read(dataset, anchors=False)
        rows = np.array(evenly(range(len(problem.test)), DOCUMENTS), np.int64)
        y, frequency = problem.y_test[rows], np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64)
        inv_p = inverse_propensity(problem.y_train, *read_propensity(evaluation))

        def measured(indices: NDArray[np.int64]) -> dict[str, float]:
            return overall_and_thirds(indices, y, inv_p, frequency)

        ours = read_labels(evaluation / PREDICTIONS, problem)[rows]
        theirs = _answers(holder, problem, rows)
        return HoldoutComparison(measured(ours), measured(theirs), len(rows))

    return ask


def _answers(holder: Retriever, problem: Dataset, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The holder's first labels of some test documents, by the problem's numbers: int64 [rows, 100], padded with L."""
    num_labels = len(problem.labels)
    number = {uid: i for i, uid in enumerate(problem.labels.uids)}
    known = np.array([number.get(uid, num_labels) for uid in holder.uids] + [num_labels], np.int64)  # the last: padding
    if problem.candidates is not None:
        known[~np.isin(known, problem.candidates)] = num_labels
    vectors = holder.encoder.encode(problem.test.at(rows.tolist()).texts)
    compete = np.flatnonzero(known[:-1] < num_labels)  # before the cut, or labels of no account push others over it
    found, scores = search(vectors, held_vectors(holder.index), RETRIEVED, candidates=compete)
    filters: sp.csr_matrix = problem.filter_test[rows]
    return apply_filter(known[found], scores, filters, DEPTH)[0]
