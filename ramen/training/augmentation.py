"""AugGT: the plain alternative to a regulariser, shared anchors as ground truth (R-ICLR T5; methods of RAMEN 3.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.sparse as sp

from ramen.data.dataset import AnchorSet

HUB = 500
"""Anchors with more edges are passed over: through them everything shares something."""
MOST_NEW = 10
"""New labels per document at most, those with the most shared anchors first."""


def augmented(y: sp.csr_matrix, anchor_sets: Mapping[str, AnchorSet]) -> sp.csr_matrix:
    """True pairs, and pairs of a document and a label that share an anchor.

    For training alone: neither evaluation nor propensities may see it.

    Args:
        y: CSR N x L, true labels.
        anchor_sets: raw edges.

    Returns:
        CSR N x L, values 1.0.
    """
    shared = sp.csr_matrix(y.shape, dtype=np.float32)
    for anchors in anchor_sets.values():
        degree = np.bincount(anchors.train.indices, minlength=len(anchors.texts))
        degree += np.bincount(anchors.labels.indices, minlength=len(anchors.texts))
        kept = sp.diags((degree <= HUB).astype(np.float32))
        shared = shared + (anchors.train @ kept) @ anchors.labels.T
    rows, columns = [], []
    for row in range(y.shape[0]):
        part = slice(shared.indptr[row], shared.indptr[row + 1])
        candidates, counts = shared.indices[part], shared.data[part]
        fresh = ~np.isin(candidates, y.indices[y.indptr[row] : y.indptr[row + 1]])
        candidates, counts = candidates[fresh], counts[fresh]
        best = candidates[np.lexsort((candidates, -counts))[:MOST_NEW]]
        rows.append(np.full(len(best), row))
        columns.append(best)
    where = np.concatenate(rows), np.concatenate(columns)
    total = (y + sp.csr_matrix((np.ones(len(where[0]), np.float32), where), shape=y.shape)).tocsr()
    total.sort_indices()
    return total
