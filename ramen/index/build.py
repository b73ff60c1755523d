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

from ramen.config import IndexConfig
from ramen.errors import ArtifactError, ConfigError, RamenError
from ramen.retrieval import faiss_threads, load_faiss

SERIAL_UP_TO = 100_000
"""Labels up to which an index is built by one thread, which gives the same bytes every time."""
HNSW_LINKS, EF_CONSTRUCTION = 32, 200
"""Links per node of the HNSW graph, and candidates while building it."""
FLAT_UP_TO = 10_000
"""Labels up to which `auto` scans: a millisecond or two a query, and exact."""
POINTS_PER_LIST = 39
"""Labels per inverted list that k-means asks for at least (faiss warns below it)."""

TABLE_BYTES = 2 << 30
"""faiss' own bound of the tables that it computes on reading, which are not in the file."""


def chosen_kind(labels: int, width: int, settings: IndexConfig) -> str:
    """What `auto` stands for, by the number of labels and the memory they may take; any other kind is itself."""
    if settings.kind != "auto":
        return settings.kind
    if labels <= FLAT_UP_TO:
        return "flat"
    # a vector, its links at the bottom (2 M of 4 bytes) and, on average, a few above
    each = 4 * width + 4 * (2 * HNSW_LINKS + HNSW_LINKS // 4)
    return "hnsw" if labels * each <= settings.memory_gb * 1e9 else "ivf"


def factory(labels: int, width: int, settings: IndexConfig) -> str:
    """The string by which `faiss.index_factory` makes the index.

    `ivf` gets about 4 sqrt(L) lists (faiss wiki, "Guidelines to choose an index") and the least compressed codes that
    fit the memory: a byte a dimension, half a byte, or product quantisation of 8 or more dimensions to a byte.
    """
    kind = chosen_kind(labels, width, settings)
    if kind == "flat":
        return "Flat"
    if kind == "hnsw":
        return f"HNSW{HNSW_LINKS},Flat"
    if kind != "ivf":
        return kind
    lists = max(1, min(round(4 * labels**0.5), labels // POINTS_PER_LIST))
    room = settings.memory_gb * 1e9 / labels - 8  # ids
    sizes = [size for size in range(width // 8, 0, -1) if width % size == 0] or [1]
    codes = {"SQ8": width, "SQ4": (width + 1) // 2} | {f"PQ{size}": size for size in sizes}
    fits = [code for code, size in codes.items() if size <= room]
    return f"IVF{lists},{fits[0] if fits else list(codes)[-1]}"


def make_index(recipe: str, width: int) -> Any:
    """An empty inner-product index that faiss makes of a factory string.

    Raises:
        ConfigError: faiss makes none; the message says why.
    """
    faiss = load_faiss()
    with _explained(recipe, f"index {recipe!r} of width {width}"):
        return faiss.index_factory(width, recipe, faiss.METRIC_INNER_PRODUCT)


@contextmanager
def _explained(kind: str, index: str) -> Iterator[None]:
    """Turn an error of faiss into a ConfigError that names `index.kind` and describes the index."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(
            f"index.kind = {kind}: faiss can make no {index} ({_last_line(error)}); use auto, flat, hnsw, ivf or "
            "another factory string"
        ) from None


def build_index(labels_LD: NDArray[np.float32], settings: IndexConfig) -> Any:
    """Build an inner-product index; row i gets id i.

    `flat` is exact and its bytes always the same. `hnsw` (Malkov and Yashunin, 2018) and what is trained are
    approximate; built by one thread, the same vectors give the same bytes, by several they do not, because the graph
    depends on the order in which threads insert. See `build_threads`. Inverted lists are trained and filled on the
    GPU where faiss has one.

    Args:
        labels_LD: float32 [L, D], rows of norm at most 1, L >= 1.
        settings: kind and its parameters.

    Returns:
        A faiss index on the CPU.

    Raises:
        ConfigError: `index.kind` is nothing that faiss can make of these labels.
    """
    faiss = load_faiss()
    assert labels_LD.ndim == 2 and len(labels_LD) and labels_LD.dtype == np.float32, labels_LD.shape
    assert np.linalg.norm(labels_LD, axis=1).max() <= 1.0 + 1e-3, "label vectors have a norm of at most 1"
    count, width = labels_LD.shape
    recipe = factory(count, width, settings)
    labels_LD = np.ascontiguousarray(labels_LD)
    described = f"index {recipe!r} of {count:,} labels of width {width}"
    with faiss_threads(build_threads(count)), _explained(settings.kind, described):
        index = faiss.index_factory(width, recipe, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexHNSW):
            index.hnsw.efConstruction = EF_CONSTRUCTION
            index.hnsw.efSearch = settings.ef_search
        index = _filled(faiss, index, labels_LD)
    if settings.nprobe and (lists := inverted_lists(index)) is not None:
        lists.nprobe = min(settings.nprobe, lists.nlist)
    return index


def _filled(faiss: Any, index: Any, labels_LD: NDArray[np.float32]) -> Any:
    """Train and fill; on all GPUs if the index has inverted lists, which is where the time goes."""
    on_gpu = getattr(faiss, "get_num_gpus", int)() > 0 and inverted_lists(index) is not None
    if on_gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    if not index.is_trained:
        index.train(labels_LD)
    index.add(labels_LD)
    return faiss.index_gpu_to_cpu(index) if on_gpu else index


def inverted_lists(index: Any) -> Any | None:
    """The part of an index that holds inverted lists, None if it has none."""
    faiss = load_faiss()
    try:
        return faiss.extract_index_ivf(index)
    except RuntimeError:
        return None


def tune(index: Any, queries_nD: NDArray[np.float32], exact_nk: NDArray[np.int64], k: int, least: float) -> None:
    """Search the fewest inverted lists, by powers of two, whose recall reaches `least`; all if none does."""
    lists = inverted_lists(index)
    if lists is None:
        return
    lists.nprobe = 1
    while lists.nprobe < lists.nlist and ann_recall(index, queries_nD, exact_nk, k) < least:
        lists.nprobe = min(2 * lists.nprobe, lists.nlist)


def changed(index: Any, keep: NDArray[np.int64], new_nD: NDArray[np.float32]) -> Any:
    """An index without some labels and with new ones after those that stay; nothing is trained again.

    Args:
        index: changed in place.
        keep: int64, ascending: rows that stay.
        new_nD: float32 [n, D] vectors of new labels.

    Raises:
        RamenError: this kind of index cannot give its vectors back.
    """
    with faiss_threads(build_threads(len(keep) + len(new_nD))):
        if len(keep) < index.ntotal:
            try:
                if (lists := inverted_lists(index)) is not None:
                    lists.make_direct_map()
                kept_nD = index.reconstruct_batch(keep)
            except RuntimeError as error:
                raise RamenError(
                    f"labels cannot be removed from this index ({_last_line(error)}); run `ramen publish-index` instead"
                ) from None
            index.reset()
            # compressed vectors fall on their own codes again, so what stays is found as before
            index.add(np.ascontiguousarray(kept_nD))
        if len(new_nD):
            index.add(np.ascontiguousarray(new_nD))
    return index


def build_threads(labels: int) -> int:
    """Threads that build the index over `labels` labels; 1 means reproducible bytes."""
    return 1 if labels <= SERIAL_UP_TO else (os.cpu_count() or 1)


def held_vectors(index: Any) -> NDArray[np.float32]:
    """What the index holds, as it holds it: float32 [L, D]."""
    if (lists := inverted_lists(index)) is not None:
        lists.make_direct_map()
    vectors: NDArray[np.float32] = index.reconstruct_n(0, index.ntotal)
    return vectors


def ann_recall(index: Any, queries_nD: NDArray[np.float32], exact_nk: NDArray[np.int64], k: int) -> float:
    """Mean share of the exact top k that the index returns among its own top k.

    Ids are compared, so labels with the same text count as different: the value is a lower bound.

    Args:
        index: a faiss index.
        queries_nD: float32 [n, D], n >= 1.
        exact_nk: int [n, >= k] from `retrieval.search`, best first.
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
    limit set here only keeps a broken header from asking for much more memory than the file can fill.

    Raises:
        ArtifactError: truncated or not an index.
    """
    faiss = load_faiss()
    try:
        with _byte_limit(faiss, path.stat().st_size + TABLE_BYTES):
            return faiss.read_index(str(path))
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path}: not a readable index ({_last_line(error)}); run `ramen publish-index` again"
        ) from None


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


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
