"""R-ICLR's theorem on graph convolutions and regularised encoders, numerically (docs/lab/theorem.md).

A layer phi(A X W) of a graph convolution over an adjacency matrix A equals H(X) = phi(Â X W) for the matrix Â that the
encoder F implies, â_ij = (1 + F(x_i).F(x_j)) / 2. Over another A the two differ, in Frobenius norm and divided by
sqrt(N), by no more than beta R ||W|| ||Â - A||_F.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Matrix = np.ndarray
PHI: dict[str, Callable[[Matrix], Matrix]] = {
    "identity": lambda v: v,
    "relu": lambda v: np.maximum(v, 0),
    "tanh": np.tanh,
}


def implied(f: Matrix) -> Matrix:
    """Â of encoder outputs f, [N, P] unit rows."""
    return (1 + f @ f.T) / 2


def mixed(phi: Callable[[Matrix], Matrix], x: Matrix, f: Matrix, w: Matrix) -> Matrix:
    """H(X): phi(T F(x) + c) for every row, from the two sums T and c alone; no pair of rows is looked at."""
    t = 0.5 * w.T @ (x.T @ f)
    c = 0.5 * w.T @ x.sum(0)
    return phi(f @ t.T + c)


def sides(phi: Callable[[Matrix], Matrix], a: Matrix, x: Matrix, f: Matrix, w: Matrix) -> tuple[float, float, float]:
    """(left side, the tighter bound of the proof's chain, the theorem's bound), as the theorem scales them."""
    left = np.linalg.norm(phi(a @ x @ w) - mixed(phi, x, f, w)) / np.sqrt(len(x))
    gap = np.linalg.norm(implied(f) - a)
    tight = gap * np.linalg.norm(x @ w, 2) / np.sqrt(len(x))
    radius = np.linalg.norm(x, axis=1).max()
    return float(left), float(tight), float(radius * np.linalg.norm(w, 2) * gap)


def drawn(seed: int, n: int = 40, d: int = 8, p: int = 6) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    x, w, f = rng.standard_normal((n, d)), rng.standard_normal((d, d)), rng.standard_normal((n, p))
    links = rng.random((n, n)) < 0.1
    return np.maximum(np.eye(n), np.maximum(links, links.T)).astype(float), x, f / np.linalg.norm(f, axis=1)[:, None], w


@pytest.mark.parametrize("name", PHI)
@pytest.mark.parametrize("seed", range(20))
def test_identity_and_chain_of_bounds(name: str, seed: int) -> None:
    a, x, f, w = drawn(seed)
    np.testing.assert_allclose(mixed(PHI[name], x, f, w), PHI[name](implied(f) @ x @ w), atol=1e-10)
    left, tight, bound = sides(PHI[name], a, x, f, w)
    assert left <= tight <= bound


def test_the_implied_graph_itself_leaves_no_gap_and_both_sides_scale_with_the_weights() -> None:
    a, x, f, w = drawn(0)
    assert sides(PHI["relu"], implied(f), x, f, w)[0] == pytest.approx(0, abs=1e-9)
    once, thrice = sides(PHI["relu"], a, x, f, w), sides(PHI["relu"], a, x, f, 3 * w)
    assert thrice == pytest.approx(tuple(3 * value for value in once))


def test_golden_values() -> None:
    x = np.array([[1, 0], [0, 1], [0.6, 0.8]])
    a, w = np.array([[1.0, 0, 1], [0, 1, 1], [1, 1, 1]]), np.array([[1.0, 2], [0, -1]])
    np.testing.assert_allclose(implied(x), [[1, 0.5, 0.8], [0.5, 1, 0.9], [0.8, 0.9, 1]])
    left, tight, bound = sides(PHI["relu"], a, x, x, w)
    assert (left, tight, bound) == pytest.approx((0.517687, 1.113308, 1.870042), abs=1e-6)


@pytest.mark.parametrize("n", [10, 100, 400])
def test_unrelated_nodes_cannot_all_be_opposite_so_the_bound_is_vacuous_for_sparse_graphs(n: int) -> None:
    """â = 0 needs F(x_i) = -F(x_j); among n unit vectors the mean of â is at least 1/2 - 1/(2(n-1))."""
    rng = np.random.default_rng(n)
    f = rng.standard_normal((n, 32))
    f -= f.mean(0)
    f /= np.linalg.norm(f, axis=1)[:, None]
    off = implied(f)[~np.eye(n, dtype=bool)]
    assert off.mean() >= 0.5 - 1 / (2 * (n - 1)) - 1e-9
    assert np.linalg.norm(implied(f) - np.eye(n)) > 0.45 * np.sqrt(n * (n - 1)), "grows with n, not with the edges"
