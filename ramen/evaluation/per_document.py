"""Contributions of the test documents to a run's metrics, computed from its rankings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import Ints, document_weights, inverse_propensity, metrics_by_document
from ramen.evaluation.predictions import PREDICTIONS, read_ranked_labels
from ramen.evaluation.quantiles import head_torso_tail
from ramen.evaluation.uncertainty import PerDocument
from ramen.files import check_type, read_json


def compute_contributions(
    dataset: Dataset, indices: Ints, a: float, b: float, notes: Mapping[str, Any] | None = None
) -> PerDocument:
    """Return each test document's contribution to the metrics, overall and by head, torso and tail.

    Args:
        indices: int64 [N', K] label ids of the test documents, best first, padded with L.
        a, b: parameters of the propensity.
        notes: see `PerDocument`.
    """
    inv_p = inverse_propensity(dataset.y_train, a, b)
    thirds = head_torso_tail(np.asarray(dataset.y_train.sum(axis=0)).ravel().astype(np.int64))
    return PerDocument(
        dataset.test.uids,
        metrics_by_document(indices, dataset.y_test, inv_p, thirds),
        document_weights(dataset.y_test, inv_p, thirds, indices.shape[1]),
        dataset.test_groups,
        notes or {},
    )


def read_contributions(dataset: Dataset, evaluation: Path, predictions: str = PREDICTIONS) -> PerDocument:
    """Return the contributions of an evaluation of this dataset, from its rankings and propensity parameters.

    Args:
        evaluation: folder of the artifact.
        predictions: name of the file of rankings.
    """
    a, b = read_propensity(evaluation)
    return compute_contributions(dataset, read_ranked_labels(evaluation / predictions, dataset), a, b)


def read_propensity(evaluation: Path) -> tuple[float, float]:
    """Read the propensity parameters (a, b) of an evaluation.

    Raises:
        ArtifactError: `propensity.json` is missing or damaged.
    """
    file = evaluation / "propensity.json"
    values = read_json(file, dict[str, Any])
    return check_type(values.get("a"), FiniteFloat, f"{file}: a"), check_type(
        values.get("b"), FiniteFloat, f"{file}: b"
    )
