"""Graph regularisers R_x and R_z: pull documents and labels to their anchors (methods of RAMEN 4.1-4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ramen.objective.triplet import Triplet


@dataclass(frozen=True)
class Links:
    """One side's links to the anchor pool of a set within a batch.

    Attributes:
        rows_R: int64 [R], rows (positions in the batch) that have a positive anchor; the others get no gradient.
        positive_R: int64 [R], column of each row's sampled anchor.
        mask_RA: bool [R, A], true where the anchor is linked in the *unpruned* graph, or not in this side's pool.
    """

    rows_R: Tensor
    positive_R: Tensor
    mask_RA: Tensor


def regulariser(vectors_BD: Tensor, anchors_AD: Tensor, links: Links, triplet: Triplet) -> Tensor:
    """Triplet loss that pulls rows to their sampled anchor, away from the batch's other anchors.

    Args:
        vectors_BD: float [B, D], documents or labels of the batch.
        anchors_AD: float [A, D], the anchor pool of the set.
        links: this side's links.

    Returns:
        float32 scalar, 0 (connected) when no row has an anchor.
    """
    scores_RA = vectors_BD.index_select(0, links.rows_R) @ anchors_AD.T
    return triplet(scores_RA, links.positive_R, links.mask_RA)


def total(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of the terms, in the order of `terms`. Every term needs a weight."""
    iterator = iter(terms.items())
    name, first = next(iterator)
    loss = weights[name] * first
    for name, term in iterator:
        loss = loss + weights[name] * term
    return loss
