"""Exact retrieval compared with brute force."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ramen import retrieval
from ramen.errors import MissingExtra
from ramen.retrieval import search


def make_unit_vectors(rng: np.random.Generator, rows: int, width: int = 16) -> np.ndarray:
    vectors = rng.standard_normal((rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_search_matches_brute_force_for_any_chunk_size(chunk: int) -> None:
    rng = np.random.default_rng(0)
    documents, labels = make_unit_vectors(rng, 50), make_unit_vectors(rng, 400)
    indices, scores = search(documents, labels, 120, chunk)
    full = documents @ labels.T
    np.testing.assert_array_equal(indices, np.argsort(-full, axis=1, kind="stable")[:, :120])
    np.testing.assert_allclose(scores, np.take_along_axis(full, indices, 1), atol=1e-6)
    assert scores.dtype == np.float32


@pytest.mark.parametrize(("block", "k"), [(1, 10), (1 << 24, 10), (1 << 24, 90)])
def test_equal_scores_are_ordered_by_label_also_at_the_cut(monkeypatch: pytest.MonkeyPatch, block: int, k: int) -> None:
    monkeypatch.setattr(retrieval, "BLOCK", block)
    grid = np.random.default_rng(1).integers(-1, 2, (90, 3)).astype(np.float32)  # exact products, many ties
    indices, scores = search(grid[:20], grid, k)
    full = grid[:20] @ grid.T
    np.testing.assert_array_equal(indices, np.argsort(-full, axis=1, kind="stable")[:, :k])
    np.testing.assert_array_equal(scores, np.take_along_axis(full, indices, 1))


def test_identical_vectors_return_first_labels() -> None:
    same = np.ones((300, 4), np.float32) / 2
    indices, _ = search(same[:5], same, 200)
    np.testing.assert_array_equal(indices, np.tile(np.arange(200), (5, 1)))


def test_result_is_padded_if_k_exceeds_number_of_labels() -> None:
    rng = np.random.default_rng(2)
    indices, scores = search(make_unit_vectors(rng, 3), make_unit_vectors(rng, 4), 6)
    assert (indices[:, 4:] == 4).all() and (scores[:, 4:] == -np.inf).all()
    assert (np.sort(indices[:, :4], axis=1) == np.arange(4)).all()


def test_search_without_documents_returns_empty_result() -> None:
    rng = np.random.default_rng(2)
    indices, scores = search(make_unit_vectors(rng, 0), make_unit_vectors(rng, 4), 6)
    assert indices.shape == scores.shape == (0, 6)


def test_missing_faiss_error_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    rng = np.random.default_rng(0)
    with pytest.raises(MissingExtra, match=r"pip install 'ramen\[cpu\]'"):
        search(make_unit_vectors(rng, 2), make_unit_vectors(rng, 3), 1)
