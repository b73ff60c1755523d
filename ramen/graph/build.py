"""From raw edges to the graph that is trained on: clean first, walk after (R-ICLR B; docs/method.md, Pruning).

Cleaning before walking matters: a test document removed after the walk has already lent its links to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.config import WalkConfig
from ramen.data.dataset import AnchorSet, Texts
from ramen.graph.cleaning import anchors_among, anchors_of, remove_edges, remove_pairs, thin, within
from ramen.graph.metadata import Graph, degree
from ramen.graph.walk import enrich, walk
from ramen.sampling import keyed_rng

MAX_NEW = 10
"""New anchors that the walk adds to a row at most; original edges always stay."""
DEGREE_CAP = 500
"""Rows and anchors of a higher degree are left out of the walk, as in pyxclib."""
SEED = 0
"""Seed of the walk and of `walk.volume`."""


@dataclass(frozen=True)
class Built:
    """The two graphs of an anchor set, and what was removed and added on the way."""

    graphs: dict[str, Graph]
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
) -> Built:
    """Clean and walk one anchor set.

    Args:
        anchors: raw edges; test edges are not looked at.
        settings: section `walk`.
        documents, labels, test: training documents, labels and test documents.
        y_train: CSR N x L, for the strict mode `drop_label_anchors`.
        unseen: labels that training must not see (zero-shot); like test documents they are nobody's anchor.
        name: of the set; its share of the edges (`walk.volume`) is drawn by it.

    Returns:
        Graphs of sides "train" (N x M) and "labels" (L x M); anchors keep their numbers even when emptied.
    """
    own = {"train": anchors_of(documents, anchors.texts), "labels": anchors_of(labels, anchors.texts)}
    raw = {"train": anchors.train, "labels": anchors.labels}
    counts = {f"{side}/raw": int(matrix.nnz) for side, matrix in raw.items()}
    removed = anchors_among(test, anchors.texts)
    counts["test_anchors"] = int(removed.sum())
    if len(unseen):  # a link to such a label is often the very pair that is hidden
        hidden = np.bincount(own["labels"][unseen].indices, minlength=len(removed)) > 0
        counts["unseen_anchors"] = int(hidden.sum())
        removed |= hidden
    clean = {side: remove_edges(matrix, removed, own[side]) for side, matrix in raw.items()}
    if settings.drop_label_anchors:
        clean["train"] = remove_pairs(clean["train"], y_train, own["labels"])
    if settings.hub_cap:
        hubs = degree(clean) > settings.hub_cap
        counts["hub_anchors"] = int(hubs.sum())
        without = {side: remove_edges(matrix, hubs, own[side]) for side, matrix in clean.items()}
        counts["hub_edges"] = sum(clean[side].nnz - without[side].nnz for side in clean)
        clean = without
    if settings.volume < 1:  # last: which anchors are hubs is asked of all edges, so that less is part of more
        clean = {
            side: thin(matrix, settings.volume, keyed_rng(SEED, f"volume/{name}/{side}"))
            for side, matrix in clean.items()
        }
    counts |= {f"{side}/clean": int(matrix.nnz) for side, matrix in clean.items()}
    graphs = _walked(clean, own, settings)
    if settings.drop_label_anchors:  # the walk finds them again
        train = graphs["train"]
        graphs["train"] = train.select(~within(train.csr(), y_train @ own["labels"]))
    counts |= {f"{side}/walked": graph.num_edges for side, graph in graphs.items()}
    return Built(graphs, counts)


def _walked(clean: dict[str, sp.csr_matrix], own: dict[str, sp.csr_matrix], settings: WalkConfig) -> dict[str, Graph]:
    if not settings.hops:
        none = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        return {side: union(matrix, *none) for side, matrix in clean.items()}
    shares = walk(
        sp.vstack([clean["train"], clean["labels"]], format="csr"), hops=settings.hops, restart=settings.restart,
        top_k=settings.top_k, degree_cap=DEGREE_CAP, seed=SEED,
    )  # fmt: skip
    return {side: union(matrix, *enrich(matrix, shares, own[side], MAX_NEW)) for side, matrix in clean.items()}


def union(matrix: sp.csr_matrix, new: NDArray[np.int32], shares: NDArray[np.float32]) -> Graph:
    """Original edges (weight 1) and new ones (weight = share), columns sorted within a row."""
    rows, place = np.nonzero(shares)
    row = np.concatenate([np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), rows])
    column = np.concatenate([matrix.indices, new[rows, place]]).astype(np.int32)
    weight = np.concatenate([np.ones(matrix.nnz, np.float32), shares[rows, place]])
    original = np.arange(len(row)) < matrix.nnz
    order = np.lexsort((column, row))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=matrix.shape[0]))]).astype(np.int64)
    return Graph(indptr, column[order], weight[order], original[order], matrix.shape)
