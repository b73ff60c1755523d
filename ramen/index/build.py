"""Build, tune, update, read and write FAISS indexes over label vectors.

Query vectors have unit norm. Label vectors have a norm of at most 1 (fusing a label with its classifier shortens it),
so scores are in [-1, 1]. faiss is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen.config import IndexConfig
from ramen.errors import ArtifactError, ConfigError, RamenError
from ramen.retrieval import faiss_threads, load_faiss

MAX_SINGLE_THREAD_LABELS = 100_000
"""Up to so many labels, one thread builds the index, which gives the same bytes every time; then all cores do."""
HNSW_LINKS, EF_CONSTRUCTION = 32, 200
"""Links per node of the HNSW graph, and candidates while building it."""
MAX_FLAT_LABELS = 10_000
"""`index.kind = auto` uses exact search up to this size: one or two milliseconds per query."""
MIN_LABELS_PER_LIST = 39
"""Training points per inverted list below which faiss' k-means warns."""

MAX_TABLE_BYTES = 2 << 30
"""faiss' own limit for the tables that it computes when it reads an index; they are not in the file."""


def choose_kind(labels: int, width: int, settings: IndexConfig) -> str:
    """Return `index.kind`, with `auto` resolved by the number of labels and `index.memory_gb`."""
    if settings.kind != "auto":
        return settings.kind
    if labels <= MAX_FLAT_LABELS:
        return "flat"
    # the vector, 2 M links of 4 bytes in the bottom layer, and on average M / 4 links in the layers above
    label_bytes = 4 * width + 4 * (2 * HNSW_LINKS + HNSW_LINKS // 4)
    return "hnsw" if labels * label_bytes <= settings.memory_gb * 1e9 else "ivf"


def factory_string(labels: int, width: int, settings: IndexConfig) -> str:
    """Return the string from which `faiss.index_factory` makes the index.

    `ivf` gets about 4 sqrt(L) lists (faiss wiki, "Guidelines to choose an index") and the least compressed codes that
    fit `index.memory_gb`: one byte per dimension, half a byte, or product quantisation with at least 8 dimensions per
    byte.
    """
    kind = choose_kind(labels, width, settings)
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return f"HNSW{HNSW_LINKS},Flat"
    if kind != "ivf":
        return kind
    list_count = max(1, min(round(4 * labels**0.5), labels // MIN_LABELS_PER_LIST))
    bytes_per_code = settings.memory_gb * 1e9 / labels - 8  # 8 bytes hold the id
    pq_sizes = [size for size in range(width // 8, 0, -1) if width % size == 0] or [1]
    code_sizes = {"SQ8": width, "SQ4": (width + 1) // 2} | {f"PQ{size}": size for size in pq_sizes}
    fitting = [code for code, size in code_sizes.items() if size <= bytes_per_code]
    return f"IVF{list_count},{fitting[0] if fitting else list(code_sizes)[-1]}"


def make_index(recipe: str, width: int) -> Any:
    """Return an empty inner-product index for a faiss factory string.

    Raises:
        ConfigError: faiss rejects the string.
    """
    faiss = load_faiss()
    with _explain_faiss_errors(recipe, f"index {recipe!r} of width {width}"):
        return faiss.index_factory(width, recipe, faiss.METRIC_INNER_PRODUCT)


@contextmanager
def _explain_faiss_errors(kind: str, description: str) -> Iterator[None]:
    """Turn a faiss error into a ConfigError that names `index.kind` and describes the index."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(
            f"index.kind = {kind}: faiss cannot build {description} ({_last_line(error)}); use auto, flat, hnsw, ivf "
            "or another factory string"
        ) from None


def build_index(labels_LD: NDArray[np.float32], settings: IndexConfig) -> Any:
    """Build an inner-product index; row i gets id i.

    `flat` is exact and reproducible. `hnsw` (Malkov and Yashunin, 2018) and trained indexes are approximate. They are
    reproducible only when built by one thread, because the HNSW graph depends on the order of insertion (see
    `thread_count`). Inverted lists are trained and filled on the GPUs if faiss supports them.

    Args:
        labels_LD: float32 [L, D], rows of norm at most 1, L >= 1.
        settings: kind and its parameters.

    Returns:
        A faiss index on the CPU.

    Raises:
        ConfigError: faiss cannot build `index.kind` from these labels.
    """
    faiss = load_faiss()
    assert labels_LD.ndim == 2 and len(labels_LD) and labels_LD.dtype == np.float32, labels_LD.shape
    assert np.linalg.norm(labels_LD, axis=1).max() <= 1.0 + 1e-3, "label vectors must have a norm of at most 1"
    count, width = labels_LD.shape
    recipe = factory_string(count, width, settings)
    labels_LD = np.ascontiguousarray(labels_LD)
    description = f"index {recipe!r} of {count:,} labels of width {width}"
    with faiss_threads(thread_count(count)), _explain_faiss_errors(settings.kind, description):
        index = faiss.index_factory(width, recipe, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexHNSW):
            index.hnsw.efConstruction = EF_CONSTRUCTION
            index.hnsw.efSearch = settings.ef_search
        index = _train_and_fill(faiss, index, labels_LD)
    if settings.nprobe and (lists := get_inverted_lists(index)) is not None:
        lists.nprobe = min(settings.nprobe, lists.nlist)
    return index


def _train_and_fill(faiss: Any, index: Any, labels_LD: NDArray[np.float32]) -> Any:
    """Train the index and add the vectors; indexes with inverted lists, which are slow to train, use all GPUs."""
    on_gpu = getattr(faiss, "get_num_gpus", int)() > 0 and get_inverted_lists(index) is not None
    if on_gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    if not index.is_trained:
        index.train(labels_LD)
    index.add(labels_LD)
    return faiss.index_gpu_to_cpu(index) if on_gpu else index


def get_inverted_lists(index: Any) -> Any | None:
    """Return the IVF part of an index, or None if it has none."""
    faiss = load_faiss()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def tune_nprobe(
    index: Any, queries_nD: NDArray[np.float32], exact_nk: NDArray[np.int64], k: int, min_recall: float
) -> None:
    """Set `nprobe` to the smallest power of two whose recall reaches `min_recall`, else to the number of lists."""
    lists = get_inverted_lists(index)
    if lists is None:
        return
    lists.nprobe = 1
    while lists.nprobe < lists.nlist and ann_recall(index, queries_nD, exact_nk, k) < min_recall:
        lists.nprobe = min(2 * lists.nprobe, lists.nlist)


def update_index(index: Any, keep: NDArray[np.int64], new_nD: NDArray[np.float32]) -> Any:
    """Remove and append label vectors without retraining.

    Args:
        index: changed in place.
        keep: int64, ascending: rows that stay, in their order.
        new_nD: float32 [n, D], vectors appended after them.

    Raises:
        RamenError: this kind of index cannot reconstruct its vectors.
    """
    with faiss_threads(thread_count(len(keep) + len(new_nD))):
        if len(keep) < index.ntotal:
            try:
                if (lists := get_inverted_lists(index)) is not None:
                    lists.make_direct_map()
                kept_nD = index.reconstruct_batch(keep)
            except RuntimeError as error:
                raise RamenError(
                    f"labels cannot be removed from this index ({_last_line(error)}); run `ramen publish-index` instead"
                ) from None
            index.reset()
            # a reconstructed vector is encoded to the same code again, so kept labels rank as before
            index.add(np.ascontiguousarray(kept_nD))
        if len(new_nD):
            index.add(np.ascontiguousarray(new_nD))
    return index


def thread_count(labels: int) -> int:
    """Return the number of threads that build an index over `labels` labels; 1 gives reproducible bytes."""
    return 1 if labels <= MAX_SINGLE_THREAD_LABELS else (os.cpu_count() or 1)


def stored_vectors(index: Any) -> NDArray[np.float32]:
    """Return the vectors as the index stores them, after compression: float32 [L, D]."""
    if (lists := get_inverted_lists(index)) is not None:
        lists.make_direct_map()
    vectors: NDArray[np.float32] = index.reconstruct_n(0, index.ntotal)
    return vectors


def ann_recall(index: Any, queries_nD: NDArray[np.float32], exact_nk: NDArray[np.int64], k: int) -> float:
    """Return the mean share of the exact top k that the index returns in its own top k.

    Ids are compared, so two labels with the same text count as different: the value is a lower bound.

    Args:
        index: a faiss index.
        queries_nD: float32 [n, D], n >= 1.
        exact_nk: int [n, >= k] from `retrieval.search`, best first.
        k: depth.
    """
    assert len(queries_nD) == len(exact_nk) and len(queries_nD) and exact_nk.shape[1] >= k >= 1
    approximate_nk = index.search(np.ascontiguousarray(queries_nD), k)[1]
    exact_nk = exact_nk[:, :k]
    hits = sum(np.isin(exact, approximate).sum() for exact, approximate in zip(exact_nk, approximate_nk, strict=True))
    return float(hits / exact_nk.size)


def write_index(index: Any, path: Path) -> None:
    """Write an index file."""
    load_faiss().write_index(index, str(path))


def read_index(path: Path) -> Any:
    """Read an index file; the caller must have verified its sha256.

    Only the checksum detects changed bytes: faiss loads a flipped vector without an error. The byte limit set here
    keeps a damaged header from allocating far more memory than the file holds.

    Raises:
        ArtifactError: truncated or not an index.
    """
    faiss = load_faiss()
    try:
        with _limit_allocations(faiss, path.stat().st_size + MAX_TABLE_BYTES):
            return faiss.read_index(str(path))
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path}: not a readable index ({_last_line(error)}); run `ramen publish-index` again"
        ) from None


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


@contextmanager
def _limit_allocations(faiss: Any, size: int) -> Iterator[None]:
    """Limit the bytes of each vector that faiss deserialises; older versions cannot."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(max(size, 1))
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)
