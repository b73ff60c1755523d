"""Which anchors are the items themselves, and raw edges without those that must not be (methods of RAMEN 3.3)."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import Texts
from ramen.data.identity import shared_uids


def thin(matrix: sp.csr_matrix, volume: float, seed: int) -> sp.csr_matrix:
    """A random share of the edges; what a smaller share keeps, a larger one keeps too."""
    return _select(matrix, np.random.default_rng([seed, matrix.shape[0]]).random(matrix.nnz) < volume)


def anchor_of(items: Texts, anchors: Texts) -> NDArray[np.int64]:
    """The anchor that is the item itself, int64 [items], -1 = none: same uid, else same title or text.

    Raw files without identifiers get numbered uids, so the title is what identifies a page there.
    """
    shared = shared_uids(items, anchors)
    by_uid = {uid: i for i, uid in enumerate(anchors.uids) if uid in shared}
    by_name = {name: i for i, name in enumerate(anchors.names)}
    known = zip(items.uids, items.names, items.texts, strict=True)
    found = (by_uid.get(uid, by_name.get(name, by_name.get(text, -1))) for uid, name, text in known)
    return np.fromiter(found, np.int64, len(items))


def anchors_among(items: Texts, anchors: Texts) -> NDArray[np.bool_]:
    """Anchors that are one of the items, bool [M]: same uid, title or text, several of one title included."""
    uids, names = shared_uids(items, anchors), {*items.names, *items.texts}
    return np.fromiter((uid in uids or name in names for uid, name in zip(anchors.uids, anchors.names, strict=True)),
                       bool, len(anchors))  # fmt: skip


def kin(items: Texts, partners: Texts, pairs: sp.csr_matrix, anchors: Texts) -> sp.csr_matrix:
    """Anchors that are the item itself or one that it truly goes with: CSR items x M.

    Such an anchor is no negative, whether there is an edge or not: the task pulls the item to what reads like it.

    Args:
        items, partners: documents and labels, or labels and documents.
        pairs: CSR items x partners, what is true in training.
        anchors: of one set.
    """
    own, theirs = (_indicator(anchor_of(each, anchors), len(anchors)) for each in (items, partners))
    return sp.csr_matrix(own + pairs @ theirs)


def _indicator(columns: NDArray[np.int64], width: int) -> sp.csr_matrix:
    """A one in each row's column, none for -1: CSR rows x width."""
    indptr = np.concatenate([[0], np.cumsum(columns >= 0)])
    ones = np.ones(int(indptr[-1]), np.float32)
    return sp.csr_matrix((ones, columns[columns >= 0], indptr), shape=(len(columns), width))


def remove_edges(matrix: sp.csr_matrix, anchors: NDArray[np.bool_], own: NDArray[np.int64]) -> sp.csr_matrix:
    """Drop edges to the marked anchors (bool [M]) and of a row to itself (`own` int64 [rows], -1 = none)."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    keep = ~anchors[matrix.indices] & (matrix.indices != own[rows]) & (matrix.data != 0)
    return _select(matrix, keep)


def remove_pairs(matrix: sp.csr_matrix, y: sp.csr_matrix, label_anchor: NDArray[np.int64]) -> sp.csr_matrix:
    """Drop the edges `among_pairs`."""
    return _select(matrix, ~among_pairs(matrix, y, label_anchor))


def among_pairs(matrix: sp.csr_matrix, y: sp.csr_matrix, label_anchor: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Edges from a document to an anchor that is its own label, bool [edges]; `label_anchor` int64 [L], -1 = none."""
    pairs = y.tocoo()
    anchor = label_anchor[pairs.col]
    known = anchor >= 0
    flat = pairs.row[known].astype(np.int64) * matrix.shape[1] + anchor[known]
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
    return np.isin(rows * matrix.shape[1] + matrix.indices, flat)


def _select(matrix: sp.csr_matrix, keep: NDArray[np.bool_]) -> sp.csr_matrix:
    indptr = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    kept = sp.csr_matrix((np.ones(int(keep.sum()), np.float32), matrix.indices[keep], indptr), shape=matrix.shape)
    kept.sort_indices()
    return kept
