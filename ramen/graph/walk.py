"""Random walk with restart between anchors, through the documents and labels that share them.

The bipartite matrix B = [G_XA; G_ZA] has a row per document or label and a column per anchor. One hop goes from an
anchor to a random row that has it and on to a random anchor of that row; before each hop the walk jumps back to its
start with probability `restart` (R-ICLR B: 400 hops, 0.8; the convention is that of pyxclib's `RandomWalk`).

Every start anchor has a random stream of its own, keyed by (seed, anchor), so the result depends neither on the
number of threads nor on their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
from numba import njit, prange
from numpy.typing import NDArray

BLOCKS_PER_THREAD = 8
"""Blocks of start anchors per thread: evens out the load; each block needs one counter per anchor while it runs."""


def walk(
    bipartite: sp.csr_matrix, *, hops: int, restart: float, top_k: int, degree_cap: int, seed: int, threads: int = 0
) -> sp.csr_matrix:
    """Walk from every anchor and keep the most visited ones.

    Args:
        bipartite: B, CSR (N + L) x M; values are ignored.
        hops: hops per start.
        restart: probability of jumping back to the start before a hop.
        top_k: most visited other anchors kept per start (ties: the lower number).
        degree_cap: rows and anchors with more edges than this are left out of the walk.
        seed: of the random streams.
        threads: 0 = all cores.

    Returns:
        R, CSR M x M float32: shares of the visits that are kept; each row holds its diagonal and sums to 1. An anchor
        that cannot walk (isolated, or over the cap) has its diagonal alone.
    """
    rows, columns = walkable(bipartite, degree_cap)
    anchors = bipartite.shape[1]
    with use_threads(threads) as used:
        indices, counts = _walk(
            _narrow(columns.indptr), columns.indices.astype(np.int32), _narrow(rows.indptr),
            rows.indices.astype(np.int32), hops, np.uint64(restart * 2.0**32), top_k, np.uint64(seed),
            min(max(anchors, 1), used * BLOCKS_PER_THREAD),
        )  # fmt: skip
    kept = counts > 0
    indptr = np.concatenate([[0], np.cumsum(kept.sum(1))])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    matrix = sp.csr_matrix((shares[kept].astype(np.float32), indices[kept], indptr), shape=(anchors, anchors))
    matrix.sort_indices()
    return matrix


def _narrow(pointers: NDArray[Any]) -> NDArray[Any]:
    """Row pointers as int32 while they fit: half the memory traffic of the walk's random reads."""
    return pointers.astype(np.int32 if pointers[-1] < 2**31 else np.int64)


def walkable(bipartite: sp.csr_matrix, degree_cap: int) -> tuple[sp.csr_matrix, sp.csc_matrix]:
    """The part of B that is walked, by rows and by columns: rows and anchors over the cap are emptied."""
    matrix = sp.csr_matrix((np.ones(bipartite.nnz, np.int8), bipartite.indices, bipartite.indptr), bipartite.shape)
    per_row = np.diff(matrix.indptr)
    per_anchor = np.bincount(matrix.indices, minlength=matrix.shape[1])
    keep = np.repeat(per_row <= degree_cap, per_row) & (per_anchor <= degree_cap)[matrix.indices]
    kept = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    rows = sp.csr_matrix((matrix.data[keep], matrix.indices[keep], kept), shape=matrix.shape)
    return rows, rows.tocsc()


def expected_visits(bipartite: sp.csr_matrix, restart: float) -> NDArray[np.float64]:
    """Exact long-run visit shares, dense M x M (for small graphs): row s = r e_s P (I - (1 - r) P)^-1.

    P = D_column^-1 B^T D_row^-1 B; rows of isolated anchors are 0.
    """
    b = (bipartite != 0).astype(np.float64).toarray()
    per_row, per_anchor = np.maximum(b.sum(1), 1), np.maximum(b.sum(0), 1)
    p = (b.T / per_row) @ b / per_anchor[:, None]
    return restart * p @ np.linalg.inv(np.eye(len(p)) - (1 - restart) * p)  # type: ignore[no-any-return]


