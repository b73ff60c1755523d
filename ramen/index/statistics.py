"""What is measured of a retriever before it is offered, and what its registered version says of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import ramen
from ramen.config import IndexConfig
from ramen.index.build import EF_CONSTRUCTION, HNSW_LINKS, chosen_kind, factory, inverted_lists
from ramen.index.retriever import DEFAULT_K, Retriever
from ramen.retrieval import load_faiss

Item = TypeVar("Item")

RECALL_DEPTH = 10
"""Depth at which ANN recall is measured against exact retrieval."""
LATENCY_SAMPLE = 100
"""Queries timed, one at a time."""


def evenly(items: Sequence[Item], size: int) -> list[Item]:
    """At most `size` of the items, evenly spaced."""
    if len(items) <= size:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, size).astype(int)]


def retriever_facts(index: Any, settings: IndexConfig, labels_LD: NDArray[np.float32]) -> dict[str, Any]:
    """Content facts of an index: what it is and how it was built."""
    count, width = labels_LD.shape
    facts: dict[str, Any] = {
        "kind": chosen_kind(count, width, settings),
        "factory": factory(count, width, settings),
        "metric": "inner_product",
        "unit_norm": bool(np.allclose(np.linalg.norm(labels_LD, axis=1), 1.0, atol=1e-3)),
        "labels": int(count),
        "dimension": int(width),
    }
    if facts["kind"] == "hnsw":
        facts |= {"m": HNSW_LINKS, "ef_construction": EF_CONSTRUCTION, "ef_search": settings.ef_search}
    if (lists := inverted_lists(index)) is not None:
        facts |= {"lists": int(lists.nlist), "nprobe": int(lists.nprobe)}
    return facts


def latencies(retriever: Retriever, labels_LD: NDArray[np.float32], queries: Sequence[str]) -> dict[str, float]:
    """Wall-clock milliseconds of single queries to the top 10.

    Args:
        retriever: asked one query at a time.
        labels_LD: float32 [L, D] what its index holds; scanned for comparison.
        queries: texts; the first is not timed.

    Returns:
        `query_ms` and `query_p99_ms` (encoding and search; median and 99th percentile), `search_ms` (the index
        alone, median) and `exact_ms` (an exact scan, median).
    """
    asked = [queries[i % len(queries)] for i in range(min(LATENCY_SAMPLE, 4 * len(queries)) + 1)]
    flat = load_faiss().IndexFlatIP(labels_LD.shape[1])
    flat.add(np.ascontiguousarray(labels_LD))
    taken: dict[str, list[float]] = {"query": [], "search": [], "exact": []}
    for text in asked:
        start = time.perf_counter()
        retriever.query([text], DEFAULT_K)
        taken["query"].append(time.perf_counter() - start)
    vectors_nD = retriever.encoder.encode(asked)
    for name, index in (("search", retriever.index), ("exact", flat)):
        for vector_1D in vectors_nD[:, None]:
            start = time.perf_counter()
            index.search(vector_1D, min(DEFAULT_K, len(retriever)))
            taken[name].append(time.perf_counter() - start)
    found = {f"{name}_ms": 1000 * float(np.median(seconds[1:])) for name, seconds in taken.items()}
    return found | {"query_p99_ms": 1000 * float(np.quantile(taken["query"][1:], 0.99))}


def folder_bytes(folder: Path, names: Iterable[str]) -> int:
    """Bytes of some of a folder's files."""
    return sum((folder / name).stat().st_size for name in names)


def version_tags(facts: Mapping[str, Any], *, recall: float, speed: Mapping[str, float], size: int) -> dict[str, str]:
    """Tags of a registered version that describe its retriever; the gate reads some of them."""
    return {
        "ann_recall": str(recall),
        "query_ms": f"{speed['query_ms']:.2f}",
        "query_p99_ms": f"{speed['query_p99_ms']:.2f}",
        "index": str(facts["kind"]),
        "labels": str(facts["labels"]),
        "bytes": str(size),
        "ramen.version": ramen.__version__,
    }
