"""Datasets written as artifacts, and matrices converted to graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from ramen.artifacts import create_drafts
from ramen.data.dataset import Dataset
from ramen.graph.metadata import Graph
from ramen.stages import run_stage


def on_disk(problem: Dataset, folder: Path) -> dict[str, Path]:
    """Write the artifacts `dataset` and `graph` (original edges only) to a folder, and return their paths."""
    paths = {name: folder / name for name in ("dataset", "graph")}
    with create_drafts({"dataset": paths["dataset"]}, sections={}, inputs={}, work=folder / "work") as written:
        problem.write(written["dataset"].path)
    run_stage("build-graph", sections={"walk": {"hops": 0}}, inputs={"dataset": paths["dataset"]},
              outputs={"graph": paths["graph"]})  # fmt: skip
    return paths


def graph_of(matrix: sp.csr_matrix) -> Graph:
    """Return a graph with every entry of the matrix as an original edge."""
    edges = len(matrix.indices)
    return Graph(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        np.ones(edges, np.float32),
        np.ones(edges, bool),
        matrix.shape,
    )


def graphs_of(problem: Dataset) -> dict[str, dict[str, Graph]]:
    """Return the original edges of all anchor sets: name -> side -> graph."""
    return {
        name: {"train": graph_of(anchors.train), "labels": graph_of(anchors.labels)}
        for name, anchors in problem.anchor_sets.items()
    }