@contextmanager
def use_threads(threads: int) -> Iterator[int]:
    """Set numba's threads for a while (0 = all); yields the number."""
    before = numba.get_num_threads()
    used = min(threads or numba.config.NUMBA_NUM_THREADS, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(used)
    try:
        yield used
    finally:
        numba.set_num_threads(before)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser: a bijection of 64 bits that scatters neighbouring inputs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _pick(bits: Any, first: Any, count: Any) -> Any:
    """One of `count` positions from `first`, by 32 random bits (multiply and shift: no division)."""
    return first + np.int64((bits * np.uint64(count)) >> np.uint64(32))


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _walk(a_ptr, a_rows, r_ptr, r_anchors, hops, restart, top_k, seed, blocks):  # type: ignore[no-untyped-def]
    """Visit counts: (anchors int32 [M, top_k + 1], counts int64 of the same shape); the diagonal comes first."""
    anchors = len(a_ptr) - 1
    out = np.zeros((anchors, top_k + 1), np.int32)
    out_counts = np.zeros((anchors, top_k + 1), np.int64)
    for block in prange(blocks):
        counts = np.zeros(anchors, np.int32)
        touched = np.empty(hops + 1, np.int32)
        for start in range(anchors * block // blocks, anchors * (block + 1) // blocks):
            out[start, 0] = start
            if a_ptr[start] == a_ptr[start + 1]:
                out_counts[start, 0] = 1
                continue
            found = _visits(start, a_ptr, a_rows, r_ptr, r_anchors, hops, restart, seed, counts, touched)
            out_counts[start, 0] = max(counts[start], 1)
            counts[start] = 0
            _keep_top(start, found, counts, touched, out[start, 1:], out_counts[start, 1:])
    return out, out_counts


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _visits(start, a_ptr, a_rows, r_ptr, r_anchors, hops, restart, seed, counts, touched):  # type: ignore[no-untyped-def]
    """Walk once; fills `counts` and lists the anchors `touched`; returns how many."""
    low = np.uint64(0xFFFFFFFF)
    gamma = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(_mix(seed + gamma) ^ (np.uint64(start) * gamma + np.uint64(1)))
    current, found = start, 0
    first, degree = a_ptr[start], a_ptr[start + 1] - a_ptr[start]
    for hop in range(hops):
        state += gamma
        bits = _mix(state)
        if hop == 0 or (bits & low) < restart:
            row = a_rows[_pick(bits >> np.uint64(32), first, degree)]
        else:
            row = a_rows[_pick(bits >> np.uint64(32), a_ptr[current], a_ptr[current + 1] - a_ptr[current])]
        state += gamma
        current = r_anchors[_pick(_mix(state) & low, r_ptr[row], r_ptr[row + 1] - r_ptr[row])]
        # no branch: whether a visit is the first is a coin toss that the processor cannot predict
        count = counts[current]
        counts[current] = count + 1
        touched[found] = current
        found += count == 0
    return found


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _keep_top(start, found, counts, touched, out, out_counts):  # type: ignore[no-untyped-def]
    """Insert the touched anchors into the sorted top list (more visits first, then the lower number); clears counts."""
    k, filled = len(out), 0
    for i in range(found):
        anchor = touched[i]
        count = counts[anchor]
        counts[anchor] = 0
        if count == 0:  # the start itself, kept apart
            continue
        place = filled
        while place > 0 and (
            out_counts[place - 1] < count or (out_counts[place - 1] == count and out[place - 1] > anchor)
        ):
            if place < k:
                out[place], out_counts[place] = out[place - 1], out_counts[place - 1]
            place -= 1
        if place < k:
            out[place], out_counts[place] = anchor, count
            filled = min(filled + 1, k)


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _enrich(ptr, anchors, w_ptr, w_anchors, w_shares, own_ptr, own_anchors, max_new, blocks):  # type: ignore[no-untyped-def]
    """New anchors per row, (int32 [rows, max_new], float64 shares of the same shape); a share of 0 = none."""
    rows, columns = len(ptr) - 1, len(w_ptr) - 1
    out = np.zeros((rows, max_new), np.int32)
    out_shares = np.zeros((rows, max_new), np.float64)  # as the sums they are compared with: else ties were none
    for block in prange(blocks):
        shares = np.zeros(columns, np.float64)
        touched = np.empty(columns, np.int32)
        for row in range(rows * block // blocks, rows * (block + 1) // blocks):
            degree, found = ptr[row + 1] - ptr[row], 0
            for edge in range(ptr[row], ptr[row + 1]):
                anchor = anchors[edge]
                for near in range(w_ptr[anchor], w_ptr[anchor + 1]):
                    if shares[w_anchors[near]] == 0:
                        touched[found] = w_anchors[near]
                        found += 1
                    shares[w_anchors[near]] += w_shares[near] / degree
            for edge in range(ptr[row], ptr[row + 1]):
                shares[anchors[edge]] = 0.0
            for edge in range(own_ptr[row], own_ptr[row + 1]):
                shares[own_anchors[edge]] = 0.0
            _keep_top(row, found, shares, touched, out[row], out_shares[row])
    return out, out_shares


def enrich(
    matrix: sp.csr_matrix, shares: sp.csr_matrix, own: sp.csr_matrix, max_new: int, threads: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The strongest anchors that a row does not have yet: top `max_new` of (row-normalised E) R.

    Args:
        matrix: E, CSR rows x M, cleaned edges.
        shares: R of `walk`, CSR M x M.
        own: CSR rows x M, anchors that are the row itself (never added).
        max_new: anchors per row at most.

    Returns:
        (anchors int32 [rows, max_new], shares float32 of the same shape, 0 where there is none), strongest first.
    """
    with use_threads(threads) as used:
        found, strength = _enrich(
            matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), shares.indptr.astype(np.int64),
            shares.indices.astype(np.int32), shares.data.astype(np.float32),
            own.indptr.astype(np.int64), own.indices.astype(np.int32), max_new,
            min(max(matrix.shape[0], 1), used * BLOCKS_PER_THREAD),
        )  # fmt: skip
    return found, strength.astype(np.float32)
