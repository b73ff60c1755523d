"""The interface of base algorithms, and the data they receive.

`BaseAlgorithm` is the plain in-batch triplet: documents in uniform random order, one positive label each, the other
documents' labels as negatives. Other base algorithms override the methods in which they differ. They do not use graphs:
RAMEN adds anchors and graph negatives to the step, and regularisers to the loss.
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
"""Encodes all N training documents or all L labels with the current encoder: float32 [N or L, D], unit norm."""


@dataclass(frozen=True)
class LabelProblem:
    """Documents, labels and their pairs, as a base algorithm receives them.

    Attributes:
        documents: int64 [n] ascending, training documents with a label.
        y: CSR N x L, true labels.
        ignore: CSR N x L, pairs that are neither positive nor negative.
        label_texts: int64 [L], text number of each label; labels with the same text have the same number.
        document_texts: int64 [N], text number of each document, in the same numbering.
        batch_size: rows per step.
        dimension: D, width of the vectors.
        seed: seed of everything sampled outside a step.
        unseen: int64, labels excluded from all steps (zero-shot).
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
        """Labels that steps may contain, int64 ascending."""
        return np.setdiff1d(np.arange(self.y.shape[1]), self.unseen)

    @cached_property
    def known_texts(self) -> sp.csr_matrix:
        """CSR N x texts of ones: labels with these texts are not negatives of the document.

        These are the texts of its true and ignored labels, and its own text. Labels of the same text cannot be
        distinguished, and a label with the document's text would always be its nearest negative: titles repeat in
        Amazon's data.
        """
        count = 1 + int(max(self.label_texts.max(initial=0), self.document_texts.max(initial=0)))
        known = (self.y + self.ignore) @ _one_hot(self.label_texts, count) + _one_hot(self.document_texts, count)
        known = sp.csr_matrix(known)
        known.sort_indices()
        known.data[:] = 1
        return known


def _one_hot(columns: Ints, width: int) -> sp.csr_matrix:
    """Return CSR [rows, width] with a one in the given column of each row."""
    rows = len(columns)
    return sp.csr_matrix((np.ones(rows, np.float32), columns, np.arange(rows + 1)), shape=(rows, width))


class BaseAlgorithm:
    """The in-batch triplet, and the interface of every base algorithm.

    `state` must return everything that `refresh` computes, as arrays, because checkpoints store it.

    Args:
        problem: documents, labels and their pairs.
        settings: section `base`.
        triplet: the task loss.
    """

    def __init__(self, problem: LabelProblem, settings: BaseConfig, triplet: Triplet) -> None:
        self.problem, self.settings, self.triplet = problem, settings, triplet
        self._positives = RowSampler(problem.y.indptr, problem.y.indices)
        known = problem.known_texts
        self._known = MembershipMask(known.indptr, known.indices, known.shape[1])

    documents_per_row = 1
    """Documents in a step per row."""

    @property
    def rows(self) -> int:
        """Number of rows in an epoch."""
        return len(self.problem.documents)

    def order(self, rng: np.random.Generator) -> Ints:
        """Return the rows of an epoch, int64 [rows], in order of their steps. `rng` is keyed by seed and epoch."""
        return rng.permutation(self.problem.documents)

    def pairs(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the documents of a step, int64 [B], and one sampled positive label of each, int64 [B]."""
        return rows, self._positives.draw(rows, rng)[1]

    def negatives(self, documents: Ints, rng: np.random.Generator) -> Ints:
        """Return further candidate labels of the step, int64; may repeat."""
        return np.zeros(0, np.int64)

    def known(self, documents: Ints, labels: Ints) -> NDArray[np.bool_]:
        """Return bool [B, L], true for pairs that are not negatives: true, ignored, or same text (`known_texts`)."""
        texts, column = np.unique(self.problem.label_texts[labels], return_inverse=True)
        return np.asarray(self._known(documents, texts)[:, column])

    def label_vectors(self, encoded_LD: Tensor, labels: Ints) -> Tensor:
        """Return the vectors by which labels are ranked, given those of their texts: float32 [L, D], unit norm."""
        return encoded_LD

    def loss(self, scores_BL: Tensor, positive_B: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the task loss.

        Args:
            scores_BL: float [B, L], cosines of the step's documents and labels.
            positive_B: int64 [B], column of the sampled positive.
            mask_BL: bool [B, L], true for every label that is not a negative (`known`).

        Returns:
            float32 scalar.
        """
        return self.triplet(scores_BL, positive_B, mask_BL)

    def refresh_due(self, epoch: int) -> bool:
        """Return whether `refresh` must be called before epoch `epoch` (0 = the first)."""
        return False

    def refresh(self, epoch: int, embed: Embed) -> None:
        """Cluster or mine with the current encoder."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return what `refresh` computed, as arrays, for checkpoints."""
        return {}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned."""

    @property
    def module(self) -> nn.Module | None:
        """The parameters of the base algorithm, trained together with the encoder's; None = it has none."""
        return None

    @property
    def classifies(self) -> bool:
        """Whether a classifier per label is trained after the encoder (the second stage, M2)."""
        return False


def is_due(epoch: int, first: int, period: int) -> bool:
    """Return whether `epoch` is `first` or a whole number of periods later."""
    return epoch >= first and (epoch - first) % period == 0
