"""SiameseXML: steps over labels instead of documents (Dahiya et al., ICML 2021; stage I).

Every label with a document is a row of the epoch, so rare labels are trained as often as frequent ones. Each row draws
two of its documents; the second approximates the centroid of the label's documents. Negatives are the documents sampled
for other labels. The encoder is the configured one (a bag of embeddings in the paper).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ramen.base.protocol import BaseAlgorithm, LabelProblem
from ramen.config import BaseConfig
from ramen.objective.triplet import Triplet
from ramen.sampling import Ints, RowSampler

CENTROID_SHARE = 0.3
"""Weight of the second document's loss."""
CEILING, SHARPNESS = 0.9, 1.5
"""Probability that a pair of cosine s is true: `CEILING * exp(SHARPNESS * (s - 1))` (c and d in the released code)."""


class SiameseXml(BaseAlgorithm):
    """Contrastive loss over steps of labels."""

    documents_per_row = 2

    def __init__(self, problem: LabelProblem, settings: BaseConfig, triplet: Triplet) -> None:
        super().__init__(problem, settings, triplet)
        is_training = np.zeros(problem.y.shape[0], bool)
        is_training[problem.documents] = True
        documents_of_label = problem.y.T.tocsr()
        kept = is_training[documents_of_label.indices]
        indptr = np.concatenate([[0], np.cumsum(kept)])[documents_of_label.indptr]
        self._documents = RowSampler(indptr, documents_of_label.indices[kept])
        self._labels = np.flatnonzero(np.diff(indptr))

    @property
    def rows(self) -> int:
        return len(self._labels)

    def order(self, rng: np.random.Generator) -> Ints:
        return rng.permutation(self._labels)

    def pairs(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        drawn = [self._documents.draw(rows, rng)[1] for _ in range(2)]
        return np.concatenate(drawn), np.concatenate([rows, rows])

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        half = len(positive_B) // 2
        first, second = (
            _contrast(scores_BL[part], positive_B[part], mask_BL[part], self.triplet.hardest)
            for part in (slice(0, half), slice(half, None))
        )
        return (1 - CENTROID_SHARE) * first + CENTROID_SHARE * second


def _contrast(scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor, hardest: int) -> Tensor:
    """Return the negative log-likelihood that a label's document is true and the hardest others are not, per label.

    Args:
        scores_BL: float [B, L] cosines, one document per label.
        positive_B: int64 [B], the label of each document.
        mask_BL: bool [B, L], true or ignored pairs.
        hardest: negatives kept per label; 0 = all.

    Returns:
        float32 scalar.
    """
    logs_BL = SHARPNESS * (scores_BL.float() - 1.0) + math.log(CEILING)
    mask_BL = mask_BL.scatter(1, positive_B[:, None], True)
    positive_loss = -logs_BL.gather(1, positive_B[:, None]).sum()
    kept = min(hardest or len(logs_BL), len(logs_BL))
    negative_loss_KL = -torch.log1p(-logs_BL.masked_fill(mask_BL, -math.inf).topk(kept, dim=0).values.exp())
    return (positive_loss + negative_loss_KL.sum() / max(kept, 1)) / max(len(positive_B), 1)
