"""Artifacts and graphs made from a dataset, with its edges unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from ramen.artifacts import create_drafts
from ramen.data.dataset import Dataset, Side
from ramen.graph.metadata import Graph
from ramen.stages import run_stage


def on_disk(problem: Dataset, folder: Path) -> dict[str, Path]:
    """Write the artifacts `dataset` and `graph` (without a walk) into a folder; return their paths."""
    paths = {name: folder / name for name in ("dataset", "graph")}
    with create_drafts({"dataset": paths["dataset"]}, sections={}, inputs={}, work=folder / "work") as draft:
        problem.write(draft["dataset"].path)
    run_stage("build-graph", sections={"walk": {"hops": 0}}, inputs={"dataset": paths["dataset"]},
              outputs={"graph": paths["graph"]})  # fmt: skip
    return paths


def make_graph(matrix: sp.csr_matrix) -> Graph:
    """Return a graph in which every entry of the matrix is an original edge."""
    edges = len(matrix.indices)
    return Graph(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        np.ones(edges, np.float32),
        np.ones(edges, bool),
        matrix.shape,
    )


def graphs_of(problem: Dataset) -> dict[str, dict[Side, Graph]]:
    """Return the graphs of all anchor sets."""
    return {
        name: {Side.DOCUMENT: make_graph(anchors.train), Side.LABEL: make_graph(anchors.labels)}
        for name, anchors in problem.anchor_sets.items()
    }
