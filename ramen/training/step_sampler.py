"""Steps of training: documents, one positive label each, anchors, and masks of the pairs that are no negatives.

All randomness is keyed by (seed, stream, epoch, step) and independent of earlier draws. A step can be rebuilt from its
number alone, so a resumed run needs no sampler state. Switching graphs on or off does not change the documents of a
step or the labels drawn for them; negatives drawn from the graphs replace random labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp

from ramen.base.protocol import BaseAlgorithm
from ramen.config import Sampling
from ramen.data.dataset import Side
from ramen.graph.metadata import Graph, Graphs, sampling_weights
from ramen.objective.regulariser import Links
from ramen.sampling import (
    Bools,
    Ints,
    MembershipMask,
    RowSampler,
    SharedSampler,
    keyed_rng,
    sample_pools,
)
from ramen.training.graph_negatives import GraphNegatives


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of one set in a step.

    Attributes:
        pool: int64 [A], distinct anchors.
        links: side -> links of its items (numpy arrays), for the regularisers that are on.
    """

    pool: Ints
    links: Mapping[Side, Links]


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        documents: int64 [B], training documents.
        labels: int64 [L], distinct labels, ascending.
        positive: int64 [B], column in `labels` of each document's sampled positive.
        mask: bool [B, L], true where a label is no negative of the document (`BaseAlgorithm.known`).
        anchors: set name -> anchors.
    """

    documents: Ints
    labels: Ints
    positive: Ints
    mask: Bools
    anchors: Mapping[str, AnchorBatch] = field(default_factory=dict)


Draws = Mapping[Side, tuple[Ints, Ints]]
"""Side -> (rows with an anchor, their drawn anchors)."""


@dataclass(frozen=True)
class SetSampler:
    """Samples the anchors of one set: positives from the pruned graph, masks from the unpruned graph.

    Attributes:
        name: name of the set.
        draws: side -> sampler of the rows' anchors.
        masks: side -> texts of anchors that are no negatives of a row: the texts of its neighbours in the unpruned
            graph, of its false-negative anchors (`graph.cleaning.false_negative_anchors`), and its own text, since a
            row's edge to itself is removed but its text would remain the nearest.
        texts: int64, text number of each anchor.
    """

    name: str
    draws: Mapping[Side, RowSampler | SharedSampler]
    masks: Mapping[Side, MembershipMask]
    texts: Ints

    @classmethod
    def build(
        cls,
        name: str,
        pruned: Mapping[Side, Graph],
        unpruned: Mapping[Side, Graph],
        active: Mapping[Side, bool],
        sampling: Sampling,
        shared: bool,
        texts: Mapping[str, Ints],
        false_negatives: Mapping[Side, sp.csr_matrix],
    ) -> SetSampler:
        """Build the samplers and masks.

        Args:
            name: name of the set.
            pruned, unpruned: side -> graph.
            active: side -> whether its regulariser is on.
            sampling: how a row's anchor is drawn.
            shared: rows with common neighbours tend to draw the same anchor.
            texts: "documents", "labels" or "anchors/<set>" -> text number of each item.
            false_negatives: side -> CSR items x M.
        """
        weights = sampling_weights(unpruned, sampling)
        draws: dict[Side, RowSampler | SharedSampler] = {}
        for side in (side for side, on in active.items() if on):
            graph = pruned[side]
            if shared:
                draws[side] = SharedSampler(graph.indptr, graph.indices, weights)
            else:
                of_edges = None if weights is None else weights[graph.indices]
                draws[side] = RowSampler(graph.indptr, graph.indices, of_edges)
        anchor_texts = texts[f"anchors/{name}"]
        item_texts = {side: texts[side.role] for side in Side}
        width = 1 + max(int(numbers.max(initial=0)) for numbers in (anchor_texts, *item_texts.values()))
        masks = {}
        for side in draws:
            linked = sp.csr_matrix(unpruned[side].csr() + false_negatives[side])
            known = np.insert(anchor_texts[linked.indices], linked.indptr[1:], item_texts[side])
            pointers = linked.indptr + np.arange(len(linked.indptr), dtype=np.int64)
            masks[side] = MembershipMask(pointers, known.astype(np.int32), width)
        return cls(name, draws, masks, anchor_texts)

    def draw(self, rows: Mapping[Side, Ints], seed: int, position: tuple[int, int]) -> Draws:
        """Draw one anchor per row and side; `rows` maps side -> items of the step."""
        race = int(self.rng(seed, position).integers(2**63))  # the same for both sides
        return {
            side: sampler.draw(rows[side], race)
            if isinstance(sampler, SharedSampler)
            else sampler.draw(rows[side], self.rng(seed, position, f"/{side}"))
            for side, sampler in self.draws.items()
        }

    def rng(self, seed: int, position: tuple[int, int], purpose: str = "") -> np.random.Generator:
        """A generator for this set, one step and one purpose."""
        return keyed_rng(seed, f"anchors/{self.name}{purpose}", *position)

    def batch(self, step: Mapping[Side, Ints], drawn: Draws, pool: Ints, rng: np.random.Generator) -> AnchorBatch:
        """Links of a step to the anchors of `pool`; a row whose anchor is not in the pool has no link.

        Args:
            step: side -> all documents or labels of the step.
            drawn: side -> (places in `step`, anchors).
            pool: int64 [A], ascending.
            rng: chooses a row for each anchor.
        """
        texts, text_of = np.unique(self.texts[pool], return_inverse=True)
        links: dict[Side, Links] = {}
        for side, (places, anchors) in drawn.items():
            inside = np.isin(anchors, pool)
            places, anchors = places[inside], anchors[inside]
            mask = self.masks[side](step[side], texts)[:, text_of]
            positive = np.searchsorted(pool, anchors)
            shuffled = rng.permutation(len(positive))
            columns, first = np.unique(positive[shuffled], return_index=True)
            links[side] = Links(places, positive, mask, columns, places[shuffled[first]])
        return AnchorBatch(pool, links)


class StepSampler:
    """Builds the steps of an epoch.

    Args:
        base: decides the rows of an epoch, their documents and labels, and the negatives.
        batch_size: rows per step; the last step of an epoch may be smaller.
        seed: of all draws.
        shared_draws: anchors are drawn by `SharedSampler`, otherwise for each row independently.
        anchor_budget: largest number of distinct anchors of a step, as a share of its documents and labels; 0 = no
            limit.
        graph_negatives: draws negatives from the graphs, which replace some random labels; or None.
        anchor_sampling: how a row's anchor is drawn.
    """

    def __init__(
        self,
        base: BaseAlgorithm,
        batch_size: int,
        seed: int,
        shared_draws: bool = False,
        anchor_budget: float = 0.0,
        graph_negatives: GraphNegatives | None = None,
        anchor_sampling: Sampling = "inverse_sqrt_degree",
    ) -> None:
        self.base = base
        self.batch_size = batch_size
        self.seed = seed
        self.shared_draws = shared_draws
        self.anchor_budget = anchor_budget
        self.graph_negatives = graph_negatives
        self.anchor_sampling: Sampling = anchor_sampling
        self.sets: list[SetSampler] = []

    def use_graphs(
        self,
        pruned: Graphs,
        unpruned: Graphs,
        active: Mapping[str, Mapping[Side, bool]],
        texts: Mapping[str, Ints],
        false_negatives: Mapping[str, Mapping[Side, sp.csr_matrix]],
    ) -> None:
        """Draw anchors from `pruned` graphs; mask with `unpruned` graphs and false negatives.

        Args:
            pruned, unpruned: set -> side -> graph.
            active: set -> side -> whether its regulariser is on.
            texts: "documents", "labels" or "anchors/<set>" -> text number of each item.
            false_negatives: set -> side -> CSR items x M.
        """
        self.sets = [
            SetSampler.build(
                name,
                pruned[name],
                unpruned[name],
                active[name],
                self.anchor_sampling,
                self.shared_draws,
                texts,
                false_negatives[name],
            )
            for name in sorted(pruned)
            if any(active[name].values())
        ]

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; a last step of a single row has no negatives and is dropped."""
        full, rest = divmod(self.base.rows, self.batch_size)
        return full + (rest > 1)

    def epoch_order(self, epoch: int) -> Ints:
        """Rows of an epoch in order, int64."""
        return self.base.order(keyed_rng(self.seed, "order", epoch))

    def step(self, order: Ints, epoch: int, index: int) -> Step:
        """Step `index` of the epoch with the given `order`."""
        rows = order[index * self.batch_size : (index + 1) * self.batch_size]
        documents, chosen = self.base.pairs(rows, keyed_rng(self.seed, "positives", epoch, index))
        # rare labels are hardly ever sampled positives; as random labels they compete and are regularised, too
        random, from_graphs = self._random_labels((epoch, index)), np.zeros(0, np.int64)
        if self.graph_negatives is not None:
            rng = keyed_rng(self.seed, "graph_negatives", epoch, index)
            from_graphs = self.graph_negatives.draw(documents, len(random), rng)
        regularised = np.union1d(chosen, random[: len(random) - len(from_graphs)])
        mined = self.base.negatives(documents, keyed_rng(self.seed, "negatives", epoch, index))
        labels = np.union1d(regularised, np.concatenate([mined, from_graphs]))
        positive = np.searchsorted(labels, chosen)
        mask = self.base.known(documents, labels)
        anchors = self._anchors({Side.DOCUMENT: documents, Side.LABEL: regularised}, labels, (epoch, index))
        return Step(documents, labels, positive, mask, anchors)

    def _random_labels(self, position: tuple[int, int]) -> Ints:
        """Labels drawn uniformly from all labels that training may see, in random order."""
        labels = self.base.problem.labels
        count = min(round(self.base.settings.random_labels * self.batch_size), len(labels))
        return labels[keyed_rng(self.seed, "random", *position).choice(len(labels), count, replace=False)]

    def _anchors(self, rows: Mapping[Side, Ints], labels: Ints, position: tuple[int, int]) -> dict[str, AnchorBatch]:
        """Anchors of a step.

        Args:
            rows: side -> items that are regularised: documents, and their sampled positives and random labels.
            labels: all labels of the step, sorted.
            position: epoch and step.
        """
        drawn = {sampler.name: sampler.draw(rows, self.seed, position) for sampler in self.sets}
        pools = {name: np.unique(np.concatenate([a for _, a in sides.values()])) for name, sides in drawn.items()}
        if self.anchor_budget:
            limit = int(self.anchor_budget * sum(map(len, rows.values())))
            keys = {s.name: int(s.rng(self.seed, position, "/budget").integers(2**63)) for s in self.sets}
            pools = sample_pools(pools, keys, limit)
        place = {
            Side.DOCUMENT: np.arange(len(rows[Side.DOCUMENT])),
            Side.LABEL: np.searchsorted(labels, rows[Side.LABEL]),
        }
        step = {Side.DOCUMENT: rows[Side.DOCUMENT], Side.LABEL: labels}
        batches = {}
        for s in self.sets:
            at = {side: (place[side][kept], anchors) for side, (kept, anchors) in drawn[s.name].items()}
            rng = s.rng(self.seed, position, "/rows")
            batches[s.name] = s.batch(step, at, pools[s.name], rng)
        return batches
