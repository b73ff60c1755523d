"""The walk compared with exact distributions, and enrichment compared with scipy products."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.graph.walk import enrich, walk

TOY = sp.csr_matrix(np.array([[1, 1, 0], [0, 1, 1]], np.float32))
SHARES = {0.8: [0.472222, 0.5, 0.027778], 0.2: [0.333333, 0.5, 0.166667], 1.0: [0.5, 0.5, 0.0]}


def expected_visits(bipartite: sp.csr_matrix, restart: float) -> np.ndarray:
    """Return the exact long-run visit shares of a small graph, dense M x M: row s = r e_s P (I - (1 - r) P)^-1.

    P = D_column^-1 B^T D_row^-1 B; rows of isolated anchors are 0.
    """
    b = (bipartite != 0).astype(np.float64).toarray()
    per_row, per_anchor = np.maximum(b.sum(1), 1), np.maximum(b.sum(0), 1)
    p = (b.T / per_row) @ b / per_anchor[:, None]
    return restart * p @ np.linalg.inv(np.eye(len(p)) - (1 - restart) * p)


def walk_dense(matrix: sp.csr_matrix, restart: float, hops: int, **more: int) -> np.ndarray:
    settings = {"top_k": 50, "degree_cap": 500, "seed": 3, **more}
    return walk(matrix, hops=hops, restart=restart, **settings).toarray()  # type: ignore[arg-type]


def make_random_graph(rows: int = 60, anchors: int = 40, seed: int = 0) -> sp.csr_matrix:
    matrix = sp.random(rows, anchors, 0.08, format="csr", random_state=seed) != 0
    matrix = matrix.astype(np.float32).tolil()
    matrix[:, anchors // 2] = 0  # an isolated anchor
    return matrix.tocsr()


@pytest.mark.parametrize(("restart", "expected"), SHARES.items())
def test_walk_on_toy_graph_matches_published_shares(restart: float, expected: list[float]) -> None:
    np.testing.assert_allclose(expected_visits(TOY, restart)[0], expected, atol=1e-6)
    np.testing.assert_allclose(walk_dense(TOY, restart, 200_000)[0], expected, atol=0.005)
    np.testing.assert_allclose(walk_dense(TOY, restart, 400)[0], expected, atol=0.08)


@pytest.mark.parametrize("restart", [0.2, 0.8])
def test_long_walk_converges_to_exact_distribution(restart: float) -> None:
    matrix = make_random_graph()
    exact = expected_visits(matrix, restart)
    found = walk_dense(matrix, restart, 100_000)
    isolated = np.asarray(matrix.sum(0)).ravel() == 0
    assert isolated.any(), "the graph must have an isolated anchor"
    np.testing.assert_allclose(found[~isolated], exact[~isolated], atol=0.008)
    np.testing.assert_array_equal(found[isolated], np.eye(40)[isolated])


def test_start_anchors_have_independent_random_streams() -> None:
    """Walks on two copies of one component must differ."""
    twice = sp.block_diag([make_random_graph(), make_random_graph()], format="csr")
    found = walk_dense(twice, 0.8, 400)
    assert not np.allclose(found[:40, :40], found[40:, 40:])


def test_result_depends_on_seed_but_not_on_threads() -> None:
    matrix = make_random_graph(300, 200)
    results = [walk_dense(matrix, 0.8, 400, threads=threads, top_k=5) for threads in (1, 2, 4, 1)]
    assert all(np.array_equal(results[0], other) for other in results[1:])
    assert not np.array_equal(results[0], walk_dense(matrix, 0.8, 400, top_k=5, seed=4))


def test_top_k_keeps_most_visited_anchors_and_diagonal() -> None:
    matrix = make_random_graph(300, 50)
    full, cut = walk_dense(matrix, 0.8, 400), walk_dense(matrix, 0.8, 400, top_k=3)
    assert (cut.diagonal() > 0).all() and ((cut > 0).sum(1) <= 4).all()
    np.testing.assert_allclose(cut.sum(1), 1, atol=1e-6)
    for start in range(50):
        others = np.delete(full[start], start)
        kept = np.delete(cut[start], start) > 0
        if kept.any():
            assert others[kept].min() >= others[~kept].max() - 1e-7


def test_ties_are_resolved_by_lower_anchor() -> None:
    """Eight hops over 60 anchors of one row: most visited anchors have one visit, so ties decide."""
    matrix = sp.csr_matrix(np.ones((1, 60), np.float32))
    for seed in range(5):
        full = walk(matrix, hops=8, restart=1.0, top_k=60, degree_cap=500, seed=seed).toarray()
        cut = walk(matrix, hops=8, restart=1.0, top_k=2, degree_cap=500, seed=seed).toarray()
        for start in range(60):
            order = sorted((i for i in range(60) if i != start and full[start, i]), key=lambda i: (-full[start, i], i))
            assert set(np.flatnonzero(cut[start])) - {start} == set(order[:2])


def test_rows_and_anchors_over_degree_cap_are_excluded() -> None:
    hub = sp.csr_matrix(np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [1, 1, 1, 0]], np.float32))
    found = walk_dense(hub, 0.5, 2000, degree_cap=3)  # anchor 0 has four rows
    assert found[0].tolist() == [1, 0, 0, 0] and (found[1:, 0] == 0).all()
    assert (found[1] > 0).tolist() == [False, True, True, False]
    np.testing.assert_array_equal(walk_dense(hub, 0.5, 2000, degree_cap=1), np.eye(4))


def test_enrich_adds_strongest_missing_anchors() -> None:
    matrix, shares = (
        make_random_graph(80, 40, 1),
        walk(make_random_graph(80, 40, 1), hops=400, restart=0.8, top_k=10, degree_cap=500, seed=0),
    )
    own_anchor = int(((matrix[7] @ shares).toarray()[0] * (matrix[7].toarray()[0] == 0)).argmax())
    self_anchors = sp.csr_matrix(([1.0], ([7], [own_anchor])), shape=matrix.shape)
    anchors, weights = enrich(matrix, shares, self_anchors, 4)
    reach = (sp.diags(1 / np.maximum(np.asarray(matrix.sum(1)).ravel(), 1)) @ matrix @ shares).toarray()
    reach[matrix.toarray() > 0] = 0
    reach[7, own_anchor] = 0
    assert weights[7].max() > 0, "row 7 gets other anchors"
    for row in range(80):
        found = {int(a): float(w) for a, w in zip(anchors[row], weights[row], strict=True) if w > 0}
        assert len(found) == min(4, int((reach[row] > 0).sum()))
        for anchor, weight in found.items():
            assert weight == pytest.approx(reach[row, anchor], abs=1e-6)
        if found:
            rest = np.delete(reach[row], list(found))
            assert min(found.values()) >= rest.max() - 1e-6


def test_enrich_resolves_ties_by_lower_anchor() -> None:
    """Anchors 0 to 2 of the only row reach 3, 4, 5 and 6 equally often."""
    matrix = sp.csr_matrix(np.array([[1, 1, 1, 0, 0, 0, 0]], np.float32))
    none = sp.csr_matrix(matrix.shape, dtype=np.float32)
    for share in np.random.default_rng(0).random((50, 3, 1)).astype(np.float32):
        shares = np.zeros((7, 7), np.float32)
        shares[:3, 3:] = share
        anchors, weights = enrich(matrix, sp.csr_matrix(shares), none, 2)
        assert anchors.tolist() == [[3, 4]] and weights.dtype == np.float32
        np.testing.assert_allclose(weights, share.mean(), rtol=1e-6)


def test_walk_on_empty_graphs() -> None:
    assert walk(sp.csr_matrix((0, 0)), hops=4, restart=0.8, top_k=2, degree_cap=5, seed=0).shape == (0, 0)
    assert walk(sp.csr_matrix((3, 2)), hops=4, restart=0.8, top_k=2, degree_cap=5, seed=0).toarray().tolist() == [
        [1, 0],
        [0, 1],
    ]
