"""Loss terms of an oracle that guides the student (MOGIC, M-blog).

The oracle is a dual encoder that reads metadata in addition to the texts. Its vectors are computed once and stay fixed.
The student's documents must rank the oracle's labels, the oracle's documents must rank the student's labels, and the
student's vectors are regularised towards the oracle's.

Letters: B documents of a step, L distinct labels of the step, D width.
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
"""The four terms; each name ends with the side whose oracle vectors it uses."""


@dataclass(frozen=True)
class OracleVectors:
    """The oracle's vectors in the order of the dataset, unit norm.

    Attributes:
        documents: float16 [N, D], all training documents.
        labels: float16 [L, D].
    """

    documents: NDArray[np.float16]
    labels: NDArray[np.float16]


@dataclass(frozen=True)
class Guidance:
    """Computes the terms of a step that have a positive weight.

    Attributes:
        oracle: the oracle's vectors; they get no gradient.
        triplet: loss of the two ranking terms, the same as of the regularisers.
        distance: distance of the two matching terms. "l2": mean norm of the differences (as in the paper, with a mean
            over rows instead of a sum, so that a weight has the same effect at every batch size); "mse": mean squared
            difference over all elements (as in the released code).
        weights: term -> weight; terms with weight 0 are not computed.
    """

    oracle: OracleVectors
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
        """Compute the terms without their weights.

        Args:
            documents, labels: int64 [B] and [L], rows of the oracle's tables.
            x_BD, z_LD: float [B, D] and [L, D], the student's vectors of these documents and labels, unit norm.
            positive_B: int64 [B], column of the sampled positive.
            mask_BL: bool [B, L], true for every true or ignored label.

        Returns:
            Term -> float32 scalar.
        """
        x, z = x_BD.float(), z_LD.float()
        oracle_x, oracle_z = _rows(self.oracle.documents, documents, x), _rows(self.oracle.labels, labels, z)
        terms: dict[str, Callable[[], Tensor]] = {
            ALIGN_DOCUMENTS: lambda: self.triplet(oracle_x @ z.T, positive_B, mask_BL),
            ALIGN_LABELS: lambda: self.triplet(x @ oracle_z.T, positive_B, mask_BL),
            MATCH_DOCUMENTS: lambda: self._mean_distance(x, oracle_x),
            MATCH_LABELS: lambda: self._mean_distance(z, oracle_z),
        }
        return {name: term() for name, term in terms.items() if self.weights[name] > 0}

    def _mean_distance(self, student_nD: Tensor, oracle_nD: Tensor) -> Tensor:
        difference_nD = student_nD - oracle_nD
        if self.distance == "mse":
            return difference_nD.square().mean()
        norm_n: Tensor = torch.linalg.vector_norm(difference_nD, dim=1)
        return norm_n.mean()


def _rows(table: NDArray[np.float16], rows: NDArray[np.int64], like: Tensor) -> Tensor:
    """Read rows of a table that may be memory-mapped: float32 [rows, D], on the device of `like`."""
    return torch.from_numpy(table[rows].astype(np.float32)).to(like.device)
