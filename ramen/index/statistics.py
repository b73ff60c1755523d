"""Measurements of a retriever before promotion, and the tags of its registered version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import ramen
from ramen.config import IndexConfig
from ramen.index.build import EF_CONSTRUCTION, HNSW_LINKS, choose_kind, factory_string, get_inverted_lists
from ramen.index.retriever import DEFAULT_K, Retriever
from ramen.retrieval import load_faiss

Item = TypeVar("Item")

LATENCY_SAMPLE = 100
"""Queries that are timed, one at a time."""

RECALL_DEPTH = 10
"""Depth at which ANN recall is measured against exact retrieval."""


def sample_evenly(items: Sequence[Item], size: int) -> list[Item]:
    """Return at most `size` of the items, evenly spaced."""
    if len(items) <= size:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, size).astype(int)]


def index_facts(index: Any, settings: IndexConfig, labels_LD: NDArray[np.float32]) -> dict[str, Any]:
    """Return kind, parameters and size of an index for `retriever.json`."""
    count, width = labels_LD.shape
    facts: dict[str, Any] = {
        "kind": choose_kind(count, width, settings),
        "factory": factory_string(count, width, settings),
        "metric": "inner_product",
        "unit_norm": bool(np.allclose(np.linalg.norm(labels_LD, axis=1), 1.0, atol=1e-3)),
        "labels": int(count),
        "dimension": int(width),
    }
    if facts["kind"] == "hnsw":
        facts |= {"m": HNSW_LINKS, "ef_construction": EF_CONSTRUCTION, "ef_search": settings.ef_search}
    if (lists := get_inverted_lists(index)) is not None:
        facts |= {"lists": int(lists.nlist), "nprobe": int(lists.nprobe)}
    return facts


def measure_latency(retriever: Retriever, labels_LD: NDArray[np.float32], queries: Sequence[str]) -> dict[str, float]:
    """Time single queries for the top 10, in wall-clock milliseconds.

    Args:
        retriever: answers the queries one at a time.
        labels_LD: float32 [L, D], the label vectors; an exact scan of them is timed for comparison.
        queries: texts; the first one warms up and is not counted.

    Returns:
        `query_ms` and `query_p99_ms` (encoding and search; median and 99th percentile), `search_ms` (index only,
        median) and `exact_ms` (exact scan, median).
    """
    texts = [queries[i % len(queries)] for i in range(min(LATENCY_SAMPLE, 4 * len(queries)) + 1)]
    exact_index = load_faiss().IndexFlatIP(labels_LD.shape[1])
    exact_index.add(np.ascontiguousarray(labels_LD))
    seconds: dict[str, list[float]] = {"query": [], "search": [], "exact": []}
    for text in texts:
        start = time.perf_counter()
        retriever.query([text], DEFAULT_K)
        seconds["query"].append(time.perf_counter() - start)
    vectors_nD = retriever.encoder.encode(texts)
    for name, index in (("search", retriever.index), ("exact", exact_index)):
        for vector_1D in vectors_nD[:, None]:
            start = time.perf_counter()
            index.search(vector_1D, min(DEFAULT_K, len(retriever)))
            seconds[name].append(time.perf_counter() - start)
    medians = {f"{name}_ms": 1000 * float(np.median(times[1:])) for name, times in seconds.items()}
    return medians | {"query_p99_ms": 1000 * float(np.quantile(seconds["query"][1:], 0.99))}


def total_bytes(folder: Path, names: Iterable[str]) -> int:
    """Return the total size of the named files in a folder."""
    return sum((folder / name).stat().st_size for name in names)


def version_tags(facts: Mapping[str, Any], *, recall: float, latency: Mapping[str, float], size: int) -> dict[str, str]:
    """Return the tags that describe the retriever of a registered version; the gate reads some of them.

    Args:
        facts: as `index_facts` returns.
        recall: ANN recall, as `ann_recall` returns.
        latency: as `measure_latency` returns.
        size: bytes of encoder, index and label table.
    """
    return {
        "ann_recall": str(recall),
        "query_ms": f"{latency['query_ms']:.2f}",
        "query_p99_ms": f"{latency['query_p99_ms']:.2f}",
        "index": str(facts["kind"]),
        "labels": str(facts["labels"]),
        "bytes": str(size),
        "ramen.version": ramen.__version__,
    }
