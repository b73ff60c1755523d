"""A problem as the artifacts that stages read, a matrix as a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from ramen.artifacts import create_drafts
from ramen.data.dataset import Dataset
from ramen.graph.metadata import Graph
from ramen.stages import run_stage


def on_disk(problem: Dataset, folder: Path) -> dict[str, Path]:
    """Write `dataset` and `graph` (edges as they are) into a folder; returns their paths."""
    places = {name: folder / name for name in ("dataset", "graph")}
    with create_drafts({"dataset": places["dataset"]}, sections={}, inputs={}, work=folder / "work") as made:
        problem.write(made["dataset"].path)
    run_stage("build-graph", sections={"walk": {"hops": 0}}, inputs={"dataset": places["dataset"]},
              outputs={"graph": places["graph"]})  # fmt: skip
    return places


def graph_of(matrix: sp.csr_matrix) -> Graph:
    """Every entry as an original edge."""
    edges = len(matrix.indices)
    return Graph(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        np.ones(edges, np.float32),
        np.ones(edges, bool),
        matrix.shape,
    )


def graphs_of(problem: Dataset) -> dict[str, dict[str, Graph]]:
    """The edges of all anchor sets as they are."""
    return {
        name: {"train": graph_of(anchors.train), "labels": graph_of(anchors.labels)}
        for name, anchors in problem.anchor_sets.items()
    }
