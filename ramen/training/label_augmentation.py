"""AugGT: count a document and a label that share an anchor as a true pair, instead of regularising (R-ICLR T5)."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ramen.data.dataset import Side
from ramen.graph.metadata import Graphs, degree

HUB_EDGES = 500
"""Anchors with more edges are ignored: they would connect everything."""
MAX_NEW_LABELS = 10
"""Largest number of new labels per document; those with the most shared anchors come first."""


def augment_labels(y: sp.csr_matrix, ignore: sp.csr_matrix, graphs: Graphs) -> sp.csr_matrix:
    """Add pairs of a document and a label that share an anchor to the true pairs.

    For training only: evaluation and propensities use the true pairs.

    Args:
        y: CSR N x L, true pairs.
        ignore: CSR N x L, pairs that are neither positive nor negative, such as a document and itself as a label.
        graphs: set -> side -> cleaned graph; edges added by the walk are not used.

    Returns:
        CSR N x L, values 1.0.
    """
    shared = sp.csr_matrix(y.shape, dtype=np.float32)
    for sides in graphs.values():
        given = {side: graph.original_csr() for side, graph in sides.items()}
        kept = sp.diags((degree(given) <= HUB_EDGES).astype(np.float32))
        shared = shared + (given[Side.DOCUMENT] @ kept) @ given[Side.LABEL].T
    known = (y + ignore).tocsr()
    rows, columns = [], []
    for row in range(y.shape[0]):
        part = slice(shared.indptr[row], shared.indptr[row + 1])
        candidates, counts = shared.indices[part], shared.data[part]
        is_new = ~np.isin(candidates, known.indices[known.indptr[row] : known.indptr[row + 1]])
        candidates, counts = candidates[is_new], counts[is_new]
        best = candidates[np.lexsort((candidates, -counts))[:MAX_NEW_LABELS]]
        rows.append(np.full(len(best), row))
        columns.append(best)
    where = np.concatenate(rows), np.concatenate(columns)
    total = (y + sp.csr_matrix((np.ones(len(where[0]), np.float32), where), shape=y.shape)).tocsr()
    total.sort_indices()
    return total
