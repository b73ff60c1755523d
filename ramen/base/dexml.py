"""DEXML: the decoupled softmax (Gupta et al., Dual-encoders for extreme multi-label classification, ICLR 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ramen.base.mining import Mining
from ramen.objective.softmax import decoupled_softmax


class Dexml(Mining):
    """Cross-entropy of the sampled positive against negatives; other true labels are not in the denominator.

    Negatives are in-batch until `base.refresh_from`, then also mined (`base.mining.negatives` per document), as in the
    published hard-negative variant; with `base.mining.negatives = 0` they stay in-batch.
    """

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        positives_BL = torch.zeros_like(mask_BL).scatter(1, positive_B[:, None], True)
        return decoupled_softmax(scores_BL, positives_BL, mask_BL, self.settings.dexml.temperature)
