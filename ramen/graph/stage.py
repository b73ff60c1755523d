"""Stage `build-graph`: clean the raw metadata graphs, walk them and write the training graphs."""

from __future__ import annotations

from ramen.artifacts import Artifact, Draft
from ramen.config import WalkConfig
from ramen.console import report, warn
from ramen.data.dataset import Dataset, Side
from ramen.graph.build import build_set
from ramen.graph.metadata import Graph, write_graphs
from ramen.tracking import Tracker

HUBS_SHARE = 0.75
"""A warning is printed when `walk.hub_cap` removes more than this share of a set's edges."""


def build_graph(*, dataset: Artifact, graph: Draft, walk: WalkConfig, track: Tracker) -> dict[str, float]:
    """Build the graphs of every anchor set.

    Returns:
        `<set>/<side>/raw`, `clean` and `walked`: edges before cleaning, after it and after the walk; `<set>/<count>`:
        anchors and edges that were removed.
    """
    problem = Dataset.read(dataset.path)
    graphs: dict[str, dict[Side, Graph]] = {}
    metrics: dict[str, float] = {}
    for name, anchors in problem.anchor_sets.items():
        built = build_set(
            anchors, walk, documents=problem.train, labels=problem.labels, test=problem.test,
            y_train=problem.y_train, unseen=problem.unseen, name=name,
        )  # fmt: skip
        graphs[name] = built.graphs
        graph.counts[name] = built.counts
        metrics |= {f"{name}/{key}": float(value) for key, value in built.counts.items()}
        report(f"build-graph {name} {_summary(built.counts)}")
        _warn_if_unusable(name, built.counts, walk)
    write_graphs(graph.path, graphs)
    return metrics


def _warn_if_unusable(name: str, counts: dict[str, int], walk: WalkConfig) -> None:
    """Warn about a set without edges, or with hubs only: training ignores such a set without an error."""
    edges, hub_edges = counts["train/raw"] + counts["labels/raw"], counts.get("hub_edges", 0)
    if not edges:
        warn(f"anchor set {name}: no edges")
    elif hub_edges > HUBS_SHARE * edges:
        warn(
            f"anchor set {name}: {hub_edges} of {edges} edges removed: they belong to {counts['hub_anchors']} anchors "
            f"with more than walk.hub_cap = {walk.hub_cap}; raise it if these anchors are informative"
        )


def _summary(counts: dict[str, int]) -> str:
    return " ".join(f"{key.replace('/', ' ')} {value}" for key, value in counts.items())
