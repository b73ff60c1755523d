"""Prune-and-retrain rounds (R-ICLR B).

A round embeds documents, labels and anchors with the current encoder, keeps the edges whose cosine exceeds the
threshold, and trains a few epochs on what is left. The *original* graph is pruned each time, so edges can come back;
masks always come from the unpruned graph, so a removed edge never turns into a negative.

Only edges that the round's steps can draw are judged, and only their ends are embedded: not those of held-out
documents, of a side without a regulariser, nor all the thousands of a row from which a step draws one. An edge that
was never judged stays in the pruned graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.config import PruningConfig
from ramen.errors import warn
from ramen.graph.metadata import Graph, drawing_weights
from ramen.graph.pruning import IndexedVectors, drawable_edges, edge_cosines, isolated_share, random_cosines
from ramen.sampling import keyed_rng
from ramen.training.setup import SIDE_NAMES, Session

CONVERGED_AT = 0.995
"""Pruning stops when the Jaccard similarity of every graph with the previous round exceeds this."""

RANDOM_PAIRS = 100_000
"""Pairs from which a quantile of random cosines is taken: its error is far below a hundredth."""

KINDS = ("kept", "now", "ever")
"""Arrays of `Verdicts` in a checkpoint."""

SPARE = 2
"""Edges judged per draw that a row may expect in a round: a third is pruned, and a draw needs one that is left."""

WARN_BELOW = 0.001
"""A round that removes a smaller share of a graph's edges than this is reported: the threshold may be too weak."""


@dataclass
class Verdicts:
    """What pruning knows of the edges of one unpruned graph.

    Attributes:
        kept: bool [E], true unless the edge was judged noise when it was judged last.
        now: bool [E], judged in the last pruning.
        ever: bool [E], judged at all.
    """

    kept: NDArray[np.bool_]
    now: NDArray[np.bool_]
    ever: NDArray[np.bool_]

    @classmethod
    def none(cls, graph: Graph) -> Verdicts:
        """Nothing is judged yet."""
        return cls(np.ones(graph.num_edges, bool), *(np.zeros(graph.num_edges, bool) for _ in range(2)))

    @property
    def share_kept(self) -> float:
        """Share of the judged edges that are kept; 1 if none is judged."""
        return float(self.kept[self.ever].mean()) if self.ever.any() else 1.0

    def update(self, now: NDArray[np.bool_], passed: NDArray[np.bool_]) -> float:
        """Record a pruning of the edges `now`, of which `passed` stay.

        Returns:
            The Jaccard similarity with the last pruning, of the edges that both judged.
        """
        before, both = self.kept.copy(), self.now & now
        self.kept[now], self.now, self.ever = passed, now, self.ever | now
        either = int((before | self.kept)[both].sum())
        return float((before & self.kept)[both].sum()) / either if either else 1.0


