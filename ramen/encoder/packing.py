"""Packing: several short texts in one row of tokens, so that hardly anything is padding.

A row holds whole texts, end to end; attention is masked to the text a token belongs to and positions start again at
each text, so a text's vector does not depend on its neighbours. Letters: n rows, w tokens per row, s slots (texts) of
the fullest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SHORTEST_ROW = 64
"""Tokens of a row of short texts. Attention costs the square of it, and shorter rows leave more padding."""


@dataclass(frozen=True)
class Pack:
    """Packed tokens.

    Attributes:
        ids: int64 [n, w].
        positions: int64 [n, w], place of each token within its text.
        slots: int64 [n, w], which text of its row a token belongs to; -1 = padding.
        cells: int64 [k], row * s + slot of each packed text.
    """

    ids: Ints
    positions: Ints
    slots: Ints
    cells: Ints

    @property
    def num_slots(self) -> int:
        """s."""
        return int(self.slots.max(initial=0)) + 1


def row_length(length: int) -> int:
    """Tokens of the rows in which texts of this length are packed: a power of two that holds at least two."""
    return max(SHORTEST_ROW, 1 << (2 * length - 1).bit_length())


def assign(lengths: Ints, room: int) -> tuple[Ints, Ints, Ints]:
    """Put texts into rows of `room` tokens, longest first, each into the row it fills best.

    Args:
        lengths: int64 [k], none above `room`.

    Returns:
        (row, first token within the row, slot), each int64 [k].
    """
    rows, starts, slots = (np.zeros(len(lengths), np.int64) for _ in range(3))
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # by tokens left
    left_over = 0  # bit f is set while some row has f tokens left
    used: list[int] = []
    count: list[int] = []
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = left_over >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                left_over &= ~(1 << free)
        else:
            free, row = room, len(used)
            used.append(0)
            count.append(0)
        rows[i], starts[i], slots[i] = row, used[row], count[row]
        used[row] += length
        count[row] += 1
        open_rows[free - length].append(row)
        left_over |= 1 << (free - length)
    return rows, starts, slots


def packs(ids: NDArray[np.int32], begin: Ints, lengths: Ints, pad_id: int, budget: int) -> Iterator[tuple[Ints, Pack]]:
    """Cut texts into packs of at most `budget` tokens, padding included (a single row is always allowed).

    Args:
        ids: int32 [tokens], all texts end to end.
        begin, lengths: int64 [k], where each text starts in `ids`, and its tokens.
        pad_id: token used for padding.

    Yields:
        (places int64 [p] of the packed texts among the k, `Pack` with its cells in that order).
    """
    room_of = np.array([row_length(length) for length in range(int(lengths.max(initial=1)) + 1)])[lengths]
    for room in np.unique(room_of):
        members = np.flatnonzero(room_of == room)
        row, start, slot = assign(lengths[members], int(room))
        order = np.argsort(row, kind="stable")
        members, row, start, slot = members[order], row[order], start[order], slot[order]
        rows = int(row[-1]) + 1
        per_pack = max(1, budget // int(room))
        per_pack = -(-rows // -(-rows // per_pack))  # as many packs as needed, of equal size
        for first in range(0, rows, per_pack):
            low, high = np.searchsorted(row, [first, first + per_pack])
            here = members[low:high]
            yield (
                here,
                _fill(ids, begin[here], lengths[here], row[low:high] - first, start[low:high], slot[low:high], pad_id),
            )


def _fill(ids: NDArray[np.int32], begin: Ints, lengths: Ints, row: Ints, start: Ints, slot: Ints, pad_id: int) -> Pack:
    width = int((start + lengths).max())
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.repeat(row * width + start, lengths) + within
    shape = (int(row.max()) + 1, width)
    filled = [np.full(shape, value, np.int64) for value in (pad_id, 0, -1)]
    for array, values in zip(
        filled, (ids[np.repeat(begin, lengths) + within], within, np.repeat(slot, lengths)), strict=True
    ):
        array.reshape(-1)[place] = values
    num_slots = int(slot.max()) + 1
    return Pack(filled[0], filled[1], filled[2], row * num_slots + slot)
