"""Pruning of noisy edges with the encoder's own vectors (R-ICLR B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.graph.metadata import Graph


@dataclass(frozen=True)
class Looked:
    """Vectors of a role's items among those of all distinct texts: a copy for each role would be gigabytes.

    Attributes:
        vectors: float32 [n, D].
        place: int64 [items], row of each item's vector.
    """

    vectors: NDArray[np.float32]
    place: NDArray[np.int64]

    def __getitem__(self, items: NDArray[Any]) -> NDArray[np.float32]:
        return np.asarray(self.vectors[self.place[items]])


Vectors = NDArray[np.float32] | Looked


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
    graph: Graph, rows: Vectors, anchors: Vectors, count: int, rng: np.random.Generator
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

    Returns:
        float32 [pairs without an edge], empty if every row has every anchor.
    """
    row_of = graph.rows()
    row = row_of[rng.integers(0, graph.num_edges, count)]
    anchor = graph.indices[rng.integers(0, graph.num_edges, count)]
    apart = np.asarray(graph.csr()[row, anchor]).ravel() == 0
    return np.asarray(np.einsum("ed,ed->e", rows[row[apart]], anchors[anchor[apart]]), np.float32)


def prune(graph: Graph, cosines: NDArray[np.float32], threshold: float) -> Graph:
    """Keep the edges whose cosine is strictly greater than `threshold`."""
    return graph.select(cosines > np.float32(threshold))


def jaccard(a: Graph, b: Graph) -> float:
    """Edges in both over edges in either; 1 for two empty graphs."""
    edges_a, edges_b = (graph.rows().astype(np.int64) * graph.shape[1] + graph.indices for graph in (a, b))
    both = len(np.intersect1d(edges_a, edges_b, assume_unique=True))
    either = len(edges_a) + len(edges_b) - both
    return both / either if either else 1.0


def lonely_rows(whole: Graph, part: Graph) -> float:
    """Share of the rows with an edge in `whole` that have none left in `part`."""
    had = np.diff(whole.indptr) > 0
    return float((np.diff(part.indptr)[had] == 0).mean()) if had.any() else 0.0
