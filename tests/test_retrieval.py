"""Exact retrieval against brute force."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ramen import retrieval
from ramen.errors import MissingExtra
from ramen.retrieval import search


def unit(rng: np.random.Generator, rows: int, width: int = 16) -> np.ndarray:
    vectors = rng.standard_normal((rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_agrees_with_brute_force_whatever_the_chunk(chunk: int) -> None:
    rng = np.random.default_rng(0)
    documents, labels = unit(rng, 50), unit(rng, 400)
    indices, scores = search(documents, labels, 120, chunk)
    full = documents @ labels.T
    np.testing.assert_array_equal(indices, np.argsort(-full, axis=1, kind="stable")[:, :120])
    np.testing.assert_allclose(scores, np.take_along_axis(full, indices, 1), atol=1e-6)
    assert scores.dtype == np.float32


@pytest.mark.parametrize(("block", "k"), [(1, 10), (1 << 24, 10), (1 << 24, 90)])
def test_equal_scores_go_to_the_lower_label_even_across_the_cut(
    monkeypatch: pytest.MonkeyPatch, block: int, k: int
) -> None:
    monkeypatch.setattr(retrieval, "BLOCK", block)
    grid = np.random.default_rng(1).integers(-1, 2, (90, 3)).astype(np.float32)  # exact products, many equal
    indices, scores = search(grid[:20], grid, k)
    full = grid[:20] @ grid.T
    np.testing.assert_array_equal(indices, np.argsort(-full, axis=1, kind="stable")[:, :k])
    np.testing.assert_array_equal(scores, np.take_along_axis(full, indices, 1))


def test_a_collapsed_encoder_gives_the_first_labels() -> None:
    same = np.ones((300, 4), np.float32) / 2
    indices, _ = search(same[:5], same, 200)
    np.testing.assert_array_equal(indices, np.tile(np.arange(200), (5, 1)))


def test_more_labels_asked_than_there_are_is_padding() -> None:
    rng = np.random.default_rng(2)
    indices, scores = search(unit(rng, 3), unit(rng, 4), 6)
    assert (indices[:, 4:] == 4).all() and (scores[:, 4:] == -np.inf).all()
    assert (np.sort(indices[:, :4], axis=1) == np.arange(4)).all()


def test_no_documents_is_an_empty_result() -> None:
    rng = np.random.default_rng(2)
    indices, scores = search(unit(rng, 0), unit(rng, 4), 6)
    assert indices.shape == scores.shape == (0, 6)


def test_without_faiss_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    rng = np.random.default_rng(0)
    with pytest.raises(MissingExtra, match=r"pip install 'ramen\[cpu\]'"):
        search(unit(rng, 2), unit(rng, 3), 1)