class Rounds:
    """Runs the rounds of a session.

    Attributes:
        verdicts: set -> side -> what is known of the edges.
    """

    def __init__(self, session: Session, pruning: PruningConfig) -> None:
        self.session, self.settings = session, pruning
        self.verdicts = {
            name: {side: Verdicts.none(graph) for side, graph in sides.items()}
            for name, sides in session.graphs.items()
        }
        self.position = session.trainer.position

    @property
    def pruned(self) -> dict[str, dict[str, Graph]]:
        """The graphs without the edges that were judged noise."""
        return self._select(lambda verdict: verdict.kept)

    @property
    def drawn(self) -> dict[str, dict[str, Graph]]:
        """The edges that the last pruning judged and kept; all of `pruned` where it judged none."""
        return self._select(lambda verdict: verdict.kept & verdict.now if verdict.now.any() else verdict.kept)

    def _select(self, edges: Callable[[Verdicts], NDArray[np.bool_]]) -> dict[str, dict[str, Graph]]:
        return {
            name: {side: graph.select(edges(self.verdicts[name][side])) for side, graph in sides.items()}
            for name, sides in self.session.graphs.items()
        }

    def run(self) -> None:
        """Run rounds until the epochs are spent."""
        session, settings = self.session, self.settings
        self.position = session.trainer.position
        track = session.track
        first_epoch = sum(record["phase"] == "warmup" for record in self.position.history)
        every, most = session.plan.at_least(settings.every), session.plan.most
        while self.position.epoch < most and not self.position.ended:
            middle = self.position.round > 0 and self.position.epoch < first_epoch + self.position.round * every
            number = self.position.round if middle else self.position.round + 1
            with track.child(f"round-{number}", {"ramen.round": str(number)}) as child:
                if not middle:
                    self._begin(number)
                session.train("retrain", min(first_epoch + number * every, most))
                self.position.rounds[-1]["val_p_at_1"] = self.position.history[-1]["val_p_at_1"]
                child.log(self._round_metrics(self.position.rounds[-1]) | session.last_metrics())

    def _begin(self, number: int) -> None:
        """Prune unless settled or switched off, record the round, save: a retry starts after the pruning."""
        previous = self.position.rounds[-1] if self.position.rounds else None
        converged = bool(previous and previous["converged"]) or self._exhausted()
        similarity: dict[str, float] = dict(previous["jaccard"]) if previous and converged else {}
        thresholds: dict[str, float] = dict(previous["thresholds"]) if previous and converged else {}
        prunes = self.settings.rule != "none" and not converged
        if prunes and any(any(sides.values()) for sides in self.session.active.values()):
            thresholds, similarity = self._prune(number)
            converged = number > 1 and min(similarity.values(), default=0.0) > CONVERGED_AT
        pruned = self.pruned
        self.position.round = number
        self.position.rounds.append(
            {
                "round": number,
                "epoch": self.position.epoch,
                "edges_kept": self.kept(),
                "lonely_rows": {
                    key: isolated_share(graph, pruned[name][side])
                    for name, side, key, graph in self._each(self.session.graphs)
                },
                "jaccard": similarity,
                "thresholds": thresholds,
                "converged": converged,
                "val_p_at_1": None,
            }
        )
        curve = {f"graph/{key}": value for key, value in self._edges_kept(self.position.rounds[-1]).items()}
        self.session.track.curve(curve, step=self.position.global_step)
        self._use()
        self.session.save()

    def _use(self) -> None:
        """Train on what pruning has left; once no more is pruned, on all of it."""
        settled = bool(self.position.rounds and self.position.rounds[-1]["converged"])
        self.session.use_graphs(self.pruned if settled else self.drawn)
        self.session.extra_arrays = {
            f"{name}/{side}/{kind}": getattr(verdict, kind)
            for name, sides in self.verdicts.items()
            for side, verdict in sides.items()
            for kind in KINDS
        }

    def _prune(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Decide which of the edges that the next round can draw are kept.

        Returns:
            The cosine that an edge had to exceed, and the Jaccard similarity with the last pruning, by "set.side".
        """
        judged = {
            name: {side: self._drawable(name, side, graph, number) for side, graph in sides.items()}
            for name, sides in self.session.graphs.items()
        }
        graphs = {
            name: {side: graph.select(judged[name][side]) for side, graph in sides.items()}
            for name, sides in self.session.graphs.items()
        }
        vectors = self._embed(graphs)
        thresholds: dict[str, float] = {}
        similarity: dict[str, float] = {}
        removed: dict[str, float] = {}
        for name, side, key, graph in self._each(graphs):
            if not self.session.active[name][side]:
                continue
            rows = vectors["documents" if side == "train" else "labels"]
            cosines = edge_cosines(graph, rows, vectors[f"anchors/{name}"])
            whole = self.session.graphs[name][side]
            thresholds[key] = self._threshold(key, graph, whole, rows, vectors[f"anchors/{name}"])
            passed = cosines > np.float32(thresholds[key])
            similarity[key] = self.verdicts[name][side].update(judged[name][side], passed)
            if graph.num_edges:
                removed[key] = 1.0 - float(passed.mean())
        self._report(removed, thresholds)
        return thresholds, similarity

    def _drawable(self, name: str, side: str, graph: Graph, number: int) -> NDArray[np.bool_]:
        """Edges of a graph that steps may draw until the next pruning, bool [E]."""
        session = self.session
        if not session.active[name][side]:
            return np.zeros(graph.num_edges, bool)
        most = np.ceil(SPARE * (1 + self._draws(side))).astype(np.int64)
        trained = np.zeros(graph.shape[0], bool)
        problem = session.trainer.base.problem
        trained[problem.documents if side == "train" else problem.labels] = True
        key = int(keyed_rng(session.training.seed, f"judged/{name}", number).integers(2**63))
        weights = drawing_weights(session.graphs[name], session.objective.anchor_sampling)
        return drawable_edges(graph, np.where(trained, most, 0), weights, key)

    def _draws(self, side: str) -> NDArray[np.float64]:
        """How many steps of a round are expected to draw an anchor for each document or label."""
        session, base, sampler = self.session, self.session.trainer.base, self.session.trainer.sampler
        epochs = session.plan.at_least(self.settings.every)
        if side == "train":
            return np.full(base.problem.y.shape[0], float(epochs))
        y = base.problem.y[base.problem.documents]
        share = 1.0 / np.maximum(np.diff(y.indptr), 1)
        positive = np.bincount(y.indices, np.repeat(share, np.diff(y.indptr)), minlength=y.shape[1])
        steps = sampler.steps_per_epoch
        random = steps * min(1.0, base.settings.random_labels * sampler.batch_size / max(y.shape[1], 1))
        return np.asarray(np.minimum(epochs * (positive + random), epochs * steps), np.float64)

    def _threshold(self, key: str, graph: Graph, whole: Graph, rows: IndexedVectors, anchors: IndexedVectors) -> float:
        """The cosine that an edge of a graph must exceed."""
        if self.settings.rule == "threshold" or not graph.num_edges:
            return self.settings.threshold
        rng = keyed_rng(self.session.training.seed, f"pruning/{key}", self.position.round)
        random = random_cosines(graph, rows, anchors, RANDOM_PAIRS, rng, whole)
        return float(np.quantile(random, self.settings.quantile)) if len(random) else -1.0

    def _report(self, removed: Mapping[str, float], thresholds: Mapping[str, float]) -> None:
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

    def _embed(self, graphs: Mapping[str, Mapping[str, Graph]]) -> dict[str, IndexedVectors]:
        """Vectors of every role, each distinct text encoded once; those of items without an edge mean nothing."""
        texts = self.session.texts
        roles = texts.roles
        used = np.zeros(len(texts.store), bool)
        for name, side, _, graph in self._each(graphs):
            used[roles["documents" if side == "train" else "labels"][np.diff(graph.indptr) > 0]] = True
            used[roles[f"anchors/{name}"][graph.indices]] = True
        numbers = np.flatnonzero(used)
        place = np.zeros(len(texts.store), np.int64)
        place[numbers] = np.arange(len(numbers))
        vectors = self.session.embed(numbers)
        return {role: IndexedVectors(vectors, place[items]) for role, items in roles.items()}

    @staticmethod
    def _each(graphs: Mapping[str, Mapping[str, Graph]]) -> list[tuple[str, str, str, Graph]]:
        """(set, side, "set.document" or "set.label", graph) of every graph."""
        return [
            (name, side, f"{name}.{SIDE_NAMES[side]}", graph)
            for name, sides in graphs.items()
            for side, graph in sides.items()
        ]

    def kept(self) -> dict[str, float]:
        """Share of the judged edges that are kept, by "set.side"."""
        return {key: self.verdicts[name][side].share_kept for name, side, key, _ in self._each(self.session.graphs)}

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
        """Restore the verdicts of a checkpoint."""
        self.position = self.session.trainer.position
        if arrays:
            self.verdicts = {
                name: {side: Verdicts(*(arrays[f"{name}/{side}/{kind}"] for kind in KINDS)) for side in sides}
                for name, sides in self.session.graphs.items()
            }
            self._use()

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
