"""What is in a step: documents, one positive label each, anchors, and the masks of true pairs.

All randomness is keyed by (seed, stream, epoch, step), never by what was drawn before: a step can be rebuilt from
its number alone, so a resumed run needs no sampler state, and switching graphs on or off leaves the documents and
labels of a step untouched.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.base import BaseAlgorithm
from ramen.graph.metadata import Graph

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Sampling = Literal["uniform", "inverse_sqrt_degree"]


def keyed_rng(seed: int, stream: str, *position: int) -> np.random.Generator:
    """A generator that depends on its key only."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), *position])


@dataclass(frozen=True)
class SideLinks:
    """Links of one side to a set's pool: `rows` int64 [R] batch positions with an anchor, `positive` int64 [R]
    columns, `mask` bool [R, A]."""

    rows: Ints
    positive: Ints
    mask: Bools


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of one set in a step: `pool` int64 [A] distinct anchors; links of documents and of labels (None = that
    regulariser is off)."""

    pool: Ints
    document: SideLinks | None
    label: SideLinks | None


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        documents: int64 [B] training documents.
        labels: int64 [L] distinct chosen labels.
        positive: int64 [B], column in `labels` of each document's sampled positive.
        mask: bool [B, L], true where a label is true for the document, filtered, or has the positive's very text.
        anchors: set name -> `AnchorBatch`.
    """

    documents: Ints
    labels: Ints
    positive: Ints
    mask: Bools
    anchors: Mapping[str, AnchorBatch] = field(default_factory=dict)


class RowSampler:
    """Draws one column per row of a CSR structure, uniformly or by edge weights.

    Args:
        indptr, indices: CSR structure.
        weights: float64 [edges], positive, or None for uniform.
    """

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], weights: NDArray[np.float64] | None = None) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self.cumulative = None if weights is None else np.concatenate([[0.0], np.cumsum(weights)])

    def draw(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw for each of `rows`.

        Returns:
            (positions int64 [R] of the rows that have a column, columns int64 [R]).
        """
        u = rng.random(len(rows))  # drawn for every row, so that an emptied row does not shift the others
        start, stop = self.indptr[rows], self.indptr[rows + 1]
        kept = np.flatnonzero(stop > start)
        start, stop, u = start[kept], stop[kept], u[kept]
        if self.cumulative is None:
            edge = start + (u * (stop - start)).astype(np.int64)
        else:
            low, high = self.cumulative[start], self.cumulative[stop]
            edge = np.searchsorted(self.cumulative, low + u * (high - low), side="right") - 1
        return kept, self.indices[np.clip(edge, start, stop - 1)].astype(np.int64)


class MembershipMask:
    """Looks up which of a batch's columns are linked to which of its rows."""

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], num_columns: int) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self._place = np.full(num_columns, -1, np.int32)  # scratch: column -> position in the batch

    def __call__(self, rows: Ints, columns: Ints) -> Bools:
        """Mask bool [rows, columns] (columns distinct), true where the pair is stored."""
        mask = np.zeros((len(rows), len(columns)), bool)
        start = self.indptr[rows]
        counts = self.indptr[rows + 1] - start
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._place[columns] = np.arange(len(columns), dtype=np.int32)
        place = self._place[self.indices[start[owner] + within]]
        self._place[columns] = -1
        hit = place >= 0
        mask[owner[hit], place[hit]] = True
        return mask


