"""Prune-and-retrain rounds (R-ICLR B).

A round embeds documents, labels and anchors with the current encoder, keeps the edges whose cosine exceeds the
threshold, and trains a few epochs on what is left. The *original* graph is pruned each time, so edges can come back;
masks always come from the unpruned graph, so a removed edge never turns into a negative.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.base.sampling import keyed_rng
from ramen.config import Pruning
from ramen.errors import warn
from ramen.graph.metadata import Graph
from ramen.graph.pruning import Looked, edge_cosines, jaccard, lonely_rows, prune, random_cosines
from ramen.training.session import SIDE_NAMES, Session

RANDOM_PAIRS = 100_000
"""Pairs from which a quantile of random cosines is taken: its error is far below a hundredth."""

WARN_BELOW = 0.001
"""A round that removes a smaller share of a graph's edges than this is reported: the threshold may be too weak."""


class Rounds:
    """Runs the rounds of a session.

    Attributes:
        pruned: the graphs positives are sampled from; set -> side -> graph.
    """

    def __init__(self, session: Session, pruning: Pruning) -> None:
        self.session, self.settings = session, pruning
        self.pruned: Mapping[str, Mapping[str, Graph]] = session.graphs
        self.position = session.trainer.position

    def run(self) -> None:
        """Run rounds until the epochs are spent."""
        session, settings = self.session, self.settings
        self.position = session.trainer.position
        track = session.track
        first_epoch = sum(record["phase"] == "warmup" for record in self.position.history)
        every, most = session.plan.at_least(settings.every), session.plan.most
        while self.position.epoch < most and not session.plan.ended(self.position):
            session.plan.review(self.position)  # what trains to the end is not pruned again
            decaying = self.position.decay_start >= 0
            middle = self.position.round > 0 and (
                decaying or self.position.epoch < first_epoch + self.position.round * every
            )
            number = self.position.round if middle else self.position.round + 1
            with track.child(f"round-{number}", {"ramen.round": str(number)}) as child:
                if not middle:
                    self._begin(number)
                if not decaying:
                    session.train("retrain", min(first_epoch + number * every, most))
                if self.position.decay_start >= 0:
                    session.train("retrain", most)
                self.position.rounds[-1]["val_p_at_1"] = self.position.history[-1]["val_p_at_1"]
                child.log(self._round_metrics(self.position.rounds[-1]) | session.last_metrics())

    def _begin(self, number: int) -> None:
        """Prune unless settled or switched off, record the round, save: a retry starts after the pruning."""
        previous = self.position.rounds[-1] if self.position.rounds else None
        converged = bool(previous and previous["converged"]) or self._exhausted()
        similarity: dict[str, float] = dict(previous["jaccard"]) if previous and converged else {}
        thresholds: dict[str, float] = dict(previous["thresholds"]) if previous and converged else {}
        if (
            self.settings.enabled
            and not converged
            and any(any(sides.values()) for sides in self.session.active.values())
        ):
            before = self.pruned
            thresholds = self._prune()
            similarity = {key: jaccard(graph, before[name][side]) for name, side, key, graph in self._each(self.pruned)}
            converged = number > 1 and min(similarity.values()) > self.settings.converged_at
        self.position.round = number
        self.position.rounds.append(
            {
                "round": number,
                "epoch": self.position.epoch,
                "edges_kept": self.kept(),
                "lonely_rows": {
                    key: lonely_rows(self.session.graphs[name][side], graph)
                    for name, side, key, graph in self._each(self.pruned)
                },
                "jaccard": similarity,
                "thresholds": thresholds,
                "converged": converged,
                "val_p_at_1": None,
            }
        )
        self.session.track.curve(self._edges_kept(self.position.rounds[-1]), step=self.position.global_step)
        self.session.use_graphs(self.pruned)
        self.session.extra_arrays = {
            f"{name}/{side}": membership(self.session.graphs[name][side], graph)
            for name, side, _, graph in self._each(self.pruned)
        }
        self.session.save()

    def _prune(self) -> dict[str, float]:
        """Prune every graph; returns the cosine that an edge had to exceed, by "set.side"."""
        vectors = self._embed()
        start = self.pruned if self.settings.from_previous else self.session.graphs
        pruned: dict[str, dict[str, Graph]] = {name: {} for name in start}
        thresholds: dict[str, float] = {}
        for name, side, key, graph in self._each(start):
            rows = vectors["documents" if side == "train" else "labels"]
            cosines = edge_cosines(graph, rows, vectors[f"anchors/{name}"])
            thresholds[key] = self._threshold(key, graph, rows, vectors[f"anchors/{name}"])
            pruned[name][side] = prune(graph, cosines, thresholds[key])
        self.pruned = pruned
        self._report(start, thresholds)
        return thresholds

    def _threshold(self, key: str, graph: Graph, rows: Looked, anchors: Looked) -> float:
        """The cosine that an edge of a graph must exceed."""
        if self.settings.rule == "threshold" or not graph.num_edges:
            return self.settings.threshold
        rng = keyed_rng(self.session.training.seed, f"pruning/{key}", self.position.round)
        random = random_cosines(graph, rows, anchors, RANDOM_PAIRS, rng)
        return float(np.quantile(random, self.settings.quantile)) if len(random) else -1.0

    def _report(self, start: Mapping[str, Mapping[str, Graph]], thresholds: Mapping[str, float]) -> None:
        removed = {
            key: 1 - self.pruned[name][side].num_edges / graph.num_edges
            for name, side, key, graph in self._each(start)
            if graph.num_edges
        }
        if not removed:
            return
        shares = " ".join(f"{key} {share:.1%} (cosine <= {thresholds[key]:.3f})" for key, share in removed.items())
        print(f"pruned {shares}", file=sys.stderr, flush=True)
        if idle := [key for key, share in removed.items() if share < WARN_BELOW]:
            knob = "quantile" if self.settings.rule == "quantile" else "threshold"
            warn(
                f"pruning.{knob} {getattr(self.settings, knob):g} removes almost nothing from "
                f"{', '.join(idle)}; raise it, or train longer before pruning"
            )

    def _embed(self) -> dict[str, Looked]:
        """Vectors of every role, each distinct text encoded once; those of anchors without an edge mean nothing."""
        texts = self.session.texts
        roles = texts.roles
        used = np.zeros(len(texts.store), bool)
        used[roles["documents"]] = used[roles["labels"]] = True
        for name, _, _, graph in self._each(self.session.graphs):
            used[roles[f"anchors/{name}"][graph.indices]] = True
        numbers = np.flatnonzero(used)
        place = np.zeros(len(texts.store), np.int64)
        place[numbers] = np.arange(len(numbers))
        vectors = self.session.embed(numbers)
        return {role: Looked(vectors, place[items]) for role, items in roles.items()}

    @staticmethod
    def _each(graphs: Mapping[str, Mapping[str, Graph]]) -> list[tuple[str, str, str, Graph]]:
        """(set, side, "set.document" or "set.label", graph) of every graph."""
        return [
            (name, side, f"{name}.{SIDE_NAMES[side]}", graph)
            for name, sides in graphs.items()
            for side, graph in sides.items()
        ]

    def kept(self) -> dict[str, float]:
        """Share of the unpruned edges that are left, by "set.side"."""
        return {
            key: graph.num_edges / max(self.session.graphs[name][side].num_edges, 1)
            for name, side, key, graph in self._each(self.pruned)
        }

    def _exhausted(self) -> bool:
        """Validation has not improved for `patience` rounds (the warm-up counts as round 0)."""
        patience, rounds = self.settings.patience, self.position.rounds
        scores = [record["val_p_at_1"] for record in rounds]
        if not patience or len(rounds) < patience or None in scores:
            return False
        warm = [record["val_p_at_1"] for record in self.position.history if record["phase"] == "warmup"]
        earlier = ([warm[-1]] if warm and warm[-1] is not None else []) + scores[:-patience]
        return bool(earlier) and max(scores[-patience:]) <= max(earlier)

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Take up the pruned graphs of a checkpoint."""
        self.session.extra_arrays = arrays
        if arrays:
            self.pruned = {
                name: {side: graph.select(arrays[f"{name}/{side}"]) for side, graph in sides.items()}
                for name, sides in self.session.graphs.items()
            }
            self.session.use_graphs(self.pruned)

    def counts(self) -> dict[str, Any]:
        """Facts for the manifest of `pruned_graph`."""
        return {
            "rounds": len(self.position.rounds),
            "edges_kept": self.kept(),
            "edges": {key: graph.num_edges for _, _, key, graph in self._each(self.pruned)},
        }

    def metrics(self) -> dict[str, float]:
        """Headline metrics of the stage."""
        last = self._round_metrics(self.position.rounds[-1]) if self.position.rounds else {}
        return {"rounds": float(len(self.position.rounds)), **last}

    @staticmethod
    def _edges_kept(record: Mapping[str, Any]) -> dict[str, float]:
        return {f"edges_kept/{key}": 100.0 * value for key, value in record["edges_kept"].items()}

    @staticmethod
    def _round_metrics(record: Mapping[str, Any]) -> dict[str, float]:
        metrics = Rounds._edges_kept(record)
        metrics |= {f"lonely_rows/{key}": 100.0 * value for key, value in record["lonely_rows"].items()}
        metrics |= {f"jaccard/{key}": value for key, value in record["jaccard"].items()}
        metrics |= {f"threshold/{key}": value for key, value in record["thresholds"].items()}
        if record["val_p_at_1"] is not None:
            metrics["round/val_p_at_1"] = record["val_p_at_1"]
        return metrics


def membership(whole: Graph, part: Graph) -> NDArray[np.bool_]:
    """Which edges of `whole` are in `part` (a subset of it): bool [edges of whole]."""
    columns = whole.shape[1]
    return np.isin(
        whole.rows().astype(np.int64) * columns + whole.indices,
        part.rows().astype(np.int64) * columns + part.indices,
        assume_unique=True,
    )
