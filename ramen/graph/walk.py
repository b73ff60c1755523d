"""Random walk with restart between anchors, through the documents and labels that share them.

The bipartite matrix B = [G_XA; G_ZA] has a row per document or label and a column per anchor. One hop goes from an
anchor to a random row that has it, then to a random anchor of that row. Before each hop the walk returns to its start
with probability `restart` (R-ICLR B: 400 hops, 0.8; same convention as `RandomWalk` of pyxclib).

Each start anchor has a separate random stream, keyed by (seed, anchor), so the result does not depend on the number of
threads or their order.
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
"""Blocks of start anchors per thread, to balance the load; each running block holds one counter per anchor."""


def walk(
    bipartite: sp.csr_matrix, *, hops: int, restart: float, top_k: int, degree_cap: int, seed: int, threads: int = 0
) -> sp.csr_matrix:
    """Walk from every anchor and keep the most visited anchors.

    Args:
        bipartite: B, CSR (N + L) x M; values are ignored.
        hops: hops per start anchor.
        restart: probability of returning to the start before a hop.
        top_k: number of other anchors to keep per start, most visited first (ties: lower index).
        degree_cap: rows and anchors with more edges are excluded from the walk.
        seed: seed of the random streams.
        threads: 0 = all cores.

    Returns:
        R, CSR M x M float32: share of the kept visits. Each row includes its diagonal and sums to 1. An anchor that
        cannot walk (isolated or over the cap) has only its diagonal.
    """
    rows, columns = walkable(bipartite, degree_cap)
    anchors = bipartite.shape[1]
    with use_threads(threads) as active:
        indices, counts = _walk(
            _narrow(columns.indptr), columns.indices.astype(np.int32), _narrow(rows.indptr),
            rows.indices.astype(np.int32), hops, np.uint64(restart * 2.0**32), top_k, np.uint64(seed),
            min(max(anchors, 1), active * BLOCKS_PER_THREAD),
        )  # fmt: skip
    kept = counts > 0
    indptr = np.concatenate([[0], np.cumsum(kept.sum(1))])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    matrix = sp.csr_matrix((shares[kept].astype(np.float32), indices[kept], indptr), shape=(anchors, anchors))
    matrix.sort_indices()
    return matrix


def _narrow(pointers: NDArray[Any]) -> NDArray[Any]:
    """Return row pointers as int32 if they fit, which halves the memory traffic of the walk's random reads."""
    return pointers.astype(np.int32 if pointers[-1] < 2**31 else np.int64)


def walkable(bipartite: sp.csr_matrix, degree_cap: int) -> tuple[sp.csr_matrix, sp.csc_matrix]:
    """Return B in CSR and CSC form, with rows and anchors over the cap emptied."""
    matrix = sp.csr_matrix((np.ones(bipartite.nnz, np.int8), bipartite.indices, bipartite.indptr), bipartite.shape)
    per_row = np.diff(matrix.indptr)
    per_anchor = np.bincount(matrix.indices, minlength=matrix.shape[1])
    keep = np.repeat(per_row <= degree_cap, per_row) & (per_anchor <= degree_cap)[matrix.indices]
    kept = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    rows = sp.csr_matrix((matrix.data[keep], matrix.indices[keep], kept), shape=matrix.shape)
    return rows, rows.tocsc()


