"""Reading sparse matrices and pair lists of the Extreme Classification Repository, line by line and strictly."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.sources.lines import Defects, numbered_lines
from ramen.data.sources.npz import NotSparse, WrongShape, read_npz, read_npz_shape
from ramen.data.sparse import binary

# possessive: a line of a million digits must not be tried in every way of cutting it
_NUMBER = rb"[-+]?+(?:\d++\.?+\d*+|\.\d++)(?:[eE][-+]?+\d++)?+"
_ROW = re.compile(rb"[ \t]*+(?:\d++:%b(?:[ \t]++\d++:%b)*+)?+[ \t]*+" % (_NUMBER, _NUMBER))
_HEADER = re.compile(rb"\s*(\d+)\s+(\d+)\s*")
_PAIR = re.compile(rb"\s*(\d+)[\s,]+(\d+)\s*")
MOST = 2**31 - 1
"""Rows and columns at most: indices are int32."""
_CHUNK = 65_536
"""Rows parsed at a time."""


@dataclass(frozen=True)
class Expected:
    """The shape that a matrix must have, and for messages what decides it."""

    rows: int
    columns: int
    rows_of: str = "rows"
    columns_of: str = "columns"

    def add_mismatch(self, path: Path, found: tuple[int, int], defects: Defects) -> None:
        """Record that a matrix is of another shape."""
        expected = (
            f"expected {self.rows} rows ({self.rows_of}) and {self.columns} columns ({self.columns_of}), "
            f"found {found[0]} and {found[1]}"
        )
        defects.add_unreadable(path, expected, "row i of every file must be the same item")


def read_matrix(path: Path, defects: Defects, expected: Expected | None = None) -> sp.csr_matrix:
    """Read a `.npz`, `.txt` or `.txt.gz` matrix as binary CSR (float32 ones, int32 columns, sorted, unique).

    Explicit zeros are dropped, values above become 1, others are defects. An empty line is an empty row. What is broken
    goes to `defects`, as does another shape than the expected one; the matrix is then not to be used. No memory is
    taken for rows and columns that a header claims and the file does not hold.
    """
    return _read_npz(path, defects, expected) if path.suffix == ".npz" else _read_text(path, defects, expected)


def read_shape(path: Path, defects: Defects) -> tuple[int, int] | None:
    """Read only the rows and columns that a matrix's header states; None if they cannot be read (see `defects`)."""
    if path.suffix != ".npz":
        return _read_header(path, numbered_lines(path, defects), defects)
    try:
        return read_npz_shape(path) if defects.check_file(path) else None
    except NotSparse as error:
        _add_not_sparse(path, error, defects)
        return None


def read_pairs(path: Path, shape: tuple[int, int], defects: Defects) -> sp.csr_matrix:
    """Read a filter file, `row column` per line; empty files, empty lines and repeated pairs are fine."""
    rows, columns = array("i"), array("i")
    for number, line in numbered_lines(path, defects):
        if not line.strip():
            continue
        match = _PAIR.fullmatch(line)
        if match is None:
            defects.add(path, f"expected `row column`, found {_show(line)}", line=number)
            continue
        row, column = _index(match[1]), _index(match[2])
        if row >= shape[0] or column >= shape[1]:
            found = _text(match[1] + b" " + match[2])
            expected = f"expected a row below {shape[0]} and a column below {shape[1]}, found {found}"
            defects.add(path, expected, "indices count from zero", line=number)
            continue
        rows.append(row)
        columns.append(column)
    return binary(sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape))


def _index(digits: bytes) -> int:
    """A row or column number; what fits no index is `MOST` + 1, as numbers of thousands of digits are none."""
    digits = digits.lstrip(b"0")
    return min(int(digits or b"0"), MOST + 1) if len(digits) <= 10 else MOST + 1


def _none() -> sp.csr_matrix:
    """What stands for a broken matrix: one of the shape that its header claims may take all memory."""
    return sp.csr_matrix((0, 0), dtype=np.float32)


def _add_not_sparse(path: Path, error: NotSparse, defects: Defects) -> None:
    defects.add_unreadable(path, f"cannot be read as a sparse matrix of scipy ({error})")


def _read_npz(path: Path, defects: Defects, expected: Expected | None) -> sp.csr_matrix:
    if not defects.check_file(path):
        return _none()
    try:
        matrix = read_npz(path, None if expected is None else (expected.rows, expected.columns))
    except WrongShape as error:
        assert expected is not None
        expected.add_mismatch(path, error.found, defects)
        return _none()
    except NotSparse as error:
        _add_not_sparse(path, error, defects)
        return _none()
    lengths = np.diff(matrix.indptr)
    rows = np.repeat(np.arange(matrix.shape[0]), lengths)
    matrix.sort_indices()
    repeated = (np.diff(matrix.indices) == 0) & (np.diff(rows) == 0)
    for edge in islice(np.flatnonzero(repeated), 3):
        defects.add(path, f"column {matrix.indices[edge]} twice in a row", line=int(rows[edge]) + 1)
    for edge in islice(np.flatnonzero(~countable(matrix.data)), 3):
        add_uncountable(path, matrix.data[edge], defects, line=int(rows[edge]) + 1)
    return binary(matrix)


