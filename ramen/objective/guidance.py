"""What an oracle's vectors add to the loss (MOGIC, M-blog).

The oracle is a dual encoder that reads metadata beside the texts. Its vectors are computed once and never change; the
student's documents must rank the oracle's labels, the oracle's documents the student's labels, and both are drawn to
the oracle's.

Letters: B documents of a step, L its distinct labels, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramen.config import Distance
from ramen.objective.triplet import Triplet

ALIGN_DOCUMENTS, ALIGN_LABELS = "align_documents", "align_labels"
MATCH_DOCUMENTS, MATCH_LABELS = "match_documents", "match_labels"
TERMS = (ALIGN_DOCUMENTS, ALIGN_LABELS, MATCH_DOCUMENTS, MATCH_LABELS)
"""The four terms: which of the oracle's vectors take part."""


@dataclass(frozen=True)
class Oracle:
    """What the oracle says, unit norm, row by row of the dataset.

    Attributes:
        documents: float16 [N, D], all training documents.
        labels: float16 [L, D].
    """

    documents: NDArray[np.float16]
    labels: NDArray[np.float16]


@dataclass(frozen=True)
class Guidance:
    """The terms of a step that have a weight.

    Attributes:
        oracle: its vectors; they take no gradient.
        triplet: the loss of the two rankings, that of the regularisers.
        distance: "l2", the mean norm of the differences (as printed, but for a mean over rows in the place of a sum,
            so that a weight means the same for every batch size); "mse", the mean over all elements of their squares
            (as released).
        weights: term -> weight; those of 0 are not computed.
    """

    oracle: Oracle
    triplet: Triplet
    distance: Distance
    weights: Mapping[str, float]

    def __call__(
        self,
        documents: NDArray[np.int64],
        labels: NDArray[np.int64],
        x_BD: Tensor,
        z_LD: Tensor,
        positive_B: Tensor,
        mask_BL: Tensor,
    ) -> dict[str, Tensor]:
        """Unweighted terms, by name: float32 scalars.

        Args:
            documents, labels: int64 [B] and [L], rows of the oracle's tables.
            x_BD, z_LD: float [B, D] and [L, D], the student's vectors of the same, unit norm.
            positive_B: int64 [B], column of the sampled positive.
            mask_BL: bool [B, L], true for every true or ignored label.
        """
        x, z = x_BD.float(), z_LD.float()
        oracle_x, oracle_z = _rows(self.oracle.documents, documents, x), _rows(self.oracle.labels, labels, z)
        terms: dict[str, Callable[[], Tensor]] = {
            ALIGN_DOCUMENTS: lambda: self.triplet(oracle_x @ z.T, positive_B, mask_BL),
            ALIGN_LABELS: lambda: self.triplet(x @ oracle_z.T, positive_B, mask_BL),
            MATCH_DOCUMENTS: lambda: self._apart(x, oracle_x),
            MATCH_LABELS: lambda: self._apart(z, oracle_z),
        }
        return {name: term() for name, term in terms.items() if self.weights[name] > 0}

    def _apart(self, ours_nD: Tensor, theirs_nD: Tensor) -> Tensor:
        difference_nD = ours_nD - theirs_nD
        if self.distance == "mse":
            return difference_nD.square().mean()
        norm_n: Tensor = torch.linalg.vector_norm(difference_nD, dim=1)
        return norm_n.mean()


def _rows(table: NDArray[np.float16], rows: NDArray[np.int64], like: Tensor) -> Tensor:
    """Rows of a table that may lie on the disk: float32 [rows, D], on the device of `like`."""
    return torch.from_numpy(table[rows].astype(np.float32)).to(like.device)
