"""Exact retrieval with sparse vectors: the k labels with the largest inner product, without a dense matrix.

Letters: N' documents, L labels, V terms, k depth.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

BLOCKS_PER_THREAD = 4
"""Blocks of documents per thread; each running block holds two arrays of length L."""


def search_sparse(
    documents: sp.csr_matrix, labels: sp.csr_matrix, k: int, candidates: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Find the k labels with the largest inner product with each document, exactly.

    Labels that share no term with a document are not ranked. Equal scores are ordered by label id.

    Args:
        documents: CSR N' x V, non-negative.
        labels: CSR L x V, non-negative.
        k: labels per document.
        candidates: int64 ascending, the labels that may be retrieved; None = all.

    Returns:
        int64 [N', k] label ids, best first, padded with L; float32 [N', k] scores, padded with -inf.
    """
    num_labels = labels.shape[0]
    if candidates is not None:
        labels = labels[candidates]
    postings = sp.csr_matrix(labels.T, dtype=np.float32)
    documents = sp.csr_matrix(documents, dtype=np.float32)
    indices = np.full((documents.shape[0], k), labels.shape[0], np.int64)
    scores = np.full(indices.shape, -np.inf, np.float32)
    blocks = max(1, min(documents.shape[0], BLOCKS_PER_THREAD * numba.get_num_threads()))
    bounds = np.linspace(0, documents.shape[0], blocks + 1).astype(np.int64)
    _search(
        *(documents.indptr.astype(np.int64), documents.indices, documents.data),
        *(postings.indptr.astype(np.int64), postings.indices, postings.data),
        *(labels.shape[0], bounds, indices, scores),
    )
    if candidates is not None:
        indices = np.append(candidates, num_labels)[indices]
    return indices, scores


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _search(
    row_start: Any, terms: Any, weights: Any, term_start: Any, labels: Any, values: Any,
    num_labels: Any, bounds: Any, indices: Any, scores: Any,
) -> None:  # fmt: skip
    """Add up the scores of the labels that share a term with a document and select the best k."""
    k = indices.shape[1]
    for block in numba.prange(len(bounds) - 1):
        total = np.zeros(num_labels, np.float32)
        touched = np.empty(num_labels, np.int64)
        for row in range(bounds[block], bounds[block + 1]):
            count = 0
            for entry in range(row_start[row], row_start[row + 1]):
                term, weight = terms[entry], weights[entry]
                for posting in range(term_start[term], term_start[term + 1]):
                    label = labels[posting]
                    if total[label] == 0:
                        touched[count] = label
                        count += 1
                    total[label] += weight * values[posting]
            best = touched[:count]
            if count > k:
                best = _select_best(best, total, k)
            best = np.sort(best)
            order = np.argsort(-total[best], kind="mergesort")
            for rank in range(len(best)):
                indices[row, rank] = best[order[rank]]
                scores[row, rank] = total[best[order[rank]]]
            for i in range(count):
                total[touched[i]] = 0


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _select_best(labels: Any, total: Any, k: Any) -> Any:
    """Return the k labels with the largest totals, ties at the cut by label id."""
    threshold = np.partition(total[labels], len(labels) - k)[len(labels) - k]
    above = labels[total[labels] > threshold]
    equal = np.sort(labels[total[labels] == threshold])
    return np.concatenate((above, equal[: k - len(above)]))
