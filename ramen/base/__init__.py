"""Base algorithms: what RAMEN regularises. One module each, one line in `BASES`.

A base algorithm decides in which order documents are visited and what the task loss is; RAMEN adds anchors to the
batch and regularisers to the loss, nothing else.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ramen.objective.triplet import Triplet

BASES: dict[str, str] = {
    "inbatch": "ramen.base.inbatch:InBatchTriplet",
}
"""Name -> "module:class"."""


class BaseAlgorithm(Protocol):
    """The contract of a base algorithm."""

    def order(self, documents: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """One epoch's order.

        Args:
            documents: int64 [n], the training documents.
            rng: generator keyed by seed and epoch.

        Returns:
            int64 [n], a permutation of `documents`; consecutive ones share a batch.
        """

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        """Task loss.

        Args:
            scores_BL: float [B, L], cosines of the batch's documents and its labels.
            positive_B: int64 [B], column of the sampled positive.
            mask_BL: bool [B, L], true for every true or ignored label.

        Returns:
            float32 scalar.
        """


def make_base(name: str, triplet: Triplet) -> BaseAlgorithm:
    """Instantiate a base algorithm by its name in `BASES`."""
    module, cls = BASES[name].split(":")
    return getattr(importlib.import_module(module), cls)(triplet)  # type: ignore[no-any-return]
