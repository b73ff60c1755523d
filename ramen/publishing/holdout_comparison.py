"""Compare a candidate with the current champion on the candidate's test documents.

Daily ingestion gives a new dataset every day, so the metrics that two versions were tagged with come from different
datasets and cannot be compared. Instead the champion answers the candidate's test documents. Labels that the champion
does not know count as missed, as they would be in serving.

The champion's vectors are searched exactly, like the candidate's: losses of the index are covered by
`index.min_recall`. Test documents that the champion was trained on inflate its metrics; a split by time has none.
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
from ramen.evaluation.predictions import PREDICTIONS, read_ranked_labels
from ramen.evaluation.quantiles import overall_and_thirds
from ramen.index.build import stored_vectors
from ramen.index.retriever import Retriever
from ramen.index.statistics import sample_evenly
from ramen.retrieval import RETRIEVED, search

MAX_DOCUMENTS = 10_000
"""Test documents in a comparison at most."""


@dataclass(frozen=True)
class HoldoutComparison:
    """Metrics of both versions on the same test documents.

    Attributes:
        candidate, champion: metrics of the candidate and of the current champion, in percent, under the keys of
            metrics.json: overall and head, torso, tail.
        documents: number of test documents.
    """

    candidate: dict[str, float]
    champion: dict[str, float]
    documents: int


CompareWithChampion = Callable[[Retriever], HoldoutComparison]
"""Compares the candidate with the given champion."""


def compare_on_holdout(champion: Retriever, *, dataset: Path, evaluation: Path) -> HoldoutComparison:
    """Return the metrics of a candidate and of the current champion on the candidate's test documents.

    Args:
        champion: the retriever that answers the test documents.
        dataset: folder of the candidate's dataset artifact.
        evaluation: folder of the candidate's evaluation on it, with predictions and propensity parameters.
    """
    problem = Dataset.read(dataset, anchors=False)
    rows = np.array(sample_evenly(range(len(problem.test)), MAX_DOCUMENTS), np.int64)
    y, frequency = problem.y_test[rows], np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64)
    inv_p = inverse_propensity(problem.y_train, *read_propensity(evaluation))
    candidate_nk = read_ranked_labels(evaluation / PREDICTIONS, problem)[rows]
    champion_nk = _predict(champion, problem, rows)
    return HoldoutComparison(
        overall_and_thirds(candidate_nk, y, inv_p, frequency),
        overall_and_thirds(champion_nk, y, inv_p, frequency),
        len(rows),
    )


def _predict(champion: Retriever, problem: Dataset, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the champion's top labels of some test documents, as label rows of the candidate's dataset.

    Args:
        champion: retriever with its own label table; labels are matched by uid.
        problem: the candidate's dataset, with L labels.
        rows: int64 [n], test documents.

    Returns:
        int64 [n, 100], best first, padded with L.
    """
    num_labels = len(problem.labels)
    row_of = {uid: row for row, uid in enumerate(problem.labels.uids)}
    # dataset row of each champion label, L if it has none; the extra last entry maps the padding
    known = np.array([row_of.get(uid, num_labels) for uid in champion.uids] + [num_labels], np.int64)
    if problem.candidates is not None:
        known[~np.isin(known, problem.candidates)] = num_labels
    vectors = champion.encoder.encode(problem.test.select(rows.tolist()).texts)
    # exclude unknown labels before the cut to RETRIEVED, or they would push known labels over it
    candidates = np.flatnonzero(known[:-1] < num_labels)
    found, scores = search(vectors, stored_vectors(champion.index), RETRIEVED, candidates=candidates)
    filters: sp.csr_matrix = problem.filter_test[rows]
    return apply_filter(known[found], scores, filters, DEPTH)[0]
