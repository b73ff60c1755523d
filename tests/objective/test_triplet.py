"""Triplet loss and regularisers compared with values computed by hand and with torch's triplet loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramen.objective.regulariser import Links, regulariser, weighted_sum
from ramen.objective.triplet import Triplet

SCORES = torch.tensor([[0.8, 0.7, 0.2], [0.6, 0.5, 0.4], [0.1, 0.9, 0.3]])
POSITIVE = torch.arange(3)
MASK = torch.eye(3, dtype=torch.bool)
MASK[2, 1] = True


def test_softmax_reduction_matches_values_computed_by_hand() -> None:
    loss = Triplet(0.3, 10, 0.1, "softmax")
    rows = [float(loss(SCORES[i : i + 1], POSITIVE[i : i + 1], MASK[i : i + 1])) for i in range(3)]
    assert rows == pytest.approx([0.2, 0.376159, 0.1], abs=1e-6)
    assert float(loss(SCORES, POSITIVE, MASK)) == pytest.approx(0.225386, abs=1e-6)


def test_other_reductions_match_values_computed_by_hand() -> None:
    assert float(Triplet(reduction="mean")(SCORES, POSITIVE, MASK)) == pytest.approx(0.166667, abs=1e-6)
    assert float(Triplet(reduction="sum_all")(SCORES, POSITIVE, MASK)) == pytest.approx(0.2 + 0.4 + 0.2 + 0.1, abs=1e-6)


def test_loss_with_one_negative_matches_torch_triplet_loss() -> None:
    x, p, n = (
        torch.nn.functional.normalize(torch.randn(1, 8, generator=torch.Generator().manual_seed(i)), dim=1)
        for i in range(3)
    )
    scores = torch.cat([x @ p.T, x @ n.T], dim=1)
    reference = torch.nn.TripletMarginWithDistanceLoss(
        distance_function=lambda a, b: 1 - torch.nn.functional.cosine_similarity(a, b), margin=0.3
    )
    for reduction in ("softmax", "mean", "sum_all"):
        loss = Triplet(0.3, 10, 0.1, reduction)(scores, torch.tensor([0]), torch.tensor([[True, False]]))
        assert float(loss) == pytest.approx(float(reference(x, p, n)), abs=1e-6)


def test_hard_negatives_get_gradient_but_masked_candidates_do_not() -> None:
    scores = SCORES.clone().requires_grad_()
    Triplet()(scores, POSITIVE, MASK).backward()
    assert scores.grad is not None
    assert scores.grad[2, 1] == 0
    assert scores.grad[1, 0] > 0 and scores.grad[1, 1] < 0


def test_only_hardest_negatives_get_gradient() -> None:
    scores = torch.tensor([[0.5, 0.45, 0.4, 0.35]], requires_grad=True)
    Triplet(hardest=1)(scores, torch.tensor([0]), torch.zeros(1, 4, dtype=torch.bool)).backward()
    assert scores.grad is not None
    assert scores.grad[0, 1] > 0 and scores.grad[0, 2] == 0 and scores.grad[0, 3] == 0


@pytest.mark.parametrize("reduction", ["softmax", "mean", "sum_all"])
def test_loss_without_rows_or_negatives_is_connected_zero(reduction: str) -> None:
    loss = Triplet(reduction=reduction)  # type: ignore[arg-type]
    empty = torch.zeros(0, 5, requires_grad=True)
    value = loss(empty, torch.zeros(0, dtype=torch.long), torch.zeros(0, 5, dtype=torch.bool))
    value.backward()
    assert float(value.detach()) == 0 and empty.grad is not None
    no_negatives = torch.full((2, 3), 0.5, requires_grad=True)
    value = loss(no_negatives, torch.tensor([0, 1]), torch.ones(2, 3, dtype=torch.bool))
    value.backward()
    assert float(value.detach()) == 0 and no_negatives.grad is not None and bool((no_negatives.grad == 0).all())


def test_regulariser_gives_no_gradient_to_rows_without_anchor() -> None:
    rows = torch.nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    anchors = torch.nn.functional.normalize(torch.randn(2, 4, generator=torch.Generator().manual_seed(1)), dim=1)
    rows, anchors = rows.requires_grad_(), anchors.requires_grad_()
    mask = torch.tensor([[False, True], [False, False], [True, False]])
    links = Links(torch.tensor([0, 2]), torch.tensor([1, 0]), mask, torch.tensor([0, 1]), torch.tensor([2, 0]))
    regulariser(rows, anchors, links, Triplet(margin=2.0)).backward()
    assert rows.grad is not None and anchors.grad is not None
    assert bool((rows.grad[1] == 0).all()) and bool((rows.grad[0] != 0).any()) and bool((anchors.grad != 0).any())


def test_symmetric_regulariser_is_mean_of_both_directions() -> None:
    rows = torch.nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)), dim=1)
    anchors = torch.nn.functional.normalize(torch.randn(3, 6, generator=torch.Generator().manual_seed(3)), dim=1)
    mask = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()  # row 2 has no anchor
    links = Links(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), mask, torch.tensor([0, 1]), torch.tensor([1, 3]))
    scores, margin = (rows @ anchors.T).numpy(), 0.3

    def hinge(positive: float, negatives: list[float]) -> float:
        return sum(max(0.0, n - positive + margin) for n in negatives) / len(negatives)

    forward = [
        hinge(scores[0, 0], [scores[0, 1], scores[0, 2]]),
        hinge(scores[1, 0], [scores[1, 1]]),
        hinge(scores[3, 1], [scores[3, 0], scores[3, 2]]),
    ]
    reverse = [hinge(scores[1, 0], [scores[2, 0], scores[3, 0]]), hinge(scores[3, 1], list(scores[:3, 1]))]
    triplet = Triplet(margin, reduction="mean")
    assert float(regulariser(rows, anchors, links, triplet)) == pytest.approx(sum(forward) / 3, abs=1e-6)
    both = (sum(forward) / 3 + sum(reverse) / 2) / 2
    assert float(regulariser(rows, anchors, links, triplet, symmetric=True)) == pytest.approx(both, abs=1e-6)


def test_links_from_numpy_become_equal_tensors() -> None:
    arrays = (np.array([0, 2]), np.array([1, 0]), np.eye(3, 2, dtype=bool), np.array([0, 1]), np.array([2, 0]))
    links = Links(*arrays).to("cpu")
    tensors = (links.rows_R, links.positive_R, links.mask_BA, links.drawn_C, links.row_C)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
    assert links.to("cpu").mask_BA is links.mask_BA, "tensors on the device are not copied"


def test_total_is_sum_weighted_by_term_name() -> None:
    terms = {"task": torch.tensor(1.0), "a.document": torch.tensor(2.0), "a.label": torch.tensor(3.0)}
    assert float(weighted_sum(terms, {"task": 1.0, "a.document": 0.5, "a.label": 0.1})) == pytest.approx(2.3)
