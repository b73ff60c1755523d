"""Stage `build-graph`: clean the raw metadata graphs, walk them, write what is trained on."""

from __future__ import annotations

import sys

from ramen.artifacts import Artifact, Draft
from ramen.config import WalkConfig
from ramen.console import warn
from ramen.data.dataset import Dataset
from ramen.graph.build import build_set
from ramen.graph.metadata import Graph, write_graphs
from ramen.tracking import Tracker

HUBS_SHARE = 0.75
"""More of a set's edges than this lost to `walk.hub_cap` is worth a warning."""


def build_graph(*, dataset: Artifact, graph: Draft, walk: WalkConfig, track: Tracker) -> dict[str, float]:
    """Build the graphs of every anchor set.

    Returns:
        Edges before, after cleaning and after walking as `<set>/<side>/<state>`, and what was removed.
    """
    problem = Dataset.read(dataset.path)
    graphs: dict[str, dict[str, Graph]] = {}
    metrics: dict[str, float] = {}
    for name, anchors in problem.anchor_sets.items():
        built = build_set(
            anchors, walk, documents=problem.train, labels=problem.labels, test=problem.test,
            y_train=problem.y_train, unseen=problem.unseen, name=name,
        )  # fmt: skip
        graphs[name] = built.graphs
        graph.counts[name] = built.counts
        metrics |= {f"{name}/{key}": float(value) for key, value in built.counts.items()}
        print(f"build-graph {name} {_summary(built.counts)}", file=sys.stderr, flush=True)
        _warn(name, built.counts, walk)
    write_graphs(graph.path, graphs)
    return metrics


def _warn(name: str, counts: dict[str, int], walk: WalkConfig) -> None:
    """Training goes on without a set that is empty, or whose anchors are all hubs: better that somebody knows."""
    edges, hubs = counts["train/raw"] + counts["labels/raw"], counts.get("hub_edges", 0)
    if not edges:
        warn(f"anchor set {name}: no edges")
    elif hubs > HUBS_SHARE * edges:
        cap = f"{counts['hub_anchors']} anchors that have more than walk.hub_cap = {walk.hub_cap}"
        told = f"{hubs} of {edges} edges are left out, those of {cap}; raise it if they say something"
        warn(f"anchor set {name}: {told}")


def _summary(counts: dict[str, int]) -> str:
    return " ".join(f"{key.replace('/', ' ')} {value}" for key, value in counts.items())
