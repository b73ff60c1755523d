"""What a base algorithm may know, and what it may decide.

`BaseAlgorithm` is the plain in-batch triplet: documents in uniform random order, one positive label each, the other
documents' labels as negatives. Every other base algorithm overrides the decisions in which it differs, and none of them
knows of graphs: RAMEN adds anchors and graph negatives to the step and regularisers to the loss, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.config import BaseConfig
from ramen.objective.triplet import Triplet
from ramen.sampling import Ints, MembershipMask, RowSampler

Vectors = NDArray[np.float32]
Embed = Callable[[Literal["documents", "labels"]], Vectors]
"""Embeds all N training documents or all L labels with the encoder as it is: float32 [N or L, D], unit norm."""


@dataclass(frozen=True)
class LabelProblem:
    """What a base algorithm is told.

    Attributes:
        documents: int64 [n] training documents that have a label, ascending.
        y: CSR N x L, true labels.
        ignore: CSR N x L, pairs that are neither positive nor negative.
        label_texts: int64 [L], text number of each label (equal = identical text).
        document_texts: int64 [N], text number of each document, numbered as those of the labels.
        batch_size: rows of a step.
        dimension: D, width of the vectors.
        seed: of everything drawn outside a step.
        unseen: int64, labels that no step may have (zero-shot).
    """

    documents: Ints
    y: sp.csr_matrix
    ignore: sp.csr_matrix
    label_texts: Ints
    document_texts: Ints
    batch_size: int
    dimension: int = 0
    seed: int = 0
    unseen: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def labels(self) -> Ints:
        """Labels that may be in a step, int64 ascending."""
        return np.setdiff1d(np.arange(self.y.shape[1]), self.unseen)

    @cached_property
    def known_texts(self) -> sp.csr_matrix:
        """CSR N x texts, ones: labels that read so are no negatives of a document.

        The texts of its true and ignored labels and its own. Labels of the same text cannot be told apart, and one that
        reads as the document would be the nearest wrong one for ever: titles repeat in Amazon's data.
        """
        count = 1 + int(max(self.label_texts.max(initial=0), self.document_texts.max(initial=0)))
        known = (self.y + self.ignore) @ _one_hot(self.label_texts, count) + _one_hot(self.document_texts, count)
        known = sp.csr_matrix(known)
        known.sort_indices()
        known.data[:] = 1
        return known


def _one_hot(columns: Ints, width: int) -> sp.csr_matrix:
    """A one in each row's column: CSR [rows, width]."""
    rows = len(columns)
    return sp.csr_matrix((np.ones(rows, np.float32), columns, np.arange(rows + 1)), shape=(rows, width))


class BaseAlgorithm:
    """The in-batch triplet, and the contract of every base algorithm.

    Whatever `refresh` computes must come back from `state`, as arrays: it becomes part of the checkpoints.

    Args:
        problem: documents, labels and what is known of their pairs.
        settings: section `base`.
        triplet: the task loss in its common reduction.
    """

    def __init__(self, problem: LabelProblem, settings: BaseConfig, triplet: Triplet) -> None:
        self.problem, self.settings, self.triplet = problem, settings, triplet
        self._positives = RowSampler(problem.y.indptr, problem.y.indices)
        known = problem.known_texts
        self._known = MembershipMask(known.indptr, known.indices, known.shape[1])

    documents_per_row = 1
    """Documents of a step per row of it."""

    @property
    def rows(self) -> int:
        """Rows of an epoch: what `order` permutes."""
        return len(self.problem.documents)

    def order(self, rng: np.random.Generator) -> Ints:
        """One epoch's rows, int64 [rows]; consecutive ones share a step. `rng` is keyed by seed and epoch."""
        return rng.permutation(self.problem.documents)

    def pairs(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Documents int64 [B] of a step and one sampled positive label of each, int64 [B]."""
        return rows, self._positives.draw(rows, rng)[1]

    def negatives(self, documents: Ints, rng: np.random.Generator) -> Ints:
        """Further labels that compete in the step, int64, repeats allowed."""
        return np.zeros(0, np.int64)

    def known(self, documents: Ints, labels: Ints) -> NDArray[np.bool_]:
        """Bool [B, L]: pairs that are no negatives: true, to be ignored, or told apart by nothing (`known_texts`)."""
        texts, place = np.unique(self.problem.label_texts[labels], return_inverse=True)
        return np.asarray(self._known(documents, texts)[:, place])

    def label_vectors(self, encoded_LD: Tensor, labels: Ints) -> Tensor:
        """Vectors by which labels are ranked, float32 [L, D] unit norm, from what the encoder says of their texts."""
        return encoded_LD

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        """Task loss.

        Args:
            scores_BL: float [B, L], cosines of the step's documents and its labels.
            positive_B: int64 [B], column of the sampled positive.
            mask_BL: bool [B, L], true for every label that is no negative (`known`).

        Returns:
            float32 scalar.
        """
        return self.triplet(scores_BL, positive_B, mask_BL)

    def refresh_due(self, epoch: int) -> bool:
        """Whether `refresh` is to be called before epoch `epoch` (0 = the first)."""
        return False

    def refresh(self, epoch: int, embed: Embed) -> None:
        """Look at the current encoder: cluster, or mine."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """What `refresh` computed, as arrays; for checkpoints."""
        return {}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Take up what `state` gave."""

    @property
    def module(self) -> nn.Module | None:
        """Parameters of its own, trained beside the encoder's; None = it has none."""
        return None

    @property
    def classifies(self) -> bool:
        """Whether a classifier per label follows the encoder (the second stage, M2)."""
        return False


def every(epoch: int, first: int, period: int) -> bool:
    """Whether `epoch` is `first` or a whole number of periods later."""
    return epoch >= first and (epoch - first) % period == 0
