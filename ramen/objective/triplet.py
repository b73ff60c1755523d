"""The triplet loss over a matrix of scores (R-ICLR 3, ngame).

Letters: B rows (documents or labels), N candidates (labels or anchors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["softmax", "mean", "sum_all"]

_EXCLUDED = -1e4
"""Score of an excluded candidate: far below any cosine, but finite in bf16."""


@dataclass(frozen=True)
class Triplet:
    """`max(0, s_negative - s_positive + margin)` over unmasked negatives, reduced to a scalar.

    Attributes:
        margin: gamma, in cosine units.
        hardest: number of negatives per row that "softmax" keeps; 0 = all.
        temperature: tau of "softmax".
        reduction: "softmax" keeps the hardest negatives of a row, weights those that violate the margin by
            softmax(score / temperature), sums them and averages over rows (NGAME, OAK, DEXA; as there, gradients also
            flow through the weights). "mean" averages over a row's unmasked negatives, then over rows. "sum_all" sums
            over all pairs, as the papers' formulas do.
    """

    margin: float = 0.3
    hardest: int = 10
    temperature: float = 0.1
    reduction: Reduction = "softmax"

    def __call__(self, scores_BN: Tensor, positive_B: Tensor, mask_BN: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            scores_BN: float [B, N] cosines.
            positive_B: int64 [B], column of each row's sampled positive.
            mask_BN: bool [B, N], true for positives and ignored candidates; the sampled positive is always masked.

        Returns:
            float32 scalar; 0 (connected to the graph) if there is no row or no negative.
        """
        if scores_BN.numel() == 0:
            return scores_BN.float().sum()
        scores_BN = scores_BN.float()
        positive_B1 = scores_BN.gather(1, positive_B[:, None])
        mask_BN = mask_BN.scatter(1, positive_B[:, None], True)
        if self.reduction == "softmax":
            return self._softmax(scores_BN, positive_B1, mask_BN)
        hinge_BN = (scores_BN - positive_B1 + self.margin).clamp_min(0.0).masked_fill(mask_BN, 0.0)
        if self.reduction == "sum_all":
            return hinge_BN.sum()
        return (hinge_BN.sum(1) / (~mask_BN).sum(1).clamp_min(1)).mean()

    def _softmax(self, scores_BN: Tensor, positive_B1: Tensor, mask_BN: Tensor) -> Tensor:
        hard_BK = scores_BN.masked_fill(mask_BN, _EXCLUDED)
        if 0 < self.hardest < hard_BK.shape[1]:
            hard_BK = hard_BK.topk(self.hardest, dim=1).values
        hinge_BK = (hard_BK - positive_B1 + self.margin).clamp_min(0.0)
        # only violating negatives get weight; without violations all hinges are 0 and the weights do not matter
        weight_BK = torch.softmax(hard_BK.masked_fill(hinge_BK == 0, _EXCLUDED) / self.temperature, dim=1)
        return (weight_BK * hinge_BK).sum(1).mean()
