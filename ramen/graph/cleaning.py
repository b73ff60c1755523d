"""Which anchors are the items themselves, and raw edges without those that must not be (docs/method.md, Pruning)."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import Texts
from ramen.data.identity import shared_uids


def thin(matrix: sp.csr_matrix, volume: float, rng: np.random.Generator) -> sp.csr_matrix:
    """A random share of the edges; what a smaller share keeps, a larger one keeps too."""
    return _select(matrix, rng.random(matrix.nnz) < volume)


def anchors_of(items: Texts, anchors: Texts) -> sp.csr_matrix:
    """Anchors that are the item itself: CSR items x M, ones; same uid, title or text, several of one title included.

    Raw files without identifiers get numbered uids, so the title is what identifies a page there.
    """
    shared, wanted = shared_uids(items, anchors), {*items.names, *items.texts}
    by_uid: dict[str, int] = {}
    by_name: dict[str, list[int]] = {}
    for i, (uid, name) in enumerate(zip(anchors.uids, anchors.names, strict=True)):
        if uid in shared:
            by_uid[uid] = i
        if name in wanted:
            by_name.setdefault(name, []).append(i)
    indptr, columns = [0], []
    for uid, name, text in zip(items.uids, items.names, items.texts, strict=True):
        found = {*by_name.get(name, ()), *by_name.get(text, ())}
        if uid in by_uid:
            found.add(by_uid[uid])
        columns += sorted(found)
        indptr.append(len(columns))
    shape = (len(items), len(anchors))
    return sp.csr_matrix((np.ones(len(columns), np.float32), np.array(columns, np.int32), indptr), shape=shape)


def anchors_among(items: Texts, anchors: Texts) -> NDArray[np.bool_]:
    """Anchors that are one of the items, bool [M]."""
    return np.bincount(anchors_of(items, anchors).indices, minlength=len(anchors)) > 0


def false_negative_anchors(items: Texts, partners: Texts, pairs: sp.csr_matrix, anchors: Texts) -> sp.csr_matrix:
    """Anchors that are the item itself or one that it truly goes with: CSR items x M.

    Such an anchor is no negative, whether there is an edge or not: the task pulls the item to what reads like it.

    Args:
        items, partners: documents and labels, or labels and documents.
        pairs: CSR items x partners, what is true in training.
        anchors: of one set.
    """
    return sp.csr_matrix(anchors_of(items, anchors) + pairs @ anchors_of(partners, anchors))


def remove_edges(matrix: sp.csr_matrix, anchors: NDArray[np.bool_], own: sp.csr_matrix) -> sp.csr_matrix:
    """Drop edges to the marked anchors (bool [M]) and of a row to itself (`own`, CSR rows x M, of `anchors_of`)."""
    return _select(matrix, ~anchors[matrix.indices] & ~within(matrix, own) & (matrix.data != 0))


def remove_pairs(matrix: sp.csr_matrix, y: sp.csr_matrix, label_anchors: sp.csr_matrix) -> sp.csr_matrix:
    """Drop the edges from a document to an anchor that is its own label (`label_anchors`, CSR L x M)."""
    return _select(matrix, ~within(matrix, y @ label_anchors))


def within(matrix: sp.csr_matrix, other: sp.csr_matrix) -> NDArray[np.bool_]:
    """Edges that the other matrix has too, bool [edges]."""

    def flat(each: sp.csr_matrix) -> NDArray[np.int64]:
        rows = np.repeat(np.arange(each.shape[0], dtype=np.int64), np.diff(each.indptr))
        return np.asarray(rows * each.shape[1] + each.indices)

    return np.isin(flat(matrix), flat(other))


def _select(matrix: sp.csr_matrix, keep: NDArray[np.bool_]) -> sp.csr_matrix:
    indptr = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    kept = sp.csr_matrix((np.ones(int(keep.sum()), np.float32), matrix.indices[keep], indptr), shape=matrix.shape)
    kept.sort_indices()
    return kept
