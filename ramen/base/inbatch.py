"""In-batch triplet: documents in uniform random order, negatives are the other documents' sampled labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ramen.objective.triplet import Triplet


@dataclass(frozen=True)
class InBatchTriplet:
    """The plainest dual-encoder base: no clustering, no mining."""

    triplet: Triplet

    def order(self, documents: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Uniform random order."""
        return rng.permutation(documents)

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        """Triplet loss against the batch's labels."""
        return self.triplet(scores_BL, positive_B, mask_BL)
