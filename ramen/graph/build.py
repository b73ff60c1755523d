"""From raw edges to the graph that is trained on: clean first, walk after (methods of RAMEN 3.3).

Cleaning before walking matters: a test document removed after the walk has already lent its links to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.config import Walk
from ramen.data.dataset import AnchorSet, Texts
from ramen.graph.metadata import Graph, degree
from ramen.graph.walk import enrich, walk


@dataclass(frozen=True)
class Built:
    """The two graphs of an anchor set, and what was removed and added on the way."""

    graphs: dict[str, Graph]
    counts: dict[str, int]


def build_set(
    anchors: AnchorSet,
    settings: Walk,
    *,
    documents: Texts,
    labels: Texts,
    test: Texts,
    y_train: sp.csr_matrix,
) -> Built:
    """Clean and walk one anchor set.

    Args:
        anchors: raw edges; test edges are not looked at.
        settings: section `walk`.
        documents, labels, test: training documents, labels and test documents.
        y_train: CSR N x L, for the strict mode `drop_label_anchors`.

    Returns:
        Graphs of sides "train" (N x M) and "labels" (L x M); anchors keep their numbers even when emptied.
    """
    own = {"train": anchor_of(documents, anchors.texts), "labels": anchor_of(labels, anchors.texts)}
    raw = {"train": anchors.train, "labels": anchors.labels}
    counts = {f"{side}/raw": int(matrix.nnz) for side, matrix in raw.items()}
    removed = anchors_among(test, anchors.texts)
    counts["test_anchors"] = int(removed.sum())
    clean = {side: remove_edges(matrix, removed, own[side]) for side, matrix in raw.items()}
    if settings.drop_label_anchors:
        clean["train"] = remove_pairs(clean["train"], y_train, own["labels"])
    if settings.hub_cap:
        hubs = degree(clean) > settings.hub_cap
        counts["hub_anchors"] = int(hubs.sum())
        clean = {side: remove_edges(matrix, hubs, own[side]) for side, matrix in clean.items()}
    if settings.volume < 1:  # last: which anchors are hubs is asked of all edges, so that less is part of more
        clean = {side: thin(matrix, settings.volume, settings.seed) for side, matrix in clean.items()}
    counts |= {f"{side}/clean": int(matrix.nnz) for side, matrix in clean.items()}
    graphs = _walked(clean, own, settings)
    counts |= {f"{side}/walked": graph.num_edges for side, graph in graphs.items()}
    return Built(graphs, counts)


def _walked(clean: dict[str, sp.csr_matrix], own: dict[str, NDArray[np.int64]], settings: Walk) -> dict[str, Graph]:
    if not settings.hops or not settings.max_new:
        none = (np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
        return {side: union(matrix, *none) for side, matrix in clean.items()}
    shares = walk(
        sp.vstack([clean["train"], clean["labels"]], format="csr"), hops=settings.hops, restart=settings.restart,
        top_k=settings.top_k, degree_cap=settings.degree_cap, seed=settings.seed, threads=settings.threads,
    )  # fmt: skip
    return {
        side: union(matrix, *enrich(matrix, shares, own[side], settings.max_new, settings.threads))
        for side, matrix in clean.items()
    }


def thin(matrix: sp.csr_matrix, volume: float, seed: int) -> sp.csr_matrix:
    """A random share of the edges; what a smaller share keeps, a larger one keeps too."""
    return _select(matrix, np.random.default_rng([seed, matrix.shape[0]]).random(matrix.nnz) < volume)


def anchor_of(items: Texts, anchors: Texts) -> NDArray[np.int64]:
    """The anchor that is the item itself, int64 [items], -1 = none: same uid, else same text.

    Raw files without identifiers get numbered uids, so the title is what identifies a page there.
    """
    by_uid = {uid: i for i, uid in enumerate(anchors.uids)}
    by_text = {text: i for i, text in enumerate(anchors.texts)}
    found = (by_uid.get(uid, by_text.get(text, -1)) for uid, text in zip(items.uids, items.texts, strict=True))
    return np.fromiter(found, np.int64, len(items))


def anchors_among(items: Texts, anchors: Texts) -> NDArray[np.bool_]:
    """Anchors that are one of the items, bool [M]: same uid or same text, several of one text included."""
    uids, texts = set(items.uids), set(items.texts)
    return np.fromiter((uid in uids or text in texts for uid, text in zip(anchors.uids, anchors.texts, strict=True)),
                       bool, len(anchors))  # fmt: skip


def remove_edges(matrix: sp.csr_matrix, anchors: NDArray[np.bool_], own: NDArray[np.int64]) -> sp.csr_matrix:
    """Drop edges to the marked anchors (bool [M]) and of a row to itself (`own` int64 [rows], -1 = none)."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    keep = ~anchors[matrix.indices] & (matrix.indices != own[rows]) & (matrix.data != 0)
    return _select(matrix, keep)


def remove_pairs(matrix: sp.csr_matrix, y: sp.csr_matrix, label_anchor: NDArray[np.int64]) -> sp.csr_matrix:
    """Drop a document's edges to anchors that are its own labels; `label_anchor` int64 [L] maps label -> anchor."""
    pairs = y.tocoo()
    anchor = label_anchor[pairs.col]
    known = anchor >= 0
    flat = pairs.row[known].astype(np.int64) * matrix.shape[1] + anchor[known]
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
    return _select(matrix, ~np.isin(rows * matrix.shape[1] + matrix.indices, flat))


def _select(matrix: sp.csr_matrix, keep: NDArray[np.bool_]) -> sp.csr_matrix:
    indptr = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    kept = sp.csr_matrix((np.ones(int(keep.sum()), np.float32), matrix.indices[keep], indptr), shape=matrix.shape)
    kept.sort_indices()
    return kept


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
