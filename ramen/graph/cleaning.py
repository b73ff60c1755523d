"""Cleaning of raw edges: find the anchors that are items of the dataset, and remove edges (docs/method.md, Pruning)."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import Texts
from ramen.data.identity import shared_uids


def sample_edges(matrix: sp.csr_matrix, volume: float, rng: np.random.Generator) -> sp.csr_matrix:
    """Keep a random share of the edges; with the same generator, a smaller share keeps a subset of a larger one."""
    return _select(matrix, rng.random(matrix.nnz) < volume)


def match_anchors(items: Texts, anchors: Texts) -> sp.csr_matrix:
    """Find the anchors that are the item itself: those with its uid, title or text.

    Raw files without identifiers get numbers as uids; there only the title identifies a page. Several anchors with the
    same title all match.

    Returns:
        CSR items x M, ones.
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
        matches = {*by_name.get(name, ()), *by_name.get(text, ())}
        if uid in by_uid:
            matches.add(by_uid[uid])
        columns += sorted(matches)
        indptr.append(len(columns))
    shape = (len(items), len(anchors))
    return sp.csr_matrix((np.ones(len(columns), np.float32), np.array(columns, np.int32), indptr), shape=shape)


def anchors_among(items: Texts, anchors: Texts) -> NDArray[np.bool_]:
    """Mark the anchors that are one of the items, bool [M]."""
    return np.bincount(match_anchors(items, anchors).indices, minlength=len(anchors)) > 0


def false_negative_anchors(items: Texts, partners: Texts, pairs: sp.csr_matrix, anchors: Texts) -> sp.csr_matrix:
    """Find the anchors that stand for the item itself or for one of its true partners.

    They must not be negatives of the item, with or without an edge: the task loss moves the item towards the same
    texts.

    Args:
        items, partners: documents and labels, or labels and documents.
        pairs: CSR items x partners, the true pairs of training.
        anchors: anchors of one set.

    Returns:
        CSR items x M.
    """
    return sp.csr_matrix(match_anchors(items, anchors) + pairs @ match_anchors(partners, anchors))


def remove_edges(matrix: sp.csr_matrix, anchors: NDArray[np.bool_], self_anchors: sp.csr_matrix) -> sp.csr_matrix:
    """Remove the edges to marked anchors, and the edges of a row to itself.

    Args:
        matrix: CSR rows x M.
        anchors: bool [M], true for an anchor to remove.
        self_anchors: CSR rows x M from `match_anchors`, the anchors that are the row itself.
    """
    return _select(matrix, ~anchors[matrix.indices] & ~contained_edges(matrix, self_anchors) & (matrix.data != 0))


def remove_pairs(matrix: sp.csr_matrix, y: sp.csr_matrix, label_anchors: sp.csr_matrix) -> sp.csr_matrix:
    """Remove the edges from a document to the anchors of its true labels (`label_anchors`: CSR L x M)."""
    return _select(matrix, ~contained_edges(matrix, y @ label_anchors))


def contained_edges(matrix: sp.csr_matrix, other: sp.csr_matrix) -> NDArray[np.bool_]:
    """Mark the edges of `matrix` that `other` also has, bool [edges]."""

    def flat_indices(csr: sp.csr_matrix) -> NDArray[np.int64]:
        rows = np.repeat(np.arange(csr.shape[0], dtype=np.int64), np.diff(csr.indptr))
        return np.asarray(rows * csr.shape[1] + csr.indices)

    return np.isin(flat_indices(matrix), flat_indices(other))


def _select(matrix: sp.csr_matrix, keep: NDArray[np.bool_]) -> sp.csr_matrix:
    indptr = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    kept = sp.csr_matrix((np.ones(int(keep.sum()), np.float32), matrix.indices[keep], indptr), shape=matrix.shape)
    kept.sort_indices()
    return kept
