"""Build the training graphs from raw edges: clean, then walk (R-ICLR B; docs/method.md, Pruning).

Cleaning must come first: a walk over test documents would leave edges between the rows that share them, even if the
test documents were removed afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.config import WalkConfig
from ramen.data.dataset import AnchorSet, Side, Texts
from ramen.graph.cleaning import anchors_among, contained_edges, match_anchors, remove_edges, remove_pairs, sample_edges
from ramen.graph.metadata import Graph, degree
from ramen.graph.walk import enrich, walk
from ramen.sampling import keyed_rng

Edges = dict[Side, sp.csr_matrix]
"""`Side` -> CSR rows x M."""

MAX_NEW = 10
"""Largest number of anchors that the walk adds to a row; original edges always stay."""
DEGREE_CAP = 500
"""Rows and anchors of a higher degree take no part in the walk, as in pyxclib."""
SEED = 0
"""Seed of the walk and of `walk.volume`."""


@dataclass(frozen=True)
class BuiltGraphs:
    """The graphs of an anchor set.

    Attributes:
        graphs: `Side` -> graph.
        counts: edges of each side before cleaning, after it and after the walk; anchors and edges removed.
    """

    graphs: dict[Side, Graph]
    counts: dict[str, int]


def build_set(
    anchors: AnchorSet,
    settings: WalkConfig,
    *,
    documents: Texts,
    labels: Texts,
    test: Texts,
    y_train: sp.csr_matrix,
    unseen: NDArray[np.int64] | tuple[()] = (),
    name: str = "",
) -> BuiltGraphs:
    """Clean and walk one anchor set.

    Args:
        anchors: raw edges; the edges of test documents are not used.
        settings: section `walk`.
        documents, labels, test: training documents, labels and test documents.
        y_train: CSR N x L, for `drop_label_anchors`.
        unseen: labels that training must not see (zero-shot); their anchors are removed like those of test documents.
        name: name of the set, part of the random stream for `walk.volume`.

    Returns:
        Graphs of shape N x M (documents) and L x M (labels). Removed anchors keep their columns, without edges.
    """
    raw: Edges = {Side.DOCUMENT: anchors.train, Side.LABEL: anchors.labels}
    self_anchors: Edges = {
        Side.DOCUMENT: match_anchors(documents, anchors.texts),
        Side.LABEL: match_anchors(labels, anchors.texts),
    }
    label_anchors = self_anchors[Side.LABEL]
    counts = {f"{side}/raw": int(raw[side].nnz) for side in Side}
    removed = anchors_among(test, anchors.texts)
    counts["test_anchors"] = int(removed.sum())
    if len(unseen):  # an edge to an unseen label is often the hidden pair itself
        hidden = np.bincount(label_anchors[unseen].indices, minlength=len(removed)) > 0
        counts["unseen_anchors"] = int(hidden.sum())
        removed |= hidden
    clean: Edges = {side: remove_edges(raw[side], removed, self_anchors[side]) for side in Side}
    if settings.drop_label_anchors:
        clean[Side.DOCUMENT] = remove_pairs(clean[Side.DOCUMENT], y_train, label_anchors)
    if settings.hub_cap:
        hubs = degree(clean) > settings.hub_cap
        counts["hub_anchors"] = int(hubs.sum())
        without_hubs: Edges = {side: remove_edges(clean[side], hubs, self_anchors[side]) for side in Side}
        counts["hub_edges"] = sum(clean[side].nnz - without_hubs[side].nnz for side in Side)
        clean = without_hubs
    if settings.volume < 1:  # after the hubs, which depend on all edges: a smaller volume then keeps a subset of edges
        clean = {
            side: sample_edges(clean[side], settings.volume, keyed_rng(SEED, f"volume/{name}/{side}")) for side in Side
        }
    counts |= {f"{side}/clean": int(clean[side].nnz) for side in Side}
    graphs = _walk_sides(clean, self_anchors, settings)
    if settings.drop_label_anchors:  # the walk can add the dropped edges again
        graph = graphs[Side.DOCUMENT]
        graphs[Side.DOCUMENT] = graph.select(~contained_edges(graph.csr(), y_train @ label_anchors))
    counts |= {f"{side}/walked": graphs[side].num_edges for side in Side}
    return BuiltGraphs(graphs, counts)


def _walk_sides(clean: Edges, self_anchors: Edges, settings: WalkConfig) -> dict[Side, Graph]:
    """Add the walk's edges to both sides: `Side` -> graph."""
    if not settings.hops:
        no_edges = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        return {side: add_edges(clean[side], *no_edges) for side in Side}
    shares = walk(
        sp.vstack([clean[side] for side in Side], format="csr"), hops=settings.hops, restart=settings.restart,
        top_k=settings.top_k, degree_cap=DEGREE_CAP, seed=SEED,
    )  # fmt: skip
    return {side: add_edges(clean[side], *enrich(clean[side], shares, self_anchors[side], MAX_NEW)) for side in Side}


def add_edges(matrix: sp.csr_matrix, anchors: NDArray[np.int32], shares: NDArray[np.float32]) -> Graph:
    """Join original edges (weight 1) and the walk's edges (weight = share) in one graph.

    Args:
        matrix: CSR rows x M, original edges.
        anchors, shares: int32 and float32 [rows, k] from `enrich`; a share of 0 is no edge.
    """
    rows, columns = np.nonzero(shares)
    row = np.concatenate([np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), rows])
    column = np.concatenate([matrix.indices, anchors[rows, columns]]).astype(np.int32)
    weight = np.concatenate([np.ones(matrix.nnz, np.float32), shares[rows, columns]])
    original = np.arange(len(row)) < matrix.nnz
    order = np.lexsort((column, row))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=matrix.shape[0]))]).astype(np.int64)
    return Graph(indptr, column[order], weight[order], original[order], matrix.shape)
