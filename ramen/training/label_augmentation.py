"""AugGT: the plain alternative to a regulariser, shared anchors as ground truth (R-ICLR T5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.sparse as sp

from ramen.graph.metadata import Graph, degree

HUB = 500
"""Anchors with more edges are passed over: through them everything shares something."""
MOST_NEW = 10
"""New labels per document at most, those with the most shared anchors first."""


def augmented(y: sp.csr_matrix, ignore: sp.csr_matrix, graphs: Mapping[str, Mapping[str, Graph]]) -> sp.csr_matrix:
    """True pairs, and pairs of a document and a label that share an anchor.

    For training alone: neither evaluation nor propensities may see it.

    Args:
        y: CSR N x L, true labels.
        ignore: CSR N x L, pairs that are to be neither positive nor negative: a document and itself as a label share
            all that they have.
        graphs: set -> side ("train" or "labels") -> cleaned graph; edges that the walk added are not looked at.

    Returns:
        CSR N x L, values 1.0.
    """
    shared = sp.csr_matrix(y.shape, dtype=np.float32)
    for sides in graphs.values():
        given = {side: graph.given() for side, graph in sides.items()}
        kept = sp.diags((degree(given) <= HUB).astype(np.float32))
        shared = shared + (given["train"] @ kept) @ given["labels"].T
    known = (y + ignore).tocsr()
    rows, columns = [], []
    for row in range(y.shape[0]):
        part = slice(shared.indptr[row], shared.indptr[row + 1])
        candidates, counts = shared.indices[part], shared.data[part]
        fresh = ~np.isin(candidates, known.indices[known.indptr[row] : known.indptr[row + 1]])
        candidates, counts = candidates[fresh], counts[fresh]
        best = candidates[np.lexsort((candidates, -counts))[:MOST_NEW]]
        rows.append(np.full(len(best), row))
        columns.append(best)
    where = np.concatenate(rows), np.concatenate(columns)
    total = (y + sp.csr_matrix((np.ones(len(where[0]), np.float32), where), shape=y.shape)).tocsr()
    total.sort_indices()
    return total
