"""Prune-and-retrain rounds (R-ICLR B).

A round embeds documents, labels and anchors with the current encoder, keeps the edges whose cosine exceeds the
threshold, and trains a few epochs on the remaining edges. Each round prunes the *original* graph, so edges can come
back. Masks always come from the unpruned graph, so a removed edge never becomes a negative.

A round evaluates only edges that its steps can draw, and embeds only their ends: no edges of held-out documents, of a
side without a regulariser, or beyond a sample of a row with thousands of edges. An edge that was never evaluated stays
in the pruned graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.config import ObjectiveConfig, PruningConfig
from ramen.console import report, warn
from ramen.data.dataset import Side
from ramen.graph.metadata import Graph, Graphs, sampling_weights
from ramen.graph.pruning import IndexedVectors, edge_cosines, isolated_share, random_cosines, sample_row_edges
from ramen.sampling import keyed_rng
from ramen.training.checkpoint import TrainingState
from ramen.training.trainer import Trainer

RANDOM_PAIRS = 100_000
"""Random pairs from which a quantile of cosines is estimated: its error is far below a hundredth."""

ARRAYS = ("kept", "now", "ever")
"""Arrays of `EdgeDecisions` in a checkpoint."""

EDGES_PER_DRAW = 2
"""Edges evaluated per draw that a row may expect in a round: a third is pruned, and a draw needs a remaining edge."""

CONVERGED_AT = 0.995
"""Pruning stops when the Jaccard similarity of every graph with the previous round exceeds this."""

WARN_BELOW = 0.001
"""Share of removed edges of a graph below which a round warns that the threshold may be too weak."""


@dataclass
class EdgeDecisions:
    """Decisions on the edges of one unpruned graph.

    Attributes:
        kept: bool [E], false for edges that were noise in their last evaluation.
        now: bool [E], evaluated in the last pruning.
        ever: bool [E], evaluated in any pruning.
    """

    kept: NDArray[np.bool_]
    now: NDArray[np.bool_]
    ever: NDArray[np.bool_]

    @classmethod
    def none(cls, graph: Graph) -> EdgeDecisions:
        """No edge was evaluated."""
        return cls(np.ones(graph.num_edges, bool), *(np.zeros(graph.num_edges, bool) for _ in range(2)))

    @property
    def kept_share(self) -> float:
        """Share of the evaluated edges that are kept; 1 if none was evaluated."""
        return float(self.kept[self.ever].mean()) if self.ever.any() else 1.0

    def update(self, evaluated: NDArray[np.bool_], passed: NDArray[np.bool_]) -> float:
        """Record a pruning.

        Args:
            evaluated: bool [E].
            passed: bool [evaluated edges], whether the edge stays.

        Returns:
            Jaccard similarity with the last pruning, over the edges that both evaluated.
        """
        before, both = self.kept.copy(), self.now & evaluated
        self.kept[evaluated], self.now, self.ever = passed, evaluated, self.ever | evaluated
        union = int((before | self.kept)[both].sum())
        return float((before & self.kept)[both].sum()) / union if union else 1.0


class PruningRounds:
    """Prunes and retrains in rounds until training ends.

    Args:
        trainer: with the state of the warm-up, or of a checkpoint of an earlier round.
        settings: section `pruning`.
        objective: section `objective`.

    Attributes:
        decisions: set -> side -> decisions on its edges.
    """

    def __init__(self, trainer: Trainer, settings: PruningConfig, objective: ObjectiveConfig) -> None:
        self.trainer, self.settings, self.objective = trainer, settings, objective
        self.graphs: Graphs = trainer.inputs.graphs
        self.decisions = {
            name: {side: EdgeDecisions.none(graph) for side, graph in sides.items()}
            for name, sides in self.graphs.items()
        }

    @property
    def state(self) -> TrainingState:
        """Counters and records of the trainer."""
        return self.trainer.state

    @property
    def pruned(self) -> dict[str, dict[Side, Graph]]:
        """The graphs without the edges found to be noise."""
        return self._select(lambda decisions: decisions.kept)

    @property
    def drawn(self) -> dict[str, dict[Side, Graph]]:
        """The edges that the last pruning evaluated and kept; all of `pruned` where it evaluated none."""
        return self._select(lambda decisions: decisions.kept & decisions.now if decisions.now.any() else decisions.kept)

    def _select(self, edges: Callable[[EdgeDecisions], NDArray[np.bool_]]) -> dict[str, dict[Side, Graph]]:
        return {
            name: {side: graph.select(edges(self.decisions[name][side])) for side, graph in sides.items()}
            for name, sides in self.graphs.items()
        }

    def run(self) -> None:
        """Run rounds until training ends."""
        trainer, state = self.trainer, self.state
        warmup_epochs = sum(record["phase"] == "warmup" for record in state.history)
        period, max_epochs = trainer.schedule.at_least(self.settings.every), trainer.schedule.max_epochs
        while state.epoch < max_epochs and not state.ended:
            resumed = state.round > 0 and state.epoch < warmup_epochs + state.round * period
            number = state.round if resumed else state.round + 1
            with trainer.track.child(f"round-{number}", {"ramen.round": str(number)}) as child:
                if not resumed:
                    self._start_round(number)
                trainer.train("retrain", min(warmup_epochs + number * period, max_epochs))
                state.rounds[-1]["val_p_at_1"] = state.history[-1]["val_p_at_1"]
                child.log(round_metrics(state.rounds[-1]) | trainer.last_metrics())

    def _start_round(self, number: int) -> None:
        """Prune unless converged or switched off, record the round and save; a resumed run starts after the pruning."""
        state = self.state
        previous = state.rounds[-1] if state.rounds else None
        converged = bool(previous and previous["converged"]) or self._patience_exhausted()
        similarity: dict[str, float] = dict(previous["jaccard"]) if previous and converged else {}
        thresholds: dict[str, float] = dict(previous["thresholds"]) if previous and converged else {}
        if (
            self.settings.rule != "none"
            and not converged
            and any(any(s.values()) for s in self.trainer.inputs.active.values())
        ):
            thresholds, similarity = self._prune(number)
            converged = number > 1 and min(similarity.values(), default=0.0) > CONVERGED_AT
        pruned = self.pruned
        state.round = number
        state.rounds.append(
            {
                "round": number,
                "epoch": state.epoch,
                "edges_kept": self.kept_shares(),
                "lonely_rows": {
                    key: isolated_share(graph, pruned[name][side]) for name, side, key, graph in _each(self.graphs)
                },
                "jaccard": similarity,
                "thresholds": thresholds,
                "converged": converged,
                "val_p_at_1": None,
            }
        )
        curve = {f"graph/{key}": value for key, value in _kept_percentages(state.rounds[-1]).items()}
        self.trainer.track.curve(curve, step=state.global_step)
        self._use_graphs()
        self.trainer.save()

    def _use_graphs(self) -> None:
        """Train on the remaining edges of this pruning; once pruning has converged, on all remaining edges."""
        converged = bool(self.state.rounds and self.state.rounds[-1]["converged"])
        self.trainer.use_graphs(self.pruned if converged else self.drawn)
        self.trainer.pruning_arrays = {
            f"{name}/{side}/{array}": getattr(decisions, array)
            for name, sides in self.decisions.items()
            for side, decisions in sides.items()
            for array in ARRAYS
        }

    def restore(self) -> None:
        """Restore the decisions of a checkpoint that the trainer has resumed from."""
        if arrays := self.trainer.pruning_arrays:
            self.decisions = {
                name: {side: EdgeDecisions(*(arrays[f"{name}/{side}/{array}"] for array in ARRAYS)) for side in sides}
                for name, sides in self.graphs.items()
            }
            self._use_graphs()

    def _prune(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Decide which of the edges that the next round can draw are kept.

        Returns:
            The threshold of the cosine, and the Jaccard similarity with the last pruning, by "set.side".
        """
        evaluated = {
            name: {side: self._drawable(name, side, graph, number) for side, graph in sides.items()}
            for name, sides in self.graphs.items()
        }
        graphs = {
            name: {side: graph.select(evaluated[name][side]) for side, graph in sides.items()}
            for name, sides in self.graphs.items()
        }
        vectors = self._embed_ends(graphs)
        thresholds: dict[str, float] = {}
        similarity: dict[str, float] = {}
        removed: dict[str, float] = {}
        for name, side, key, graph in _each(graphs):
            if not self.trainer.inputs.active[name][side]:
                continue
            rows, anchors = vectors[side.role], vectors[f"anchors/{name}"]
            cosines = edge_cosines(graph, rows, anchors)
            thresholds[key] = self._threshold(key, graph, self.graphs[name][side], rows, anchors)
            passed = cosines > np.float32(thresholds[key])
            similarity[key] = self.decisions[name][side].update(evaluated[name][side], passed)
            if graph.num_edges:
                removed[key] = 1.0 - float(passed.mean())
        self._report(removed, thresholds)
        return thresholds, similarity

    def _drawable(self, name: str, side: Side, graph: Graph, number: int) -> NDArray[np.bool_]:
        """Edges of a graph that steps may draw until the next pruning, bool [E]."""
        inputs = self.trainer.inputs
        if not inputs.active[name][side]:
            return np.zeros(graph.num_edges, bool)
        limit = np.ceil(EDGES_PER_DRAW * (1 + self._expected_draws(side))).astype(np.int64)
        trained = np.zeros(graph.shape[0], bool)
        problem = self.trainer.base.problem
        trained[problem.documents if side is Side.DOCUMENT else problem.labels] = True
        key = int(keyed_rng(self.trainer.settings.seed, f"judged/{name}", number).integers(2**63))
        weights = sampling_weights(self.graphs[name], self.objective.anchor_sampling)
        return sample_row_edges(graph, np.where(trained, limit, 0), weights, key)

    def _expected_draws(self, side: Side) -> NDArray[np.float64]:
        """Expected number of steps of a round that draw an anchor for each document or label."""
        base, sampler = self.trainer.base, self.trainer.sampler
        epochs = self.trainer.schedule.at_least(self.settings.every)
        if side is Side.DOCUMENT:
            return np.full(base.problem.y.shape[0], float(epochs))
        y = base.problem.y[base.problem.documents]
        share = 1.0 / np.maximum(np.diff(y.indptr), 1)
        positive = np.bincount(y.indices, np.repeat(share, np.diff(y.indptr)), minlength=y.shape[1])
        steps = sampler.steps_per_epoch
        random = steps * min(1.0, base.settings.random_labels * sampler.batch_size / max(y.shape[1], 1))
        return np.asarray(np.minimum(epochs * (positive + random), epochs * steps), np.float64)

    def _threshold(
        self, key: str, graph: Graph, unpruned: Graph, rows: IndexedVectors, anchors: IndexedVectors
    ) -> float:
        """The cosine that an edge of a graph must exceed."""
        if self.settings.rule == "threshold" or not graph.num_edges:
            return self.settings.threshold
        rng = keyed_rng(self.trainer.settings.seed, f"pruning/{key}", self.state.round)
        random = random_cosines(graph, rows, anchors, RANDOM_PAIRS, rng, unpruned)
        return float(np.quantile(random, self.settings.quantile)) if len(random) else -1.0

    def _report(self, removed: Mapping[str, float], thresholds: Mapping[str, float]) -> None:
        """Print the removed shares; warn of graphs that lose almost nothing."""
        if not removed:
            return
        shares = " ".join(f"{key} {share:.1%} (cosine <= {thresholds[key]:.3f})" for key, share in removed.items())
        report(f"pruned {shares}")
        if unchanged := [key for key, share in removed.items() if share < WARN_BELOW]:
            knob = "quantile" if self.settings.rule == "quantile" else "threshold"
            warn(
                f"pruning.{knob} = {getattr(self.settings, knob):g} removes almost no edges of {', '.join(unchanged)}; "
                "raise it, or train longer before pruning"
            )

    def _embed_ends(self, graphs: Graphs) -> dict[str, IndexedVectors]:
        """Vectors of both ends of all edges by role, each distinct text encoded once; other items have no vector."""
        texts = self.trainer.inputs.texts
        needed = np.zeros(len(texts.store), bool)
        for name, side, _, graph in _each(graphs):
            needed[texts.roles[side.role][np.diff(graph.indptr) > 0]] = True
            needed[texts.roles[f"anchors/{name}"][graph.indices]] = True
        numbers = np.flatnonzero(needed)
        place = np.zeros(len(texts.store), np.int64)
        place[numbers] = np.arange(len(numbers))
        vectors = self.trainer.embed(numbers)
        return {role: IndexedVectors(vectors, place[items]) for role, items in texts.roles.items()}

    def kept_shares(self) -> dict[str, float]:
        """Share of the evaluated edges that are kept, by "set.side"."""
        return {key: self.decisions[name][side].kept_share for name, side, key, _ in _each(self.graphs)}

    def _patience_exhausted(self) -> bool:
        """Whether held-out P@1 has not improved for `patience` rounds (the warm-up counts as round 0)."""
        patience, rounds = self.settings.patience, self.state.rounds
        scores = [record["val_p_at_1"] for record in rounds]
        if not patience or len(rounds) < patience or None in scores:
            return False
        warmup = [record["val_p_at_1"] for record in self.state.history if record["phase"] == "warmup"]
        earlier = ([warmup[-1]] if warmup and warmup[-1] is not None else []) + scores[:-patience]
        return bool(earlier) and max(scores[-patience:]) <= max(earlier)

    def counts(self) -> dict[str, Any]:
        """Counts for the manifest of `pruned_graph`."""
        return {
            "rounds": len(self.state.rounds),
            "edges_kept": self.kept_shares(),
            "edges": {key: graph.num_edges for _, _, key, graph in _each(self.pruned)},
        }

    def metrics(self) -> dict[str, float]:
        """Headline metrics of the stage."""
        last = round_metrics(self.state.rounds[-1]) if self.state.rounds else {}
        return {"rounds": float(len(self.state.rounds)), **last}


def round_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a round's record."""
    metrics = _kept_percentages(record)
    metrics |= {f"lonely_rows/{key}": 100.0 * value for key, value in record["lonely_rows"].items()}
    metrics |= {f"jaccard/{key}": value for key, value in record["jaccard"].items()}
    metrics |= {f"threshold/{key}": value for key, value in record["thresholds"].items()}
    if record["val_p_at_1"] is not None:
        metrics["round/val_p_at_1"] = record["val_p_at_1"]
    return metrics


def _kept_percentages(record: Mapping[str, Any]) -> dict[str, float]:
    return {f"edges_kept/{key}": 100.0 * value for key, value in record["edges_kept"].items()}


def _each(graphs: Graphs) -> Iterator[tuple[str, Side, str, Graph]]:
    """(set, side, "set.document" or "set.label", graph) of every graph."""
    for name, sides in graphs.items():
        for side, graph in sides.items():
            yield name, side, f"{name}.{side.item}", graph
