"""Pruning thresholds from random pairs, tested on graphs with planted noise."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.graph.metadata import Graph
from ramen.graph.pruning import edge_cosines, random_cosines, sample_row_edges

ROWS, ANCHORS, TOPICS, WIDTH = 2000, 300, 30, 64


def make_noisy_graph(noise: float, seed: int = 0) -> tuple[Graph, np.ndarray, np.ndarray, np.ndarray]:
    """Make a graph with noise edges, and vectors.

    True edges link a row to anchors of its topic; a share `noise` of them is replaced by random anchors. The vectors
    have a common direction, as those of pre-trained encoders do: nearly all cosines are positive.

    Returns:
        The graph, a mask of its noise edges, the vectors of rows and those of anchors.
    """
    rng = np.random.default_rng(seed)
    row_topic, anchor_topic = rng.integers(0, TOPICS, ROWS), np.arange(ANCHORS) % TOPICS
    centres = rng.standard_normal((TOPICS, WIDTH))
    common = rng.standard_normal(WIDTH) * 1.2

    def make_vectors(topics: np.ndarray) -> np.ndarray:
        raw = centres[topics] + common + 0.7 * rng.standard_normal((len(topics), WIDTH))
        return (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)

    rows, columns, wrong = [], [], []
    for row in range(ROWS):
        true = np.flatnonzero(anchor_topic == row_topic[row])
        for anchor in rng.choice(true, 4, replace=False):
            replaced = rng.random() < noise
            choice = int(rng.choice(np.flatnonzero(anchor_topic != row_topic[row]))) if replaced else int(anchor)
            rows.append(row)
            columns.append(choice)
            wrong.append(replaced)
    matrix = sp.csr_matrix((np.array(wrong, float) + 1, (rows, columns)), shape=(ROWS, ANCHORS))
    matrix.sum_duplicates()
    is_noise = matrix.data >= 2
    edges = matrix.nnz
    graph = Graph(
        matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), np.ones(edges, np.float32),
        np.ones(edges, bool), matrix.shape,
    )  # fmt: skip
    return graph, is_noise, make_vectors(row_topic), make_vectors(anchor_topic)


def is_removed(graph: Graph, rows: np.ndarray, anchors: np.ndarray, threshold: float) -> np.ndarray:
    return edge_cosines(graph, rows, anchors) <= threshold


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.4, 0.6])
def test_quantile_of_random_pairs_removes_noise_where_threshold_0_removes_nothing(noise: float) -> None:
    graph, wrong, rows, anchors = make_noisy_graph(noise)
    assert is_removed(graph, rows, anchors, 0.0).mean() < 0.01, "the published threshold removes nothing"
    sample = random_cosines(graph, rows, anchors, 100_000, np.random.default_rng(0))
    gone = is_removed(graph, rows, anchors, float(np.quantile(sample, 0.9)))
    if noise:
        assert (gone & wrong).sum() / gone.sum() > 0.9, "precision"
        assert (gone & wrong).sum() / wrong.sum() > 0.85, "recall"
    assert (gone & ~wrong).sum() / (~wrong).sum() < 0.1, "true edges stay"


def test_random_pairs_are_sampled_in_proportion_to_edges_and_reproducibly() -> None:
    graph, _, rows, anchors = make_noisy_graph(0.2)
    a, b = (random_cosines(graph, rows, anchors, 50_000, np.random.default_rng(1)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    chance = np.outer(np.bincount(graph.rows(), minlength=ROWS), np.bincount(graph.indices, minlength=ANCHORS)) * 1.0
    chance[graph.rows(), graph.indices] = 0
    assert a.mean() == pytest.approx(float((chance * (rows @ anchors.T)).sum() / chance.sum()), abs=0.005)


def test_random_pairs_of_a_set_with_few_anchors_exclude_edges() -> None:
    """Three anchors, and each row is linked to the right one: a third of all pairs are edges, none is noise."""
    rng = np.random.default_rng(0)
    topic = rng.integers(0, 3, ROWS)
    centres = np.linalg.qr(rng.standard_normal((WIDTH, 3)))[0].T
    raw = centres[topic] + 0.1 * rng.standard_normal((ROWS, WIDTH))
    rows, anchors = (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32), centres.astype(np.float32)
    graph = Graph(
        np.arange(ROWS + 1), topic.astype(np.int32), np.ones(ROWS, np.float32), np.ones(ROWS, bool), (ROWS, 3)
    )
    sample = random_cosines(graph, rows, anchors, 10_000, np.random.default_rng(0))
    assert not is_removed(graph, rows, anchors, float(np.quantile(sample, 0.75))).any()


def test_complete_graph_has_no_random_pairs() -> None:
    matrix = sp.csr_matrix(np.ones((4, 2), np.float32))
    graph = Graph(matrix.indptr.astype(np.int64), matrix.indices, matrix.data, np.ones(8, bool), (4, 2))
    rows, anchors = (np.eye(4, dtype=np.float32)[:n] for n in (4, 2))
    assert len(random_cosines(graph, rows, anchors, 1000, np.random.default_rng(0))) == 0


def make_skewed_graph(rows: int = 400, anchors: int = 3000, seed: int = 0) -> Graph:
    """Make a graph with 1 to 600 anchors per row and a skewed anchor popularity."""
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, anchors + 1) ** 0.8
    columns = [
        np.sort(rng.choice(anchors, size, replace=False, p=popularity / popularity.sum()))
        for size in rng.choice([1, 3, 12, 600], rows, p=[0.3, 0.3, 0.3, 0.1])
    ]
    indptr = np.cumsum([0, *map(len, columns)]).astype(np.int64)
    edges = int(indptr[-1])
    ones = np.ones(edges, np.float32)
    return Graph(indptr, np.concatenate(columns).astype(np.int32), ones, np.ones(edges, bool), (rows, anchors))


def test_drawable_edges_keeps_at_most_the_allowed_edges_per_row() -> None:
    graph = make_skewed_graph()
    most = np.full(400, 12, np.int64)
    most[5], most[7] = 0, 1
    chosen = sample_row_edges(graph, most, None, key=1)
    counts = np.diff(graph.indptr)
    np.testing.assert_array_equal(np.diff(graph.select(chosen).indptr), np.minimum(counts, most))
    np.testing.assert_array_equal(chosen, sample_row_edges(graph, most, None, key=1))
    assert not np.array_equal(chosen, sample_row_edges(graph, most, None, key=2))


@pytest.mark.slow
def test_drawable_edges_are_weighted_samples_shared_between_rows() -> None:
    graph = make_skewed_graph()
    weights = 1.0 / np.sqrt(np.maximum(np.bincount(graph.indices, minlength=3000), 1))
    rows, large = graph.rows(), np.flatnonzero(np.diff(graph.indptr) == 600)
    one = np.ones(400, np.int64)
    frequency = np.zeros(graph.num_edges)
    for key in range(3000):
        frequency += sample_row_edges(graph, one, weights, key)
    edges = np.flatnonzero(rows == large[0])
    expected = weights[graph.indices[edges]] / weights[graph.indices[edges]].sum()
    np.testing.assert_allclose(frequency[edges] / 3000, expected, atol=0.006)

    most = np.full(400, 12, np.int64)
    shared = len(np.unique(graph.indices[sample_row_edges(graph, most, weights, 1)]))
    assert shared < 0.5 * len(np.unique(graph.indices)), "few anchors need a vector"
