"""The oracle's terms against the golden values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramen.objective.guidance import TERMS, Guidance, Oracle
from ramen.objective.triplet import Triplet

X = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
Z = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
# the oracle knows other documents and labels too: rows 2 and 0 are the step's documents, 1 and 3 its labels
ORACLE = Oracle(
    np.array([[0.8, 0.6], [9, 9], [0.6, 0.8]], np.float16), np.array([[9, 9], [1, 0], [9, 9], [0, 1]], np.float16)
)
ROWS = np.array([2, 0]), np.array([1, 3])
STEP = torch.arange(2), torch.eye(2, dtype=torch.bool)
ALL = dict.fromkeys(TERMS, 1.0)


def terms(x: torch.Tensor = X, z: torch.Tensor = Z, **changes: object) -> dict[str, torch.Tensor]:
    given = {"oracle": ORACLE, "triplet": Triplet(reduction="mean"), "distance": "l2", "weights": ALL, **changes}
    return Guidance(**given)(*ROWS, x, z, *STEP)  # type: ignore[arg-type]


def test_golden_values() -> None:
    values = {name: float(term) for name, term in terms().items()}
    half = 1e-3  # the tables are float16
    assert values["align_labels"] == pytest.approx(0.0, abs=half)
    assert values["align_documents"] == pytest.approx(0.34, abs=half)
    assert values["match_documents"] == pytest.approx(0.894427, abs=half)
    assert values["match_labels"] == pytest.approx(0.632456, abs=half)
    assert float(terms(distance="mse")["match_documents"]) == pytest.approx(0.40, abs=half)


def test_the_students_vectors_move_towards_the_oracles_and_a_weight_of_nothing_costs_nothing() -> None:
    x, z = X.clone().requires_grad_(), Z.clone().requires_grad_()
    found = terms(x, z, weights={**dict.fromkeys(TERMS, 0.0), "match_documents": 0.1})
    assert set(found) == {"match_documents"}
    found["match_documents"].backward()
    assert x.grad is not None and z.grad is None
    assert float(terms(X - 0.1 * x.grad)["match_documents"]) < float(terms()["match_documents"])


def test_true_labels_do_not_compete() -> None:
    everything_true = torch.ones(2, 2, dtype=torch.bool)
    guidance = Guidance(ORACLE, Triplet(), "l2", ALL)
    found = guidance(*ROWS, X, Z, STEP[0], everything_true)
    assert float(found["align_documents"]) == float(found["align_labels"]) == 0.0
