"""Exact retrieval with FAISS: the k labels with the largest inner product, one block of documents at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.errors import MissingExtra
from ramen.processes import local_rank, world_size

Vectors = NDArray[np.float32]
Search = Callable[[Vectors, int], tuple[Vectors, NDArray[np.int64]]]

GPU_MAX_K = 2048
"""Largest k that FAISS supports on a GPU."""
BLOCK = 1 << 24
"""Scores in memory at a time (64 MB) when ties require the scores of all labels."""

RETRIEVED = 200
"""Labels retrieved per document before filtering, as in pyxclib."""


def load_faiss() -> Any:
    """Import and return faiss. Raises MissingExtra if it is not installed."""
    try:
        import faiss
    except ImportError:
        raise MissingExtra(
            "faiss is not installed: pip install 'ramen[cpu]' (or 'ramen[gpu]' on a CUDA machine; not both)"
        ) from None
    return faiss


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Set the number of FAISS threads within the context. Raises MissingExtra if faiss is not installed."""
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def search(
    documents: Vectors, labels: Vectors, k: int, chunk: int = 4096, candidates: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], Vectors]:
    """Find the k labels with the largest inner product with each document, exactly.

    Equal scores are ordered by label id, also at the cut after k. A single process uses all GPUs that FAISS sees; each
    of several processes uses one.

    Args:
        documents: float32 [N', D].
        labels: float32 [L, D].
        k: labels per document; the result is padded if k > L.
        chunk: documents scored at a time.
        candidates: int64 ascending, the labels that may be retrieved; None = all.

    Returns:
        int64 [N', k] label ids, best first, padded with L; float32 [N', k] scores, padded with -inf.

    Raises:
        MissingExtra: faiss is not installed.
    """
    return ExactSearch(labels, candidates).search(documents, k, chunk)


class ExactSearch:
    """Exact search over the same labels in many calls; prepares candidates and GPU copies once.

    Args:
        labels, candidates: as for `search`.
    """

    def __init__(self, labels: Vectors, candidates: NDArray[np.int64] | None = None) -> None:
        self._label_ids = None if candidates is None else np.append(candidates, len(labels))
        self._labels = np.ascontiguousarray(labels if candidates is None else labels[candidates], np.float32)

    def search(self, documents: Vectors, k: int, chunk: int = 4096) -> tuple[NDArray[np.int64], Vectors]:
        """See the function `search`."""
        labels = self._labels
        assert documents.ndim == labels.ndim == 2 and documents.shape[1] == labels.shape[1]
        documents = np.ascontiguousarray(documents, np.float32)
        depth = min(k, len(labels))
        indices = np.full((len(documents), k), len(labels), np.int64)
        scores = np.full((len(documents), k), -np.inf, np.float32)
        for start in range(0, len(documents) if depth else 0, chunk):
            block = slice(start, start + chunk)
            indices[block, :depth], scores[block, :depth] = _search_block(
                self._find_block, documents[block], labels, depth
            )
        return (indices if self._label_ids is None else self._label_ids[indices]), scores

    def _find_block(self, x: Vectors, n: int) -> tuple[Vectors, NDArray[np.int64]]:
        if self._gpu_index is not None and n <= GPU_MAX_K:
            return self._gpu_index.search(x, n)  # type: ignore[no-any-return]
        faiss = load_faiss()
        return faiss.knn(x, self._labels, n, metric=faiss.METRIC_INNER_PRODUCT)  # type: ignore[no-any-return]

    @cached_property
    def _gpu_index(self) -> Any:
        """Index of the labels on the GPUs; None without a GPU, where FAISS searches the array without a copy."""
        faiss = load_faiss()
        count = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
        if not count:
            return None
        # each of P processes uses one GPU; if all used all GPUs, every GPU would hold P copies of the labels
        gpus = list(range(count)) if world_size() == 1 else [local_rank() % count]
        index = faiss.index_cpu_to_gpus_list(faiss.IndexFlatIP(self._labels.shape[1]), gpus=gpus)
        index.add(self._labels)
        return index


def _search_block(find: Search, x: Vectors, labels: Vectors, depth: int) -> tuple[NDArray[np.int64], Vectors]:
    """Search one block of documents; one extra neighbour shows whether a tie crosses the cut."""
    scores, indices = find(x, min(depth + 1, len(labels)))
    order = np.lexsort((indices, -scores))
    scores, indices = np.take_along_axis(scores, order, 1), np.take_along_axis(indices, order, 1)
    tied = np.flatnonzero(scores[:, depth - 1] == scores[:, -1] if scores.shape[1] > depth else [])
    scores, indices = scores[:, :depth], indices[:, :depth].astype(np.int64)
    step = max(BLOCK // len(labels), 1)
    for start in range(0, len(tied), step):
        rows = tied[start : start + step]
        for row, full in zip(rows, x[rows] @ labels.T, strict=True):
            indices[row] = _first_labels(full, depth)
            scores[row] = full[indices[row]]
    return indices, scores


def _first_labels(full: Vectors, depth: int) -> NDArray[np.int64]:
    """Return the first `depth` labels of one document's scores over all labels, ties by label id, in O(L)."""
    threshold = np.partition(full, len(full) - depth)[len(full) - depth]
    above = np.flatnonzero(full > threshold)
    equal = np.flatnonzero(full == threshold)[: depth - len(above)]
    return np.concatenate([above[np.lexsort((above, -full[above]))], equal])
