from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ramen.config import IndexConfig
from ramen.errors import ArtifactError, ConfigError, MissingExtra
from ramen.index.build import (
    MAX_SINGLE_THREAD_LABELS,
    ann_recall,
    build_index,
    choose_kind,
    factory_string,
    get_inverted_lists,
    read_index,
    thread_count,
    tune_nprobe,
    write_index,
)
from ramen.retrieval import search


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    """3,000 unit vectors in 60 clusters, like label embeddings: float32 [3000, 24]."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(60, 24))
    return normalise(centres[rng.integers(60, size=3000)] + 0.5 * rng.normal(size=(3000, 24)))


@pytest.fixture(scope="module")
def queries(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    rng = np.random.default_rng(4)
    return normalise(vectors[:200] + 0.1 * rng.normal(size=(200, 24)))


def normalise(rows: NDArray[np.float64]) -> NDArray[np.float32]:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def rank_exactly(vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    return np.argsort(-(queries.astype(np.float64) @ vectors.T.astype(np.float64)), axis=1, kind="stable")[:, :k]


def test_flat_is_exact(vectors: NDArray[np.float32], queries: NDArray[np.float32]) -> None:
    truth = rank_exactly(vectors, queries, 10)
    flat = build_index(vectors, IndexConfig(kind="flat"))
    assert ann_recall(flat, queries, truth, 10) == 1.0
    np.testing.assert_allclose(flat.search(queries, 1)[0][:, 0], (queries @ vectors.T).max(1), rtol=1e-5)


def test_hnsw_recall_is_high_and_grows_with_search_width(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = rank_exactly(vectors, queries, 10)
    wide = ann_recall(build_index(vectors, IndexConfig(kind="hnsw")), queries, truth, 10)
    assert wide > 0.98
    scores = build_index(vectors, IndexConfig(kind="hnsw")).search(queries, 1)[0][:, 0]
    np.testing.assert_allclose(scores, (queries @ vectors.T).max(1), rtol=1e-5)
    monkeypatch.setattr("ramen.index.build.EF_CONSTRUCTION", 8)
    narrow = IndexConfig(kind="HNSW2,Flat", ef_search=8)
    assert ann_recall(build_index(vectors, narrow), queries, truth, 10) < wide - 0.1


@pytest.mark.parametrize(
    ("labels", "memory_gb", "expected"),
    [
        (10_000, 16, "flat"),
        (10_001, 16, "hnsw"),
        (1_000_000, 16, "hnsw"),
        (1_000_000, 1, "ivf"),
        (5000, 0.001, "flat"),
    ],
)
def test_auto_chooses_kind_by_label_count_and_memory(labels: int, memory_gb: float, expected: str) -> None:
    assert choose_kind(labels, 384, IndexConfig(memory_gb=memory_gb)) == expected


def test_estimated_hnsw_memory_matches_file_size(vectors: NDArray[np.float32], tmp_path: Path) -> None:
    write_index(build_index(vectors, IndexConfig(kind="hnsw")), tmp_path / "i")
    label_bytes = (tmp_path / "i").stat().st_size / len(vectors)
    for budget, expected in ((1.05, "hnsw"), (0.95, "ivf")):
        assert choose_kind(1_000_000, 24, IndexConfig(memory_gb=1e-9 * 1_000_000 * label_bytes * budget)) == expected


def test_ivf_codes_fit_memory_and_nprobe_grows_until_recall_is_reached(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = normalise(rng.normal(size=(100, 32))[rng.integers(100, size=12_000)] + 0.3 * rng.normal(size=(12_000, 32)))
    queries_nD = normalise(rows[:300] + 0.1 * rng.normal(size=(300, 32)))
    truth = search(queries_nD, rows, 10)[0]
    code_of_size = {40: "SQ8", 24: "SQ4", 23: "PQ4", 10: "PQ2", 1: "PQ1"}
    strings = {
        size: factory_string(12_000, 32, IndexConfig(kind="ivf", memory_gb=1e-9 * 12_000 * size))
        for size in code_of_size
    }
    assert strings == {size: f"IVF307,{code}" for size, code in code_of_size.items()}
    budget = IndexConfig(kind="ivf", memory_gb=1e-9 * 12_000 * 24)
    index = build_index(rows, budget)
    lists = get_inverted_lists(index)
    assert lists.code_size == 16
    nprobes, recalls = [], []
    for min_recall in (0.0, 0.6, 1.0):
        tune_nprobe(index, queries_nD, truth, 10, min_recall)
        nprobes.append(lists.nprobe)
        recalls.append(ann_recall(index, queries_nD, truth, 10))
    assert nprobes[0] == 1 and recalls[1] >= 0.6 and nprobes[2] == lists.nlist
    assert nprobes[0] < nprobes[1] < nprobes[2] and recalls[0] < recalls[1] <= recalls[2] < 1
    write_index(index, tmp_path / "i")
    assert get_inverted_lists(read_index(tmp_path / "i")).nprobe == lists.nlist
    fixed = build_index(rows, IndexConfig(kind="ivf", nprobe=7))
    assert get_inverted_lists(fixed).nprobe == 7


def test_build_accepts_factory_strings_and_refuses_invalid_ones(
    vectors: NDArray[np.float32], queries: NDArray[np.float32]
) -> None:
    index = build_index(vectors, IndexConfig(kind="IVF16,SQ8", nprobe=16))
    assert ann_recall(index, queries, search(queries, vectors, 10)[0], 10) > 0.95
    with pytest.raises(ConfigError, match="index.kind = LSHofSorts: faiss cannot build index"):
        build_index(vectors, IndexConfig(kind="LSHofSorts"))
    with pytest.raises(ConfigError, match="cannot build index 'IVF16,PQ7' of 3,000 labels of width 24"):
        build_index(vectors, IndexConfig(kind="IVF16,PQ7"))


def test_ann_recall_is_share_of_exact_top_k(vectors: NDArray[np.float32]) -> None:
    flat = build_index(vectors, IndexConfig(kind="flat"))
    truth = rank_exactly(vectors, vectors[:2], 4)
    truth[0, :3] = [2990, 2991, 2992]  # three of eight are wrong
    assert ann_recall(flat, vectors[:2], truth, 4) == 5 / 8


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_same_vectors_give_same_bytes(kind: str, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    settings = IndexConfig.model_validate({"kind": kind})
    for name in "ab":
        write_index(build_index(vectors, settings), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_index_gives_same_results_after_write_and_read(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], tmp_path: Path
) -> None:
    index = build_index(vectors, IndexConfig(kind="hnsw", ef_search=77))
    write_index(index, tmp_path / "i")
    restored = read_index(tmp_path / "i")
    assert restored.hnsw.efSearch == 77
    np.testing.assert_array_equal(index.search(queries, 5)[1], restored.search(queries, 5)[1])


def test_build_restores_faiss_thread_count(vectors: NDArray[np.float32]) -> None:
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        build_index(vectors[:50], IndexConfig(kind="hnsw"))
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)


def test_thread_count_depends_on_number_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert thread_count(MAX_SINGLE_THREAD_LABELS) == 1
    assert thread_count(MAX_SINGLE_THREAD_LABELS + 1) == 16


def test_read_refuses_truncated_and_foreign_files(vectors: NDArray[np.float32], tmp_path: Path) -> None:
    import faiss

    limit = faiss.get_deserialization_vector_byte_limit()
    path = tmp_path / "index.faiss"
    write_index(build_index(vectors, IndexConfig(kind="hnsw")), path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"not an index, but long enough to have a header" * 4):
        path.write_bytes(broken)
        with pytest.raises(ArtifactError, match=r"index\.faiss: not a readable index"):
            read_index(path)
    assert faiss.get_deserialization_vector_byte_limit() == limit


def test_read_refuses_header_that_claims_more_memory_than_the_file(
    vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    path = tmp_path / "index.faiss"
    write_index(build_index(vectors, IndexConfig(kind="flat")), path)
    data = bytearray(path.read_bytes())
    size = (vectors.size).to_bytes(8, "little")
    offset = data.index(size)
    data[offset : offset + 8] = (1 << 34).to_bytes(8, "little")  # 64 GiB of floats
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="limit"):
        read_index(path)


def test_missing_faiss_error_names_install_command(
    monkeypatch: pytest.MonkeyPatch, vectors: NDArray[np.float32]
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ramen\[cpu\]'"):
        build_index(vectors, IndexConfig())
