"""Pruning of noisy edges with the encoder's own vectors (R-ICLR B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.graph.metadata import Graph
from ramen.sampling import scatter


@dataclass(frozen=True)
class IndexedVectors:
    """Vectors of a role's items among those of all distinct texts: a copy for each role would be gigabytes.

    Attributes:
        vectors: float32 [n, D].
        place: int64 [items], row of each item's vector.
    """

    vectors: NDArray[np.float32]
    place: NDArray[np.int64]

    def __getitem__(self, items: NDArray[Any]) -> NDArray[np.float32]:
        return np.asarray(self.vectors[self.place[items]])


Vectors = NDArray[np.float32] | IndexedVectors


def edge_cosines(graph: Graph, rows: Vectors, anchors: Vectors, chunk: int = 1 << 18) -> NDArray[np.float32]:
    """Cosine of the two ends of every edge.

    Args:
        graph: E edges.
        rows: float32 [rows, D], unit norm.
        anchors: float32 [M, D], unit norm.
        chunk: edges at a time (bounds memory).

    Returns:
        float32 [E].
    """
    row_of = graph.rows()
    out = np.empty(graph.num_edges, np.float32)
    for start in range(0, graph.num_edges, chunk):
        part = slice(start, start + chunk)
        out[part] = np.einsum("ed,ed->e", rows[row_of[part]], anchors[graph.indices[part]])
    return out


def random_cosines(
    graph: Graph, rows: Vectors, anchors: Vectors, count: int, rng: np.random.Generator, known: Graph | None = None
) -> NDArray[np.float32]:
    """Cosines of random pairs of a graph: what an edge's cosine would be if it meant nothing.

    Rows and anchors are drawn as often as edges name them, so that hubs count as they do among the edges, but
    independently of each other; pairs that are edges are left out, of which there are many where a set has few anchors.
    A model of pre-trained vectors gives nearly all pairs a cosine above 0, and each graph has its own level, hence no
    fixed threshold fits.

    Args:
        graph: at least one edge.
        rows: float32 [rows, D], unit norm.
        anchors: float32 [M, D], unit norm.
        count: pairs drawn.
        rng: draws them.
        known: a graph that `graph` is part of; its edges are left out too.

    Returns:
        float32 [pairs without an edge], empty if every row has every anchor.
    """
    row_of = graph.rows()
    row = row_of[rng.integers(0, graph.num_edges, count)]
    anchor = graph.indices[rng.integers(0, graph.num_edges, count)]
    apart = np.asarray((known or graph).csr()[row, anchor]).ravel() == 0
    return np.asarray(np.einsum("ed,ed->e", rows[row[apart]], anchors[anchor[apart]]), np.float32)


def isolated_share(whole: Graph, part: Graph) -> float:
    """Share of the rows with an edge in `whole` that have none left in `part`."""
    had = np.diff(whole.indptr) > 0
    return float((np.diff(part.indptr)[had] == 0).mean()) if had.any() else 0.0


def drawable_edges(
    graph: Graph, most: NDArray[np.int64], weights: NDArray[np.float64] | None, key: int
) -> NDArray[np.bool_]:
    """A sample of each row's edges, by the weights that steps draw with: bool [E].

    A step draws one anchor per row, so of a row with thousands of anchors a round uses a handful. Rows with common
    anchors tend to get the same ones (the race of `base.sampling.SharedSampler`), so few anchors need a vector.

    Args:
        graph: E edges.
        most: int64 [rows], edges per row at most; a row with fewer keeps all.
        weights: float64 [anchors], positive; None = uniform.
        key: of the race.
    """
    counts = np.diff(graph.indptr)
    rows = graph.rows()
    chosen = np.asarray(most[rows] > 0)
    contested = np.flatnonzero((counts > most)[rows] & chosen)
    if not len(contested):
        return chosen
    anchors, row = graph.indices[contested].astype(np.int64), rows[contested]
    uniform = (scatter(anchors, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    time = -np.log(uniform) if weights is None else -np.log(uniform) / weights[anchors]
    order = np.lexsort((anchors, time, row))
    first = np.searchsorted(row[order], row[order])  # rows stand together: the place where each begins
    late = np.arange(len(order)) - first >= most[row[order]]
    chosen[contested[order[late]]] = False
    return chosen
