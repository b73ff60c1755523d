"""The decoupled softmax loss (DEXML).

Letters: B documents, L labels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decoupled_softmax(scores_BL: Tensor, positives_BL: Tensor, mask_BL: Tensor, temperature: float) -> Tensor:
    """Mean over documents of the mean over positives p of -log(e^(s_p/t) / (e^(s_p/t) + sum over negatives e^(s_n/t))).

    Other true labels are in no denominator: an ordinary softmax would push a document's labels away from each other.

    Args:
        scores_BL: float [B, L] cosines.
        positives_BL: bool [B, L], positives whose loss counts (sampled, or all).
        mask_BL: bool [B, L], true or ignored labels: no negatives.
        temperature: tau > 0.

    Returns:
        float32 scalar; rows without a positive, or without a negative, add 0.
    """
    logits_BL = scores_BL.float() / temperature
    none = torch.finfo(torch.float32).min / 4  # finite, so that a row without negatives gives 0, not NaN
    negatives_B1 = logits_BL.masked_fill(mask_BL | positives_BL, none).logsumexp(1, keepdim=True)
    each_BL = torch.nn.functional.softplus(negatives_B1 - logits_BL)
    each_BL = each_BL.masked_fill(~positives_BL, 0.0)
    rows_B = each_BL.sum(1) / positives_BL.sum(1).clamp_min(1)
    return rows_B.mean() if len(rows_B) else scores_BL.float().sum()
