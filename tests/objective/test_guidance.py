"""The oracle's loss terms compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramen.objective.guidance import TERMS, Guidance, OracleVectors
from ramen.objective.triplet import Triplet

X = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
Z = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
# the step contains the documents 2 and 0 and the labels 1 and 3; the tables have further rows
ORACLE = OracleVectors(
    np.array([[0.8, 0.6], [9, 9], [0.6, 0.8]], np.float16), np.array([[9, 9], [1, 0], [9, 9], [0, 1]], np.float16)
)
ROWS = np.array([2, 0]), np.array([1, 3])
STEP = torch.arange(2), torch.eye(2, dtype=torch.bool)
ALL = dict.fromkeys(TERMS, 1.0)


def compute_terms(x: torch.Tensor = X, z: torch.Tensor = Z, **changes: object) -> dict[str, torch.Tensor]:
    arguments = {"oracle": ORACLE, "triplet": Triplet(reduction="mean"), "distance": "l2", "weights": ALL, **changes}
    return Guidance(**arguments)(*ROWS, x, z, *STEP)  # type: ignore[arg-type]


def test_terms_match_values_computed_by_hand() -> None:
    values = {name: float(term) for name, term in compute_terms().items()}
    tolerance = 1e-3  # the tables are float16
    assert values["align_labels"] == pytest.approx(0.0, abs=tolerance)
    assert values["align_documents"] == pytest.approx(0.34, abs=tolerance)
    assert values["match_documents"] == pytest.approx(0.894427, abs=tolerance)
    assert values["match_labels"] == pytest.approx(0.632456, abs=tolerance)
    assert float(compute_terms(distance="mse")["match_documents"]) == pytest.approx(0.40, abs=tolerance)


def test_match_term_reduces_distance_and_terms_with_weight_0_are_skipped() -> None:
    x, z = X.clone().requires_grad_(), Z.clone().requires_grad_()
    terms = compute_terms(x, z, weights={**dict.fromkeys(TERMS, 0.0), "match_documents": 0.1})
    assert set(terms) == {"match_documents"}
    terms["match_documents"].backward()
    assert x.grad is not None and z.grad is None
    assert float(compute_terms(X - 0.1 * x.grad)["match_documents"]) < float(compute_terms()["match_documents"])


def test_true_labels_are_not_negatives() -> None:
    all_true = torch.ones(2, 2, dtype=torch.bool)
    guidance = Guidance(ORACLE, Triplet(), "l2", ALL)
    terms = guidance(*ROWS, X, Z, STEP[0], all_true)
    assert float(terms["align_documents"]) == float(terms["align_labels"]) == 0.0