@contextmanager
def use_threads(threads: int) -> Iterator[int]:
    """Set the number of numba's threads within the context (0 = all); yields that number."""
    before = numba.get_num_threads()
    active = min(threads or numba.config.NUMBA_NUM_THREADS, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(active)
    try:
        yield active
    finally:
        numba.set_num_threads(before)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _mix(x: Any) -> Any:
    """Hash 64 bits with the finaliser of SplitMix64 (a bijection)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _pick(bits: Any, first: Any, count: Any) -> Any:
    """Map 32 random bits to one of `count` positions from `first`, by multiply and shift instead of division."""
    return first + np.int64((bits * np.uint64(count)) >> np.uint64(32))


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _walk(a_ptr, a_rows, r_ptr, r_anchors, hops, restart, top_k, seed, blocks):  # type: ignore[no-untyped-def]
    """Return anchors int32 [M, top_k + 1] and visit counts int64 of the same shape; column 0 is the diagonal."""
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
            num_touched = _visits(start, a_ptr, a_rows, r_ptr, r_anchors, hops, restart, seed, counts, touched)
            out_counts[start, 0] = max(counts[start], 1)
            counts[start] = 0
            _keep_top(start, num_touched, counts, touched, out[start, 1:], out_counts[start, 1:])
    return out, out_counts


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _visits(start, a_ptr, a_rows, r_ptr, r_anchors, hops, restart, seed, counts, touched):  # type: ignore[no-untyped-def]
    """Walk from one start: fill `counts`, list the visited anchors in `touched`, and return their number."""
    low = np.uint64(0xFFFFFFFF)
    gamma = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(_mix(seed + gamma) ^ (np.uint64(start) * gamma + np.uint64(1)))
    current, num_touched = start, 0
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
        # branch-free: the processor cannot predict whether a visit is the first one
        count = counts[current]
        counts[current] = count + 1
        touched[num_touched] = current
        num_touched += count == 0
    return num_touched


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _keep_top(start, num_touched, counts, touched, out, out_counts):  # type: ignore[no-untyped-def]
    """Fill the top list (higher count first, then lower index) from the touched anchors, and clear `counts`."""
    k, filled = len(out), 0
    for i in range(num_touched):
        anchor = touched[i]
        count = counts[anchor]
        counts[anchor] = 0
        if count == 0:  # the start itself, which the caller stores
            continue
        position = filled
        while position > 0 and (
            out_counts[position - 1] < count or (out_counts[position - 1] == count and out[position - 1] > anchor)
        ):
            if position < k:
                out[position], out_counts[position] = out[position - 1], out_counts[position - 1]
            position -= 1
        if position < k:
            out[position], out_counts[position] = anchor, count
            filled = min(filled + 1, k)


@njit(parallel=True, cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _enrich(ptr, anchors, w_ptr, w_anchors, w_shares, own_ptr, own_anchors, max_new, blocks):  # type: ignore[no-untyped-def]
    """Return new anchors int32 [rows, max_new] and shares float64 of the same shape; a share of 0 = no anchor."""
    rows, columns = len(ptr) - 1, len(w_ptr) - 1
    out = np.zeros((rows, max_new), np.int32)
    out_shares = np.zeros((rows, max_new), np.float64)  # float64 like the sums, so that equal sums compare equal
    for block in prange(blocks):
        shares = np.zeros(columns, np.float64)
        touched = np.empty(columns, np.int32)
        for row in range(rows * block // blocks, rows * (block + 1) // blocks):
            degree, num_touched = ptr[row + 1] - ptr[row], 0
            for edge in range(ptr[row], ptr[row + 1]):
                anchor = anchors[edge]
                for near in range(w_ptr[anchor], w_ptr[anchor + 1]):
                    if shares[w_anchors[near]] == 0:
                        touched[num_touched] = w_anchors[near]
                        num_touched += 1
                    shares[w_anchors[near]] += w_shares[near] / degree
            for edge in range(ptr[row], ptr[row + 1]):
                shares[anchors[edge]] = 0.0
            for edge in range(own_ptr[row], own_ptr[row + 1]):
                shares[own_anchors[edge]] = 0.0
            _keep_top(row, num_touched, shares, touched, out[row], out_shares[row])
    return out, out_shares


def enrich(
    matrix: sp.csr_matrix, shares: sp.csr_matrix, self_anchors: sp.csr_matrix, max_new: int, threads: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Find the strongest anchors that a row does not have yet: top `max_new` of (row-normalised E) R.

    Args:
        matrix: E, CSR rows x M, cleaned edges.
        shares: R from `walk`, CSR M x M.
        self_anchors: CSR rows x M, anchors that are the row itself; they are never added.
        max_new: maximum number of new anchors per row.

    Returns:
        Anchors int32 [rows, max_new] and shares float32 of the same shape, strongest first; a share of 0 = no anchor.
    """
    with use_threads(threads) as active:
        anchors, strength = _enrich(
            matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), shares.indptr.astype(np.int64),
            shares.indices.astype(np.int32), shares.data.astype(np.float32),
            self_anchors.indptr.astype(np.int64), self_anchors.indices.astype(np.int32), max_new,
            min(max(matrix.shape[0], 1), active * BLOCKS_PER_THREAD),
        )  # fmt: skip
    return anchors, strength.astype(np.float32)
