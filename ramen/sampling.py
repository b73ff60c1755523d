"""Random sampling with keys, and lookups in sparse structures, shared by graphs, base algorithms and training."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def keyed_rng(seed: int, stream: str, *position: int) -> np.random.Generator:
    """Return a random generator that depends only on its key: seed, stream name and position."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), *position])


def isin_sorted(ascending: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]]) -> Bools:
    """Test which of `values` occur in the sorted array `ascending`: bool, shape of `values`.

    `np.isin` sorts both arrays in every call, which takes seconds for a few values and millions of entries.
    """
    if not len(ascending):
        return np.zeros(values.shape, bool)
    index = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending[index] == values)


class RowSampler:
    """Samples one column per row of a CSR structure, uniformly or by edge weights.

    Args:
        indptr, indices: CSR structure.
        weights: float64 [edges], positive, or None for uniform.
    """

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], weights: NDArray[np.float64] | None = None) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self.cumulative = None if weights is None else np.concatenate([[0.0], np.cumsum(weights)])

    def draw(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Sample a column for each of `rows`.

        Returns:
            Positions int64 [R] of the rows that have a column, and columns int64 [R].
        """
        u = rng.random(len(rows))  # for every row, so that an empty row does not change the samples of the others
        start, stop = self.indptr[rows], self.indptr[rows + 1]
        kept = np.flatnonzero(stop > start)
        start, stop, u = start[kept], stop[kept], u[kept]
        if self.cumulative is None:
            edge = start + (u * (stop - start)).astype(np.int64)
        else:
            low, high = self.cumulative[start], self.cumulative[stop]
            edge = np.searchsorted(self.cumulative, low + u * (high - low), side="right") - 1
        return kept, self.indices[np.clip(edge, start, stop - 1)].astype(np.int64)


def hash_numbers(numbers: Ints, key: int) -> NDArray[np.uint64]:
    """Hash numbers with a key to pseudo-random 64-bit numbers (the finaliser of SplitMix64).

    Unlike a random generator, it costs nothing for the millions of numbers that a step does not use.
    """
    x = numbers.astype(np.uint64) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))


class SharedSampler:
    """Samples one column per row so that rows with common columns tend to get the same one.

    Weighted min-wise hashing by an exponential race: each column draws an exponential time, divided by its weight and
    equal for all rows of a call; a row takes its earliest column. For a single row this is ordinary weighted sampling.
    Two rows with uniform weights agree with a probability equal to their Jaccard similarity, the maximum that is
    possible for all pairs at once (Broder 1997; weighted: Efraimidis and Spirakis 2006). A step therefore needs fewer
    distinct anchors for the same number of links.

    Args:
        indptr, indices: CSR structure.
        weights: float64 [columns], positive, or None for uniform.
    """

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], weights: NDArray[np.float64] | None = None) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self.weights = weights

    def draw(self, rows: Ints, key: int) -> tuple[Ints, Ints]:
        """Sample a column for each of `rows`; equal keys give the same column times.

        Returns:
            Positions int64 [R] of the rows that have a column, and columns int64 [R].
        """
        start = self.indptr[rows]
        counts = self.indptr[rows + 1] - start
        kept = np.flatnonzero(counts)
        if not len(kept):
            return kept, np.zeros(0, np.int64)
        start, counts = start[kept], counts[kept]
        first = np.cumsum(counts) - counts
        columns = self.indices[np.arange(int(counts.sum())) + np.repeat(start - first, counts)].astype(np.int64)
        time = -np.log((hash_numbers(columns, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54)
        if self.weights is not None:
            time /= self.weights[columns]
        order = np.lexsort((columns, time, np.repeat(np.arange(len(kept)), counts)))
        return kept, columns[order[first]]


class MembershipMask:
    """Looks up which pairs of a batch's rows and columns are stored in a CSR structure."""

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], num_columns: int) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self._position = np.full(num_columns, -1, np.int32)  # column -> position in the batch; -1 between calls

    def __call__(self, rows: Ints, columns: Ints) -> Bools:
        """Return bool [rows, columns], true for a stored pair; `columns` must be distinct."""
        mask = np.zeros((len(rows), len(columns)), bool)
        start = self.indptr[rows]
        counts = self.indptr[rows + 1] - start
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._position[columns] = np.arange(len(columns), dtype=np.int32)
        position = self._position[self.indices[start[owner] + within]]
        self._position[columns] = -1
        hit = position >= 0
        mask[owner[hit], position[hit]] = True
        return mask


def sample_pools(pools: Mapping[str, Ints], keys: Mapping[str, int], most: int) -> dict[str, Ints]:
    """Sample at most `most` anchors over all sets, all with equal probability.

    Args:
        pools: set name -> int64 [A] distinct anchors.
        keys: set name -> key of the hash that decides.
        most: maximum number of anchors to keep, all sets together.
    """
    hashes = {name: hash_numbers(pool, keys[name]) for name, pool in pools.items()}
    values = np.concatenate([np.zeros(0, np.uint64), *hashes.values()])
    if len(values) <= most:
        return dict(pools)
    threshold = np.partition(values, most)[most]
    return {name: pool[hashes[name] < threshold] for name, pool in pools.items()}
