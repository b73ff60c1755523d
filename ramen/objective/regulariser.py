"""Graph regularisers R_x and R_z: regularise documents and labels towards their anchors (R-ICLR 3).

As published, a row (a document or a label) must be nearer to its anchor than to other anchors. `symmetric` adds the
other direction: an anchor must be nearer to its row than to the other rows of the step. The task ranks in that
direction (a query against labels), which the published regulariser does not constrain.

Letters: B rows of the step, R rows that have an anchor, A anchors of the pool, C distinct sampled anchors, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ramen.objective.triplet import Triplet

Array = Any
"""A numpy array, or a tensor after `Links.to`."""


@dataclass(frozen=True)
class Links:
    """Links of one side of a step to the anchor pool of a set.

    Attributes:
        rows_R: int64 [R], rows (positions in the step) that have a positive anchor; other rows get no gradient.
        positive_R: int64 [R], column of each row's sampled anchor.
        mask_BA: bool [B, A], true where the anchor is linked in the *unpruned* graph, or not in this side's pool.
        drawn_C: int64 [C], distinct columns among the sampled anchors.
        row_C: int64 [C], for each of them one row that sampled it.
    """

    rows_R: Array
    positive_R: Array
    mask_BA: Array
    drawn_C: Array
    row_C: Array

    def to(self, device: torch.device | str) -> Links:
        """Return the links as tensors on a device."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return Links(*(torch.as_tensor(array).to(device, non_blocking=True) for array in arrays))


def regulariser(
    vectors_BD: Tensor, anchors_AD: Tensor, links: Links, triplet: Triplet, symmetric: bool = False
) -> Tensor:
    """Triplet loss of rows against their sampled anchor and the other anchors of the step.

    Args:
        vectors_BD: float [B, D], documents or labels of the step.
        anchors_AD: float [A, D], the anchor pool of the set.
        links: the side's links, as tensors on the vectors' device.
        triplet: the loss, for both directions.
        symmetric: return the mean of both directions.

    Returns:
        float32 scalar; 0 (connected to the graph) if no row has an anchor.
    """
    scores_RA = vectors_BD.index_select(0, links.rows_R) @ anchors_AD.T
    loss = triplet(scores_RA, links.positive_R, links.mask_BA.index_select(0, links.rows_R))
    if not symmetric:
        return loss
    scores_CB = anchors_AD.index_select(0, links.drawn_C) @ vectors_BD.T
    reverse_loss = triplet(scores_CB, links.row_C, links.mask_BA.T.index_select(0, links.drawn_C))
    return (loss + reverse_loss) / 2


def weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of the terms, in the order of `terms`. Every term needs a weight."""
    iterator = iter(terms.items())
    name, first = next(iterator)
    loss = weights[name] * first
    for name, term in iterator:
        loss = loss + weights[name] * term
    return loss