@dataclass(frozen=True)
class SetSampler:
    """Samples the anchors of one set: positives from the pruned graph, masks from the unpruned one."""

    name: str
    draws: Mapping[str, RowSampler]
    masks: Mapping[str, MembershipMask]

    @classmethod
    def build(
        cls,
        name: str,
        pruned: Mapping[str, Graph],
        unpruned: Mapping[str, Graph],
        sides: Mapping[str, bool],
        sampling: Sampling,
    ) -> SetSampler:
        """`sides`: graph side ("train", "labels") -> whether its regulariser is on."""
        num_anchors = next(iter(unpruned.values())).shape[1]
        degree = sum(np.bincount(graph.indices, minlength=num_anchors) for graph in unpruned.values())
        draws, masks = {}, {}
        for side in (side for side, on in sides.items() if on):
            graph = pruned[side]
            weights = None
            if sampling == "inverse_sqrt_degree":
                weights = 1.0 / np.sqrt(np.maximum(degree, 1))[graph.indices]
            draws[side] = RowSampler(graph.indptr, graph.indices, weights)
            masks[side] = MembershipMask(unpruned[side].indptr, unpruned[side].indices, num_anchors)
        return cls(name, draws, masks)

    def sample(self, rows: Mapping[str, Ints], seed: int, position: tuple[int, int], separate: bool) -> AnchorBatch:
        """Draw one anchor per row and side; `rows` maps side -> items of the batch."""
        drawn = {
            side: draw.draw(rows[side], keyed_rng(seed, f"anchors/{self.name}/{side}", *position))
            for side, draw in self.draws.items()
        }
        pool = np.unique(np.concatenate([anchors for _, anchors in drawn.values()] or [np.zeros(0, np.int64)]))
        links: dict[str, SideLinks | None] = {"train": None, "labels": None}
        for side, (kept, anchors) in drawn.items():
            mask = self.masks[side](rows[side][kept], pool)
            if separate:
                mask |= ~np.isin(pool, anchors)[None, :]
            links[side] = SideLinks(kept, np.searchsorted(pool, anchors), mask)
        return AnchorBatch(pool, links["train"], links["labels"])


class StepSampler:
    """Builds the steps of an epoch.

    Args:
        base: decides the order of the documents.
        documents: int64 [n] training documents (validation left out).
        y: CSR N x L, true labels.
        ignore: CSR N x L, pairs that are neither positive nor negative.
        label_texts: int64 [L], text number of each label (equal = identical text).
        batch_size: documents per step; the last step of an epoch may be smaller.
        seed: of all draws.
        separate_pools: each side's negatives are its own anchors only.
    """

    def __init__(
        self,
        base: BaseAlgorithm,
        documents: Ints,
        y: sp.csr_matrix,
        ignore: sp.csr_matrix,
        label_texts: Ints,
        batch_size: int,
        seed: int,
        separate_pools: bool = False,
    ) -> None:
        self.base = base
        has_label = np.diff(y.indptr)[documents] > 0
        self.documents = documents[has_label]
        self.batch_size = batch_size
        self.seed = seed
        self.separate_pools = separate_pools
        self.label_texts = label_texts
        self.positives = RowSampler(y.indptr, y.indices)
        masked = (y + ignore).tocsr()
        self.mask = MembershipMask(masked.indptr, masked.indices, y.shape[1])
        self.sets: list[SetSampler] = []

    def use_graphs(
        self,
        pruned: Mapping[str, Mapping[str, Graph]],
        unpruned: Mapping[str, Mapping[str, Graph]],
        on: Mapping[str, Mapping[str, bool]],
        sampling: Sampling,
    ) -> None:
        """Sample anchors from `pruned`, mask with `unpruned`; `on[set][side]` says which regularisers are on."""
        self.sets = [
            SetSampler.build(name, pruned[name], unpruned[name], on[name], sampling)
            for name in sorted(pruned)
            if any(on[name].values())
        ]

    @property
    def steps_per_epoch(self) -> int:
        """A last step of a single document has no negatives and is dropped."""
        full, rest = divmod(len(self.documents), self.batch_size)
        return full + (rest > 1)

    def epoch_order(self, epoch: int) -> Ints:
        """The epoch's documents in order, int64 [n]."""
        return self.base.order(self.documents, keyed_rng(self.seed, "order", epoch))

    def step(self, order: Ints, epoch: int, index: int) -> Step:
        """Step `index` of the epoch whose `order` is given."""
        documents = order[index * self.batch_size : (index + 1) * self.batch_size]
        _, chosen = self.positives.draw(documents, keyed_rng(self.seed, "positives", epoch, index))
        labels, positive = np.unique(chosen, return_inverse=True)
        mask = self.mask(documents, labels)
        texts = self.label_texts[labels]
        mask |= texts[None, :] == texts[positive][:, None]
        rows = {"train": documents, "labels": labels}
        anchors = {
            sampler.name: sampler.sample(rows, self.seed, (epoch, index), self.separate_pools) for sampler in self.sets
        }
        return Step(documents, labels, positive.astype(np.int64), mask, anchors)
