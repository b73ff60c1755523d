"""Exact retrieval: the k labels of the largest inner product, by FAISS, a block of documents at a time."""

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
"""FAISS on a GPU selects at most this many neighbours."""
RETRIEVED = 200
"""Labels retrieved per document before filtering, as in pyxclib."""
BLOCK = 1 << 24
"""Scores held at a time (64 MB) where a document is compared with all labels in full."""


def load_faiss() -> Any:
    """The module faiss. Raises MissingExtra when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise MissingExtra(
            "faiss is not installed: pip install 'ramen[cpu]' (or 'ramen[gpu]' on a CUDA machine; not both)"
        ) from None
    return faiss


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Let FAISS have this many threads for a while. Raises MissingExtra when it is not installed."""
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
    """The k labels of the largest inner product with each document, exactly.

    Equal scores are ordered by lower label id, at the cut as well. All GPUs that FAISS sees are used; of several
    processes each uses its own.

    Args:
        documents: float32 [N', D].
        labels: float32 [L, D].
        k: labels per document; beyond L the result is padded.
        chunk: documents scored at a time.
        candidates: int64 ascending, the labels that compete; None = all.

    Returns:
        int64 [N', k] label ids, best first, padded with L; float32 [N', k] scores, padded with -inf.

    Raises:
        MissingExtra: faiss is not installed.
    """
    return ExactSearch(labels, candidates).search(documents, k, chunk)


class ExactSearch:
    """The labels of `search`, made ready once for many calls: the competing ones copied out, and on the GPUs.

    Args:
        labels, candidates: as of `search`.
    """

    def __init__(self, labels: Vectors, candidates: NDArray[np.int64] | None = None) -> None:
        self._number_of = None if candidates is None else np.append(candidates, len(labels))
        self._labels = np.ascontiguousarray(labels if candidates is None else labels[candidates], np.float32)

    def search(self, documents: Vectors, k: int, chunk: int = 4096) -> tuple[NDArray[np.int64], Vectors]:
        """As the function."""
        labels = self._labels
        assert documents.ndim == labels.ndim == 2 and documents.shape[1] == labels.shape[1]
        documents = np.ascontiguousarray(documents, np.float32)
        depth = min(k, len(labels))
        indices = np.full((len(documents), k), len(labels), np.int64)
        scores = np.full((len(documents), k), -np.inf, np.float32)
        for start in range(0, len(documents) if depth else 0, chunk):
            block = slice(start, start + chunk)
            indices[block, :depth], scores[block, :depth] = _top(self._find, documents[block], labels, depth)
        return (indices if self._number_of is None else self._number_of[indices]), scores

    def _find(self, x: Vectors, n: int) -> tuple[Vectors, NDArray[np.int64]]:
        if self._on_gpus is not None and n <= GPU_MAX_K:
            return self._on_gpus.search(x, n)  # type: ignore[no-any-return]
        faiss = load_faiss()
        return faiss.knn(x, self._labels, n, metric=faiss.METRIC_INNER_PRODUCT)  # type: ignore[no-any-return]

    @cached_property
    def _on_gpus(self) -> Any:
        """The labels on all GPUs where there are any, else None: a CPU searches them without a copy."""
        faiss = load_faiss()
        count = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
        if not count:
            return None
        # of several processes each searches on its own GPU: with all on all, every GPU would hold the labels P times
        gpus = list(range(count)) if world_size() == 1 else [local_rank() % count]
        index = faiss.index_cpu_to_gpus_list(faiss.IndexFlatIP(self._labels.shape[1]), gpus=gpus)
        index.add(self._labels)
        return index


def _top(find: Search, x: Vectors, labels: Vectors, depth: int) -> tuple[NDArray[np.int64], Vectors]:
    """Search one block. One neighbour more than asked shows where a tie crosses the cut."""
    scores, indices = find(x, min(depth + 1, len(labels)))
    order = np.lexsort((indices, -scores))
    scores, indices = np.take_along_axis(scores, order, 1), np.take_along_axis(indices, order, 1)
    tied = np.flatnonzero(scores[:, depth - 1] == scores[:, -1] if scores.shape[1] > depth else [])
    scores, indices = scores[:, :depth], indices[:, :depth].astype(np.int64)
    step = max(BLOCK // len(labels), 1)
    for start in range(0, len(tied), step):
        rows = tied[start : start + step]
        for row, full in zip(rows, x[rows] @ labels.T, strict=True):
            indices[row] = _cut(full, depth)
            scores[row] = full[indices[row]]
    return indices, scores


def _cut(full: Vectors, depth: int) -> NDArray[np.int64]:
    """The first `depth` of one document's scores over all labels, ties by lower id, in O(L)."""
    last = np.partition(full, len(full) - depth)[len(full) - depth]
    above = np.flatnonzero(full > last)
    equal = np.flatnonzero(full == last)[: depth - len(above)]
    return np.concatenate([above[np.lexsort((above, -full[above]))], equal])
