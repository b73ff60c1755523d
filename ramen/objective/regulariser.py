"""Graph regularisers R_x and R_z: pull documents and labels to their anchors (R-ICLR 3).

As published, a row (a document or a label) must be nearer to its anchor than to other anchors. `symmetric` adds the
other direction: the anchor must be nearer to its row than to the step's other rows. That is the direction in which the
task ranks, a query against labels, and the published one leaves it free.

Letters: B rows of the step, R those that have an anchor, A anchors of the pool, C anchors that a row drew, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ramen.objective.triplet import Triplet


@dataclass(frozen=True)
class Links:
    """One side's links to the anchor pool of a set within a step.

    Attributes:
        rows_R: int64 [R], rows (positions in the step) that have a positive anchor; the others get no gradient.
        positive_R: int64 [R], column of each row's sampled anchor.
        mask_BA: bool [B, A], true where the anchor is linked in the *unpruned* graph, or not in this side's pool.
        drawn_C: int64 [C], distinct columns that rows drew.
        row_C: int64 [C], for each of them one row that drew it.
    """

    rows_R: Tensor
    positive_R: Tensor
    mask_BA: Tensor
    drawn_C: Tensor
    row_C: Tensor


def regulariser(
    vectors_BD: Tensor, anchors_AD: Tensor, links: Links, triplet: Triplet, symmetric: bool = False
) -> Tensor:
    """Triplet loss that pulls rows to their sampled anchor, away from the step's other anchors.

    Args:
        vectors_BD: float [B, D], documents or labels of the step.
        anchors_AD: float [A, D], the anchor pool of the set.
        links: this side's links.
        triplet: the loss of either direction.
        symmetric: take the mean of both directions.

    Returns:
        float32 scalar, 0 (connected) when no row has an anchor.
    """
    scores_RA = vectors_BD.index_select(0, links.rows_R) @ anchors_AD.T
    loss = triplet(scores_RA, links.positive_R, links.mask_BA.index_select(0, links.rows_R))
    if not symmetric:
        return loss
    scores_CB = anchors_AD.index_select(0, links.drawn_C) @ vectors_BD.T
    back = triplet(scores_CB, links.row_C, links.mask_BA.T.index_select(0, links.drawn_C))
    return (loss + back) / 2


def total(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of the terms, in the order of `terms`. Every term needs a weight."""
    iterator = iter(terms.items())
    name, first = next(iterator)
    loss = weights[name] * first
    for name, term in iterator:
        loss = loss + weights[name] * term
    return loss
