"""FAISS indexes over label embeddings: build, measure, write, read.

Queries have unit norm and labels at most that (one fused with its classifier is shorter), so scores are in [-1, 1].
faiss is imported when first needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.config import Index as Settings
from ramen.errors import ArtifactError, MissingExtra

SERIAL_UP_TO = 100_000
"""Labels up to which an HNSW graph is built by one thread when `index.build_threads` is 0."""


def load_faiss() -> Any:
    """The module faiss. Raises MissingExtra when it is not installed."""
    try:
        import faiss
    except ImportError:
        raise MissingExtra(
            "faiss is not installed: pip install 'ramen[cpu]' (or 'ramen[gpu]' on a CUDA machine; not both)"
        ) from None
    return faiss


def build_index(labels_LD: NDArray[np.float32], settings: Settings) -> Any:
    """Build an inner-product index; row i gets id i.

    `flat` is exact and its bytes always the same. `hnsw` (Malkov and Yashunin, 2018) is approximate; built by one
    thread, the same vectors give the same bytes, by several they do not, because the graph depends on the order in
    which threads insert. See `build_threads`.

    Args:
        labels_LD: float32 [L, D], rows of norm at most 1, L >= 1.
        settings: kind and HNSW parameters.

    Returns:
        faiss.IndexFlatIP or faiss.IndexHNSWFlat.
    """
    faiss = load_faiss()
    assert labels_LD.ndim == 2 and len(labels_LD) and labels_LD.dtype == np.float32, labels_LD.shape
    assert np.linalg.norm(labels_LD, axis=1).max() <= 1.0 + 1e-3, "label vectors have a norm of at most 1"
    count, width = labels_LD.shape
    if settings.kind == "flat":
        index = faiss.IndexFlatIP(width)
    else:
        index = faiss.IndexHNSWFlat(width, settings.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = settings.ef_construction
        index.hnsw.efSearch = settings.ef_search
    with _threads(faiss, build_threads(count, settings)):
        index.add(np.ascontiguousarray(labels_LD))
    return index


def build_threads(labels: int, settings: Settings) -> int:
    """Threads that build the index over `labels` labels; 1 means reproducible bytes."""
    if settings.build_threads:
        return settings.build_threads
    return 1 if labels <= SERIAL_UP_TO else (os.cpu_count() or 1)


def exact_ids(labels_LD: NDArray[np.float32], queries_nD: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The k labels of the highest inner product per query, by exhaustive scan: int64 [n, min(k, L)]."""
    faiss = load_faiss()
    flat = faiss.IndexFlatIP(labels_LD.shape[1])
    flat.add(np.ascontiguousarray(labels_LD))
    ids: NDArray[np.int64] = flat.search(np.ascontiguousarray(queries_nD), min(k, len(labels_LD)))[1]
    return ids


def ann_recall(index: Any, queries_nD: NDArray[np.float32], exact_nk: NDArray[np.int64], k: int) -> float:
    """Mean share of the exact top k that the index returns among its own top k.

    Ids are compared, so labels with the same text count as different: the value is a lower bound.

    Args:
        index: a faiss index.
        queries_nD: float32 [n, D], n >= 1.
        exact_nk: int [n, >= k] from `exact_ids`, best first.
        k: depth.
    """
    assert len(queries_nD) == len(exact_nk) and len(queries_nD) and exact_nk.shape[1] >= k >= 1
    found_nk = index.search(np.ascontiguousarray(queries_nD), k)[1]
    truth_nk = exact_nk[:, :k]
    found = sum(np.isin(truth, row).sum() for truth, row in zip(truth_nk, found_nk, strict=True))
    return float(found / truth_nk.size)


def write_index(index: Any, path: Path) -> None:
    """Write an index file."""
    load_faiss().write_index(index, str(path))


def read_index(path: Path) -> Any:
    """Read an index file whose sha256 was checked by the caller.

    The checksum is what protects from foreign or flipped bytes (faiss loads a flipped payload without a word); the
    limit set here only keeps a broken header from asking for more memory than the file can fill.

    Raises:
        ArtifactError: truncated or not an index.
    """
    faiss = load_faiss()
    try:
        with _byte_limit(faiss, path.stat().st_size):
            return faiss.read_index(str(path))
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise ArtifactError(f"{path}: not a readable index ({reason}); run `ramen publish-index` again") from None


@contextmanager
def _threads(faiss: Any, count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@contextmanager
def _byte_limit(faiss: Any, size: int) -> Iterator[None]:
    """Bound each vector that faiss deserialises; older versions lack the switch."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(max(size, 1))
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)
