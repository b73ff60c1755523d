"""Contributions of the test documents to the metrics of a run, from its rankings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import Ints, by_document, document_weights, inverse_propensity
from ramen.evaluation.predictions import PREDICTIONS, read_labels
from ramen.evaluation.quantiles import head_torso_tail
from ramen.evaluation.uncertainty import PerDocument
from ramen.files import checked, read_json


def from_ranking(
    problem: Dataset, indices: Ints, a: float, b: float, notes: Mapping[str, Any] | None = None
) -> PerDocument:
    """Return what each test document contributes to the metrics, overall and by head, torso and tail.

    Args:
        problem: the dataset.
        indices: int64 [N', K] label ids of the test documents, best first, padded with L.
        a, b: parameters of the propensity.
        notes: see `PerDocument`.
    """
    inv_p = inverse_propensity(problem.y_train, a, b)
    thirds = head_torso_tail(np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64))
    return PerDocument(
        problem.test.uids,
        by_document(indices, problem.y_test, inv_p, thirds),
        document_weights(problem.y_test, inv_p, thirds, indices.shape[1]),
        problem.test_groups,
        notes or {},
    )


def from_evaluation(problem: Dataset, evaluation: Path, predictions: str = PREDICTIONS) -> PerDocument:
    """Return the contributions for an evaluation of this dataset, from its predictions and propensity parameters.

    Args:
        problem: the dataset.
        evaluation: folder of the artifact.
        predictions: name of the file of rankings.
    """
    a, b = read_propensity(evaluation)
    return from_ranking(problem, read_labels(evaluation / predictions, problem), a, b)


def read_propensity(evaluation: Path) -> tuple[float, float]:
    """Read the parameters (a, b) of an evaluation's propensity.

    Raises:
        ArtifactError: `propensity.json` is missing or damaged.
    """
    file = evaluation / "propensity.json"
    found = read_json(file, dict[str, Any])
    return checked(found.get("a"), FiniteFloat, f"{file}: a"), checked(found.get("b"), FiniteFloat, f"{file}: b")
