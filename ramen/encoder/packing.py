"""Packing: several short texts in one row of tokens, with hardly any padding.

A row holds complete texts, one after the other. Attention is masked to the text of each token and positions restart at
each text, so a text's vector does not depend on the other texts of its row.

Letters: n rows, w tokens per row, s slots (largest number of texts in a row).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SHORTEST_ROW = 64
"""Minimum tokens per row. Longer rows cost more attention (quadratic), shorter rows leave more padding."""


@dataclass(frozen=True)
class Pack:
    """Packed tokens.

    Attributes:
        ids: int64 [n, w].
        positions: int64 [n, w], position of each token within its text.
        slots: int64 [n, w], index in its row of the text that a token belongs to; -1 = padding.
        cells: int64 [k], row * s + slot of each text.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    cells: Ints

    @property
    def num_slots(self) -> int:
        """Number of slots s."""
        return int(self.slots.max(initial=0)) + 1


def row_length(length: int) -> int:
    """Return the row length for texts of this length: a power of two with room for at least two of them."""
    return max(SHORTEST_ROW, 1 << (2 * length - 1).bit_length())


def assign_rows(lengths: Ints, room: int) -> tuple[Ints, Ints, Ints]:
    """Assign texts to rows by best fit: longest text first, each to the row with the least sufficient space.

    Args:
        lengths: int64 [k], each at most `room`.
        room: tokens per row.

    Returns:
        Row, first token within the row and slot of each text; int64 [k] each.
    """
    rows, starts, slots = (np.zeros(len(lengths), np.int64) for _ in range(3))
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # free tokens -> rows
    free_bits = 0  # bit f is set if a row has f free tokens
    used: list[int] = []
    count: list[int] = []
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = free_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_bits &= ~(1 << free)
        else:
            free, row = room, len(used)
            used.append(0)
            count.append(0)
        rows[i], starts[i], slots[i] = row, used[row], count[row]
        used[row] += length
        count[row] += 1
        open_rows[free - length].append(row)
        free_bits |= 1 << (free - length)
    return rows, starts, slots


def packs(ids: NDArray[np.int32], begin: Ints, lengths: Ints, pad_id: int, budget: int) -> Iterator[tuple[Ints, Pack]]:
    """Split texts into packs of at most `budget` tokens, including padding (a single row is always allowed).

    Args:
        ids: int32 [tokens], concatenated texts.
        begin, lengths: int64 [k], start of each text in `ids` and its number of tokens.
        pad_id: padding token.
        budget: tokens per pack.

    Yields:
        Positions int64 [p] of the packed texts among the k, and a `Pack` with its cells in that order.
    """
    room_of = np.array([row_length(length) for length in range(int(lengths.max(initial=1)) + 1)])[lengths]
    for room in np.unique(room_of):
        members = np.flatnonzero(room_of == room)
        row, start, slot = assign_rows(lengths[members], int(room))
        order = np.argsort(row, kind="stable")
        members, row, start, slot = members[order], row[order], start[order], slot[order]
        rows = int(row[-1]) + 1
        per_pack = max(1, budget // int(room))
        per_pack = -(-rows // -(-rows // per_pack))  # the fewest packs, of equal size
        for first in range(0, rows, per_pack):
            low, high = np.searchsorted(row, [first, first + per_pack])
            part = members[low:high]
            yield (
                part,
                _fill(ids, begin[part], lengths[part], row[low:high] - first, start[low:high], slot[low:high], pad_id),
            )


def _fill(ids: NDArray[np.int32], begin: Ints, lengths: Ints, row: Ints, start: Ints, slot: Ints, pad_id: int) -> Pack:
    width = int((start + lengths).max())
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.repeat(row * width + start, lengths) + within
    shape = (int(row.max()) + 1, width)
    filled = [np.full(shape, value, np.int64) for value in (pad_id, 0, -1)]
    for array, values in zip(
        filled, (ids[np.repeat(begin, lengths) + within], within, np.repeat(slot, lengths)), strict=True
    ):
        array.reshape(-1)[flat] = values
    num_slots = int(slot.max()) + 1
    return Pack(filled[0], filled[1], filled[2], row * num_slots + slot)
