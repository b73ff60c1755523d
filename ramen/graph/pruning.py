"""Edge statistics for pruning: cosines of edges and of random pairs, and samples of edges (R-ICLR B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.graph.metadata import Graph
from ramen.sampling import hash_numbers


@dataclass(frozen=True)
class IndexedVectors:
    """Vectors of items, looked up in a table of distinct texts: a copy for each role would take gigabytes.

    Attributes:
        vectors: float32 [n, D], one row per distinct text.
        rows: int64 [items], row of each item in `vectors`.
    """

    vectors: NDArray[np.float32]
    rows: NDArray[np.int64]

    def __getitem__(self, items: NDArray[Any]) -> NDArray[np.float32]:
        return np.asarray(self.vectors[self.rows[items]])


Vectors = NDArray[np.float32] | IndexedVectors


def edge_cosines(graph: Graph, rows: Vectors, anchors: Vectors, chunk: int = 1 << 18) -> NDArray[np.float32]:
    """Return the cosine between row and anchor of every edge.

    Args:
        graph: E edges.
        rows: float32 [rows, D], unit norm.
        anchors: float32 [M, D], unit norm.
        chunk: edges computed at a time; limits memory.

    Returns:
        float32 [E].
    """
    row_of = graph.rows()
    cosines = np.empty(graph.num_edges, np.float32)
    for start in range(0, graph.num_edges, chunk):
        edges = slice(start, start + chunk)
        cosines[edges] = np.einsum("ed,ed->e", rows[row_of[edges]], anchors[graph.indices[edges]])
    return cosines


def random_cosines(
    graph: Graph, rows: Vectors, anchors: Vectors, count: int, rng: np.random.Generator, known: Graph | None = None
) -> NDArray[np.float32]:
    """Return the cosines of random pairs of rows and anchors: the distribution to expect of meaningless edges.

    Rows and anchors are sampled independently, each in proportion to its edges, so that hubs count as much as they do
    among the edges. Pairs that are edges are excluded; in a set with few anchors there are many. A fixed threshold
    cannot replace this sample: a pre-trained encoder gives nearly all pairs a positive cosine, and its level differs
    between graphs.

    Args:
        graph: a graph with at least one edge.
        rows: float32 [rows, D], unit norm.
        anchors: float32 [M, D], unit norm.
        count: number of pairs to sample.
        rng: random generator.
        known: a supergraph of `graph` whose edges are excluded too; None = `graph`.

    Returns:
        float32 [<= count]; empty if every row is linked to every anchor.
    """
    row_of = graph.rows()
    row = row_of[rng.integers(0, graph.num_edges, count)]
    anchor = graph.indices[rng.integers(0, graph.num_edges, count)]
    unlinked = np.asarray((known or graph).csr()[row, anchor]).ravel() == 0
    return np.asarray(np.einsum("ed,ed->e", rows[row[unlinked]], anchors[anchor[unlinked]]), np.float32)


def isolated_share(whole: Graph, part: Graph) -> float:
    """Return the share of the rows with an edge in `whole` that have none in `part`."""
    linked = np.diff(whole.indptr) > 0
    return float((np.diff(part.indptr)[linked] == 0).mean()) if linked.any() else 0.0


def sample_row_edges(
    graph: Graph, most: NDArray[np.int64], weights: NDArray[np.float64] | None, key: int
) -> NDArray[np.bool_]:
    """Sample edges of each row with the weights that training steps sample anchors with.

    A step samples one anchor per row, so between two prunings only a few of a row's thousands of anchors matter. The
    sample is a race as in `ramen.sampling.SharedSampler`: rows with common anchors tend to get the same ones, so few
    anchors need a vector.

    Args:
        graph: E edges.
        most: int64 [rows], maximum number of edges per row; a row with fewer keeps all.
        weights: float64 [anchors], positive; None = uniform.
        key: key of the race.

    Returns:
        bool [E], true for a sampled edge.
    """
    counts = np.diff(graph.indptr)
    rows = graph.rows()
    chosen = np.asarray(most[rows] > 0)
    surplus = np.flatnonzero((counts > most)[rows] & chosen)
    if not len(surplus):
        return chosen
    anchors, row = graph.indices[surplus].astype(np.int64), rows[surplus]
    uniform = (hash_numbers(anchors, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    time = -np.log(uniform) if weights is None else -np.log(uniform) / weights[anchors]
    order = np.lexsort((anchors, time, row))
    first = np.searchsorted(row[order], row[order])  # sorted by row: the position where each row begins
    late = np.arange(len(order)) - first >= most[row[order]]
    chosen[surplus[order[late]]] = False
    return chosen
