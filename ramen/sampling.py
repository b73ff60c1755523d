"""Drawing: keyed generators, one column per row of a graph, and which of a batch's pairs are linked."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def keyed_rng(seed: int, stream: str, *position: int) -> np.random.Generator:
    """A generator that depends on its key only."""
    return np.random.default_rng([seed, zlib.crc32(stream.encode()), *position])


def among(ascending: NDArray[np.integer[Any]], values: NDArray[np.integer[Any]]) -> Bools:
    """Which values are among others that stand in ascending order: bool, shaped like `values`.

    `np.isin` would sort both each time: seconds a call where a few values are looked up in millions.
    """
    if not len(ascending):
        return np.zeros(values.shape, bool)
    place = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending[place] == values)


class RowSampler:
    """Draws one column per row of a CSR structure, uniformly or by edge weights.

    Args:
        indptr, indices: CSR structure.
        weights: float64 [edges], positive, or None for uniform.
    """

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], weights: NDArray[np.float64] | None = None) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self.cumulative = None if weights is None else np.concatenate([[0.0], np.cumsum(weights)])

    def draw(self, rows: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw for each of `rows`.

        Returns:
            (positions int64 [R] of the rows that have a column, columns int64 [R]).
        """
        u = rng.random(len(rows))  # drawn for every row, so that an emptied row does not shift the others
        start, stop = self.indptr[rows], self.indptr[rows + 1]
        kept = np.flatnonzero(stop > start)
        start, stop, u = start[kept], stop[kept], u[kept]
        if self.cumulative is None:
            edge = start + (u * (stop - start)).astype(np.int64)
        else:
            low, high = self.cumulative[start], self.cumulative[stop]
            edge = np.searchsorted(self.cumulative, low + u * (high - low), side="right") - 1
        return kept, self.indices[np.clip(edge, start, stop - 1)].astype(np.int64)


def scatter(numbers: Ints, key: int) -> NDArray[np.uint64]:
    """Pseudo-random 64-bit numbers that depend on a number and the key alone (the finaliser of splitmix64).

    Drawing for the anchors at hand costs nothing for the millions that are not.
    """
    x = numbers.astype(np.uint64) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))


class SharedSampler:
    """Draws one column per row so that rows with common columns tend to draw the same one.

    Every column runs a race with itself: an exponential time, divided by its weight, the same for all rows of a call; a
    row takes its first column home. For a row alone that is a draw by weight like any other. Two uniform rows agree
    with a probability of their Jaccard similarity, the most that is possible for all pairs at once (min-wise hashing,
    Broder 1997; weighted: Efraimidis and Spirakis 2006). So a step needs fewer distinct anchors for as many pulls.

    Args:
        indptr, indices: CSR structure.
        weights: float64 [columns], positive, or None for uniform.
    """

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], weights: NDArray[np.float64] | None = None) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self.weights = weights

    def draw(self, rows: Ints, key: int) -> tuple[Ints, Ints]:
        """Draw for each of `rows`; equal keys run the same race.

        Returns:
            (positions int64 [R] of the rows that have a column, columns int64 [R]).
        """
        start = self.indptr[rows]
        counts = self.indptr[rows + 1] - start
        kept = np.flatnonzero(counts)
        if not len(kept):
            return kept, np.zeros(0, np.int64)
        start, counts = start[kept], counts[kept]
        first = np.cumsum(counts) - counts
        columns = self.indices[np.arange(int(counts.sum())) + np.repeat(start - first, counts)].astype(np.int64)
        time = -np.log((scatter(columns, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54)
        if self.weights is not None:
            time /= self.weights[columns]
        order = np.lexsort((columns, time, np.repeat(np.arange(len(kept)), counts)))
        return kept, columns[order[first]]


class MembershipMask:
    """Looks up which of a batch's columns are linked to which of its rows."""

    def __init__(self, indptr: Ints, indices: NDArray[np.int32], num_columns: int) -> None:
        self.indptr = indptr.astype(np.int64)
        self.indices = indices
        self._place = np.full(num_columns, -1, np.int32)  # scratch: column -> position in the batch

    def __call__(self, rows: Ints, columns: Ints) -> Bools:
        """Mask bool [rows, columns] (columns distinct), true where the pair is stored."""
        mask = np.zeros((len(rows), len(columns)), bool)
        start = self.indptr[rows]
        counts = self.indptr[rows + 1] - start
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._place[columns] = np.arange(len(columns), dtype=np.int32)
        place = self._place[self.indices[start[owner] + within]]
        self._place[columns] = -1
        hit = place >= 0
        mask[owner[hit], place[hit]] = True
        return mask


def within_budget(pools: Mapping[str, Ints], keys: Mapping[str, int], most: int) -> dict[str, Ints]:
    """Keep `most` anchors of all sets together, each with the same chance.

    Args:
        pools: set name -> int64 [A] distinct anchors.
        keys: set name -> key of the lottery.
        most: anchors kept.
    """
    tickets = {name: scatter(pool, keys[name]) for name, pool in pools.items()}
    drawn = np.concatenate([np.zeros(0, np.uint64), *tickets.values()])
    if len(drawn) <= most:
        return dict(pools)
    last = np.partition(drawn, most)[most]
    return {name: pool[tickets[name] < last] for name, pool in pools.items()}
