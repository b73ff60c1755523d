"""DEXA: NGAME with a learnt offset added to each label's vector (Dahiya et al., KDD 2023).

A label is ranked by `normalise(E(text) + A[row_of[label]])`. Labels whose initial vectors are in one cluster share a
row of A, and the most frequent labels have a separate row, so A is much smaller than a table of all labels. Rows
start at zero: the first step equals NGAME's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.base.clustering import balanced_clusters, halvings
from ramen.base.ngame import Ngame
from ramen.base.protocol import Embed, LabelProblem
from ramen.config import BaseConfig
from ramen.objective.triplet import Triplet
from ramen.sampling import Ints, keyed_rng

OFFSET_HEADS = 1000
"""Number of most frequent labels with a separate offset (Dahiya et al.)."""


class Offsets(nn.Module):
    """A table of label offsets, and the row of each label.

    Args:
        labels: L, number of labels.
        rows: K, number of offsets.
        dimension: D, width of the vectors.
    """

    def __init__(self, labels: int, rows: int, dimension: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, dimension))
        self.register_buffer("row_of", torch.zeros(labels, dtype=torch.int64))
        self.row_of: Tensor

    def forward(self, encoded_LD: Tensor, labels_L: Tensor) -> Tensor:
        """Return vectors of `labels_L` (int64 [L]) given those of their texts: float32 [L, D], unit norm."""
        return nn.functional.normalize(encoded_LD + self.table[self.row_of[labels_L]], dim=-1)


class Dexa(Ngame):
    """NGAME with label offsets: one per about `base.dexa.labels_per_offset` labels, and one per frequent label."""

    def __init__(self, problem: LabelProblem, settings: BaseConfig, triplet: Triplet) -> None:
        super().__init__(problem, settings, triplet)
        labels = problem.y.shape[1]
        self.heads = min(OFFSET_HEADS, labels)
        self.levels = halvings((labels - self.heads) / settings.dexa.labels_per_offset)
        self.offsets = Offsets(labels, (1 << self.levels) + self.heads, problem.dimension)
        self._assigned = False

    @property
    def module(self) -> nn.Module:
        return self.offsets

    def refresh_due(self, epoch: int) -> bool:
        return not self._assigned or super().refresh_due(epoch)

    def refresh(self, epoch: int, embed: Embed) -> None:
        if not self._assigned:
            self._assign_rows(embed("labels"))
        if super().refresh_due(epoch):
            super().refresh(epoch, embed)

    def _assign_rows(self, labels: NDArray[np.float32]) -> None:
        """Cluster the labels by their initial vectors and assign a row of the table to each; done once."""
        rows = balanced_clusters(labels, self.levels, keyed_rng(self.problem.seed, "offsets")).astype(np.int64)
        frequency = np.asarray(self.problem.y.sum(0)).ravel()
        rows[np.argsort(-frequency, kind="stable")[: self.heads]] = (1 << self.levels) + np.arange(self.heads)
        self.offsets.row_of.copy_(torch.from_numpy(rows))
        self._assigned = True

    def label_vectors(self, encoded_LD: Tensor, labels: Ints) -> Tensor:
        labels_L = torch.from_numpy(labels).to(encoded_LD.device)
        return self.offsets(encoded_LD, labels_L)  # type: ignore[no-any-return]

    def state(self) -> dict[str, NDArray[np.generic]]:
        return super().state() | ({"row_of": self.offsets.row_of.cpu().numpy()} if self._assigned else {})

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        super().restore(state)
        if "row_of" in state:
            self.offsets.row_of.copy_(torch.from_numpy(np.asarray(state["row_of"])))
            self._assigned = True
