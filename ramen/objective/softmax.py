"""The decoupled softmax loss (DEXML).

Letters: B documents, L labels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decoupled_softmax(scores_BL: Tensor, positives_BL: Tensor, mask_BL: Tensor, temperature: float) -> Tensor:
    """Mean over documents of the mean over positives p of -log(e^(s_p/t) / (e^(s_p/t) + sum over negatives e^(s_n/t))).

    A denominator contains one positive only: an ordinary softmax would make the true labels of a document compete.

    Args:
        scores_BL: float [B, L] cosines.
        positives_BL: bool [B, L], positives that contribute a loss (sampled ones, or all).
        mask_BL: bool [B, L], true or ignored labels, which are not negatives.
        temperature: tau > 0.

    Returns:
        float32 scalar; rows without a positive or without a negative contribute 0.
    """
    logits_BL = scores_BL.float() / temperature
    lowest = torch.finfo(torch.float32).min / 4  # finite, so that a row without negatives gives 0, not NaN
    negatives_B1 = logits_BL.masked_fill(mask_BL | positives_BL, lowest).logsumexp(1, keepdim=True)
    loss_BL = torch.nn.functional.softplus(negatives_B1 - logits_BL)
    loss_BL = loss_BL.masked_fill(~positives_BL, 0.0)
    loss_B = loss_BL.sum(1) / positives_BL.sum(1).clamp_min(1)
    return loss_B.mean() if len(loss_B) else scores_BL.float().sum()
