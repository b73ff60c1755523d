"""Numerical checks of R-ICLR's theorem on graph convolutions and regularised encoders (docs/lab/theorem.md).

An encoder F implies the adjacency matrix Â with â_ij = (1 + F(x_i).F(x_j)) / 2. The layer H(X) = phi(Â X W) equals the
graph convolution phi(A X W) if A = Â. For another A, their difference in Frobenius norm, divided by sqrt(N), is at most
beta R ||W|| ||Â - A||_F.
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


def implied_adjacency(f: Matrix) -> Matrix:
    """Return Â of encoder outputs f, [N, P] with unit rows."""
    return (1 + f @ f.T) / 2


def mixing_layer(phi: Callable[[Matrix], Matrix], x: Matrix, f: Matrix, w: Matrix) -> Matrix:
    """Return H(X): phi(T F(x) + c) for each row, computed from the two sums T and c without pairs of rows."""
    t = 0.5 * w.T @ (x.T @ f)
    c = 0.5 * w.T @ x.sum(0)
    return phi(f @ t.T + c)


def compare_sides(
    phi: Callable[[Matrix], Matrix], a: Matrix, x: Matrix, f: Matrix, w: Matrix
) -> tuple[float, float, float]:
    """Return the theorem's left side, the tighter bound from its proof, and its bound."""
    left = np.linalg.norm(phi(a @ x @ w) - mixing_layer(phi, x, f, w)) / np.sqrt(len(x))
    gap = np.linalg.norm(implied_adjacency(f) - a)
    tight = gap * np.linalg.norm(x @ w, 2) / np.sqrt(len(x))
    radius = np.linalg.norm(x, axis=1).max()
    return float(left), float(tight), float(radius * np.linalg.norm(w, 2) * gap)


def sample_case(seed: int, n: int = 40, d: int = 8, p: int = 6) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    rng = np.random.default_rng(seed)
    x, w, f = rng.standard_normal((n, d)), rng.standard_normal((d, d)), rng.standard_normal((n, p))
    links = rng.random((n, n)) < 0.1
    return np.maximum(np.eye(n), np.maximum(links, links.T)).astype(float), x, f / np.linalg.norm(f, axis=1)[:, None], w


@pytest.mark.parametrize("name", PHI)
@pytest.mark.parametrize("seed", range(20))
def test_identity_and_bounds_hold(name: str, seed: int) -> None:
    a, x, f, w = sample_case(seed)
    np.testing.assert_allclose(mixing_layer(PHI[name], x, f, w), PHI[name](implied_adjacency(f) @ x @ w), atol=1e-10)
    left, tight, bound = compare_sides(PHI[name], a, x, f, w)
    assert left <= tight <= bound


def test_difference_is_zero_for_implied_graph_and_scales_with_weights() -> None:
    a, x, f, w = sample_case(0)
    assert compare_sides(PHI["relu"], implied_adjacency(f), x, f, w)[0] == pytest.approx(0, abs=1e-9)
    single, triple = compare_sides(PHI["relu"], a, x, f, w), compare_sides(PHI["relu"], a, x, f, 3 * w)
    assert triple == pytest.approx(tuple(3 * value for value in single))


def test_sides_match_values_computed_by_hand() -> None:
    x = np.array([[1, 0], [0, 1], [0.6, 0.8]])
    a, w = np.array([[1.0, 0, 1], [0, 1, 1], [1, 1, 1]]), np.array([[1.0, 2], [0, -1]])
    np.testing.assert_allclose(implied_adjacency(x), [[1, 0.5, 0.8], [0.5, 1, 0.9], [0.8, 0.9, 1]])
    left, tight, bound = compare_sides(PHI["relu"], a, x, x, w)
    assert (left, tight, bound) == pytest.approx((0.517687, 1.113308, 1.870042), abs=1e-6)


@pytest.mark.parametrize("n", [10, 100, 400])
def test_bound_is_vacuous_for_sparse_graphs(n: int) -> None:
    """â = 0 requires F(x_i) = -F(x_j), but the mean of â over n unit vectors is at least 1/2 - 1/(2(n-1))."""
    rng = np.random.default_rng(n)
    f = rng.standard_normal((n, 32))
    f -= f.mean(0)
    f /= np.linalg.norm(f, axis=1)[:, None]
    off = implied_adjacency(f)[~np.eye(n, dtype=bool)]
    assert off.mean() >= 0.5 - 1 / (2 * (n - 1)) - 1e-9
    assert np.linalg.norm(implied_adjacency(f) - np.eye(n)) > 0.45 * np.sqrt(n * (n - 1)), (
        "grows with n, not with the edges"
    )
