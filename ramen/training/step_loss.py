"""The loss of a training step: task loss, graph regularisers and the terms of an oracle.

Letters: B documents of a step, L its distinct labels, A anchors of a set, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramen.base.protocol import BaseAlgorithm
from ramen.objective.guidance import Guidance
from ramen.objective.regulariser import regulariser, weighted_sum
from ramen.objective.triplet import Triplet
from ramen.training.step_sampler import Step

TASK = "task"
ACCURACY = "accuracy"
"""In-batch accuracy: share of a step's documents whose sampled positive outscores every negative."""


@dataclass
class StepLoss:
    """Computes the terms of a step from its vectors.

    Attributes:
        base: the task loss.
        triplet: the regularisers' loss.
        symmetric: regularise in both directions.
        weights: weight (λ) by term: "task", "<set>.document", "<set>.label", and the oracle's (`guidance.TERMS`).
        guidance: the oracle's terms; None without an oracle.
    """

    base: BaseAlgorithm
    triplet: Triplet
    symmetric: bool
    weights: dict[str, float]
    guidance: Guidance | None = None

    def terms(self, step: Step, vectors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Unweighted terms of a step, and its in-batch accuracy.

        Args:
            step: the documents, labels and anchors of the step.
            vectors: float32 [n, D] of each role: "documents", "labels" and "anchors/<set>".
        """
        x_BD, z_LD = vectors["documents"], vectors["labels"]
        positive_B, mask_BL = _tensor(step.positive, x_BD.device), _tensor(step.mask, x_BD.device)
        ranked_LD = self.base.label_vectors(z_LD, step.labels)
        scores_BL = x_BD @ ranked_LD.T
        terms = {TASK: self.base.loss(scores_BL, positive_B, mask_BL)}
        with torch.no_grad():
            best_B = scores_BL.masked_fill(mask_BL, -2.0).amax(1)
            accuracy = (scores_BL.gather(1, positive_B[:, None])[:, 0] > best_B).float().mean()
        if self.guidance is not None:
            terms |= self.guidance(step.documents, step.labels, x_BD, ranked_LD, positive_B, mask_BL)
        for name, anchors in step.anchors.items():
            a_AD = vectors[f"anchors/{name}"]
            for side, links in anchors.links.items():
                rows = vectors[side.role]
                on_device = links.to(rows.device)
                terms[f"{name}.{side.item}"] = regulariser(rows, a_AD, on_device, self.triplet, self.symmetric)
        return terms, accuracy

    def weighted_sum(self, terms: Mapping[str, Tensor]) -> Tensor:
        """The loss: every term times its weight."""
        return weighted_sum(terms, self.weights)


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
