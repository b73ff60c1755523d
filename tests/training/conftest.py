"""Artifacts `dataset` and `graph` of the tiny problem, written once per test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.artifacts import drafts
from ramen.data.dataset import Problem
from ramen.graph.metadata import Graph, write_graphs


def as_graph(matrix: sp.csr_matrix) -> Graph:
    edges = len(matrix.indices)
    return Graph(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int32),
        np.ones(edges, np.float32),
        np.ones(edges, bool),
        matrix.shape,
    )


@pytest.fixture
def tiny_artifacts(tiny_problem: Problem, tmp_path: Path) -> dict[str, Path]:
    """Paths of `dataset` and `graph` (raw edges, no walk)."""
    places = {name: tmp_path / name for name in ("dataset", "graph")}
    with drafts(places, sections={}, inputs={}, work=tmp_path / "work") as made:
        tiny_problem.write(made["dataset"].path)
        write_graphs(
            made["graph"].path,
            {
                name: {"train": as_graph(anchors.train), "labels": as_graph(anchors.labels)}
                for name, anchors in tiny_problem.anchor_sets.items()
            },
        )
    return places