def _read_header(path: Path, lines: Iterator[tuple[int, bytes]], defects: Defects) -> tuple[int, int] | None:
    """Rows and columns that the first of some lines states; None, and a defect, for another line."""
    _, header = next(lines, (0, b""))
    match = _HEADER.fullmatch(header)
    if match is None:
        defects.add_unreadable(path, f"expected a header `rows columns`, found {_show(header)}", line=1)
        return None
    shape = _index(match[1]), _index(match[2])
    if max(shape) > MOST:
        defects.add_unreadable(path, f"expected at most {MOST} rows and columns, found {_show(header)}", line=1)
        return None
    return shape


def _read_text(path: Path, defects: Defects, expected: Expected | None) -> sp.csr_matrix:
    lines = numbered_lines(path, defects)
    if (shape := _read_header(path, lines, defects)) is None:
        return _none()
    if expected is not None and shape != (expected.rows, expected.columns):
        expected.add_mismatch(path, shape, defects)
        return _none()
    counts, columns, values = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    read = 0
    while chunk := [line for _, line in islice(lines, _CHUNK)]:
        of_rows, found, stored = _parse(path, chunk, 2 + read, shape[1], defects)
        counts.append(of_rows)
        columns.append(found)
        values.append(stored)
        read += len(chunk)
        if read > shape[0]:
            break  # a small packed file may hold any number of lines
    if read != shape[0] and not defects.found:
        mend = "an empty row needs its own (empty) line" if read < shape[0] else "an empty line at the end is a row too"
        more = " or more" if read > shape[0] and len(chunk) == _CHUNK else ""
        defects.add(path, f"header says {shape[0]} rows, found {read}{more}", mend, line=1)
    if defects.found:
        return _none()
    indptr = np.concatenate(counts).cumsum()
    return binary(sp.csr_matrix((np.concatenate(values), np.concatenate(columns), indptr), shape=shape))


def _parse(
    path: Path, chunk: list[bytes], first: int, columns: int, defects: Defects
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Entries per row, columns and values of some rows, of which the first stands on line `first`."""
    for offset, line in enumerate(chunk):
        if _ROW.fullmatch(line) is None:
            defects.add(path, f"expected `column:value` pairs, found {_culprit(line)}", line=first + offset)
            chunk[offset] = b""
    counts = np.fromiter((line.count(b":") for line in chunk), np.int64, len(chunk))
    text = b" ".join(chunk).replace(b":", b" ").decode().strip()
    numbers = np.fromstring(text, sep=" ") if text else np.zeros(0)  # numpy reads a blank string as [-1.]
    assert len(numbers) == 2 * counts.sum()
    stated = numbers[::2]  # not whole numbers yet: one that fits no integer must not wrap around
    found = np.minimum(stated, columns).astype(np.int64)
    row = np.repeat(np.arange(len(chunk)), counts)
    for entry in islice(np.flatnonzero(stated >= columns), 20):
        expected = f"expected columns below {columns} (the header's), found {stated[entry]:.0f}"
        defects.add(path, expected, "columns count from zero", line=first + int(row[entry]))
    order = np.lexsort((found, row))  # `binary` sorts; in which order a row names its columns means nothing
    twice = (np.diff(found[order]) == 0) & (np.diff(row[order]) == 0) & (found[order][1:] < columns)
    repeated = order[1:][twice]
    for entry in islice(repeated[np.unique(row[repeated], return_index=True)[1]], 20):
        defects.add(path, f"column {found[entry]} twice", "keep each column once", line=first + int(row[entry]))
    for entry in islice(np.flatnonzero(~countable(numbers[1::2])), 20):
        add_uncountable(path, numbers[2 * entry + 1], defects, line=first + int(row[entry]))
    return counts, found.astype(np.int32), numbers[1::2].astype(np.float32)


def countable(values: Any) -> Any:
    """Whether a value, or each of an array, can say that a pair is true: finite, not below 0 (NaN would count as 1)."""
    return (values >= 0) & (values < np.inf)


def add_uncountable(path: Path, value: float, defects: Defects, *, line: int, field: str | None = None) -> None:
    """Record a value that is not `countable`."""
    found = str(value).removesuffix(".0")
    mend = "what is no true pair is left out, or 0"
    defects.add(path, f"expected a value of 0 or more, found {found}", mend, line=line, field=field)


def _culprit(line: bytes) -> str:
    bad = (token for token in line.split() if _ROW.fullmatch(token) is None)
    return _show(next(bad, line))


def _show(line: bytes) -> str:
    return repr(_text(line))


def _text(line: bytes) -> str:
    return line[:40].decode("utf-8", "replace") + ("..." if len(line) > 40 else "")
