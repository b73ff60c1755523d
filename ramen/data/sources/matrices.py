"""Strict readers of the Extreme Classification Repository's sparse matrices and pair lists."""

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
from ramen.data.sparse import to_binary

# possessive quantifiers: a line of a million digits must not cause backtracking
_NUMBER = rb"[-+]?+(?:\d++\.?+\d*+|\.\d++)(?:[eE][-+]?+\d++)?+"
_ROW = re.compile(rb"[ \t]*+(?:\d++:%b(?:[ \t]++\d++:%b)*+)?+[ \t]*+" % (_NUMBER, _NUMBER))
_HEADER = re.compile(rb"\s*(\d+)\s+(\d+)\s*")
_PAIR = re.compile(rb"\s*(\d+)[\s,]+(\d+)\s*")
MAX_SIZE = 2**31 - 1
"""Largest number of rows and columns: indices are int32."""
_CHUNK = 65_536
"""Rows parsed at a time."""


@dataclass(frozen=True)
class ExpectedShape:
    """The shape that a matrix must have, and where it comes from, for messages."""

    rows: int
    columns: int
    rows_of: str = "rows"
    columns_of: str = "columns"

    def add_mismatch(self, path: Path, found: tuple[int, int], defects: Defects) -> None:
        """Record that a matrix has another shape."""
        expected = (
            f"expected {self.rows} rows ({self.rows_of}) and {self.columns} columns ({self.columns_of}), "
            f"found {found[0]} and {found[1]}"
        )
        defects.add_unreadable(path, expected, "row i of every file must be the same item")


def read_matrix(path: Path, defects: Defects, expected: ExpectedShape | None = None) -> sp.csr_matrix:
    """Read a `.npz`, `.txt` or `.txt.gz` matrix as binary CSR (float32 ones, int32 columns, sorted, unique).

    Explicit zeros are dropped, positive values become 1, other values are defects. An empty line is an empty row.
    Memory is only allocated for the content of the file, not for the size that its header states.

    Args:
        path: the file.
        defects: receives the defects; if there are any, do not use the returned matrix.
        expected: another shape is a defect; None = any shape.
    """
    return _read_npz(path, defects, expected) if path.suffix == ".npz" else _read_text(path, defects, expected)


def read_shape(path: Path, defects: Defects) -> tuple[int, int] | None:
    """Read only the number of rows and columns in the header; None, and a defect, if they cannot be read."""
    if path.suffix != ".npz":
        return _read_header(path, numbered_lines(path, defects), defects)
    try:
        return read_npz_shape(path) if defects.check_file(path) else None
    except NotSparse as error:
        _add_not_sparse(path, error, defects)
        return None


def read_pairs(path: Path, shape: tuple[int, int], defects: Defects) -> sp.csr_matrix:
    """Read a filter file, `row column` per line; empty files, empty lines and repeated pairs are allowed."""
    rows, columns = array("i"), array("i")
    for number, line in numbered_lines(path, defects):
        if not line.strip():
            continue
        match = _PAIR.fullmatch(line)
        if match is None:
            defects.add(path, f"expected `row column`, found {_quote(line)}", line=number)
            continue
        row, column = _index(match[1]), _index(match[2])
        if row >= shape[0] or column >= shape[1]:
            found = _decode(match[1] + b" " + match[2])
            expected = f"expected a row below {shape[0]} and a column below {shape[1]}, found {found}"
            defects.add(path, expected, "indices start at zero", line=number)
            continue
        rows.append(row)
        columns.append(column)
    return to_binary(sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape))


def _index(digits: bytes) -> int:
    """Parse a row or column number of any number of digits; `MAX_SIZE` + 1 if it is no valid index."""
    digits = digits.lstrip(b"0")
    return min(int(digits or b"0"), MAX_SIZE + 1) if len(digits) <= 10 else MAX_SIZE + 1


def _empty_matrix() -> sp.csr_matrix:
    """Return the result for a broken matrix; a matrix of the shape in its header might exhaust the memory."""
    return sp.csr_matrix((0, 0), dtype=np.float32)


def _add_not_sparse(path: Path, error: NotSparse, defects: Defects) -> None:
    defects.add_unreadable(path, f"cannot be read as a scipy sparse matrix ({error})")


def _read_npz(path: Path, defects: Defects, expected: ExpectedShape | None) -> sp.csr_matrix:
    if not defects.check_file(path):
        return _empty_matrix()
    try:
        matrix = read_npz(path, None if expected is None else (expected.rows, expected.columns))
    except WrongShape as error:
        assert expected is not None
        expected.add_mismatch(path, error.found, defects)
        return _empty_matrix()
    except NotSparse as error:
        _add_not_sparse(path, error, defects)
        return _empty_matrix()
    lengths = np.diff(matrix.indptr)
    rows = np.repeat(np.arange(matrix.shape[0]), lengths)
    matrix.sort_indices()
    repeated = (np.diff(matrix.indices) == 0) & (np.diff(rows) == 0)
    for entry in islice(np.flatnonzero(repeated), 3):
        _add_repeated(path, matrix.indices[entry], defects, int(rows[entry]) + 1)
    for entry in islice(np.flatnonzero(~is_valid_value(matrix.data)), 3):
        add_invalid_value(path, matrix.data[entry], defects, line=int(rows[entry]) + 1)
    return to_binary(matrix)


def _read_header(path: Path, lines: Iterator[tuple[int, bytes]], defects: Defects) -> tuple[int, int] | None:
    """Parse the number of rows and columns in the first line; None, and a defect, if it is no header."""
    _, header = next(lines, (0, b""))
    match = _HEADER.fullmatch(header)
    if match is None:
        defects.add_unreadable(path, f"expected a header `rows columns`, found {_quote(header)}", line=1)
        return None
    shape = _index(match[1]), _index(match[2])
    if max(shape) > MAX_SIZE:
        defects.add_unreadable(path, f"expected at most {MAX_SIZE} rows and columns, found {_quote(header)}", line=1)
        return None
    return shape


def _read_text(path: Path, defects: Defects, expected: ExpectedShape | None) -> sp.csr_matrix:
    lines = numbered_lines(path, defects)
    if (shape := _read_header(path, lines, defects)) is None:
        return _empty_matrix()
    if expected is not None and shape != (expected.rows, expected.columns):
        expected.add_mismatch(path, shape, defects)
        return _empty_matrix()
    counts, columns, values = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    rows = 0
    while chunk := [line for _, line in islice(lines, _CHUNK)]:
        chunk_counts, chunk_columns, chunk_values = _parse_rows(path, chunk, 2 + rows, shape[1], defects)
        counts.append(chunk_counts)
        columns.append(chunk_columns)
        values.append(chunk_values)
        rows += len(chunk)
        if rows > shape[0]:
            break  # a small compressed file may hold any number of lines
    if rows != shape[0] and not defects.found:
        fix = "write an empty line for an empty row" if rows < shape[0] else "an empty line at the end counts as a row"
        more = " or more" if rows > shape[0] and len(chunk) == _CHUNK else ""
        defects.add(path, f"header says {shape[0]} rows, found {rows}{more}", fix, line=1)
    if defects.found:
        return _empty_matrix()
    indptr = np.concatenate(counts).cumsum()
    return to_binary(sp.csr_matrix((np.concatenate(values), np.concatenate(columns), indptr), shape=shape))


def _parse_rows(
    path: Path, chunk: list[bytes], first: int, columns: int, defects: Defects
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Return the entries per row, the columns and the values of the rows in `chunk`, which begins on line `first`."""
    for offset, line in enumerate(chunk):
        if _ROW.fullmatch(line) is None:
            defects.add(path, f"expected `column:value` pairs, found {_invalid_token(line)}", line=first + offset)
            chunk[offset] = b""
    counts = np.fromiter((line.count(b":") for line in chunk), np.int64, len(chunk))
    text = b" ".join(chunk).replace(b":", b" ").decode().strip()
    numbers = np.fromstring(text, sep=" ") if text else np.zeros(0)  # numpy parses a blank string as [-1.]
    assert len(numbers) == 2 * counts.sum()
    raw_columns = numbers[::2]  # still floats: a number beyond int64 must not wrap around
    found = np.minimum(raw_columns, columns).astype(np.int64)
    row = np.repeat(np.arange(len(chunk)), counts)
    for entry in islice(np.flatnonzero(raw_columns >= columns), 20):
        expected = f"expected columns below {columns} (from the header), found {raw_columns[entry]:.0f}"
        defects.add(path, expected, "columns start at zero", line=first + int(row[entry]))
    order = np.lexsort((found, row))  # a row may list its columns in any order
    duplicate = (np.diff(found[order]) == 0) & (np.diff(row[order]) == 0) & (found[order][1:] < columns)
    repeated = order[1:][duplicate]
    for entry in islice(repeated[np.unique(row[repeated], return_index=True)[1]], 20):
        _add_repeated(path, found[entry], defects, first + int(row[entry]))
    for entry in islice(np.flatnonzero(~is_valid_value(numbers[1::2])), 20):
        add_invalid_value(path, numbers[2 * entry + 1], defects, line=first + int(row[entry]))
    return counts, found.astype(np.int32), numbers[1::2].astype(np.float32)


def is_valid_value(values: Any) -> Any:
    """Return whether a value, or each value of an array, is finite and not negative (NaN would count as a pair)."""
    return (values >= 0) & (values < np.inf)


def add_invalid_value(path: Path, value: float, defects: Defects, *, line: int, field: str | None = None) -> None:
    """Record a value for which `is_valid_value` is false."""
    found = str(value).removesuffix(".0")
    fix = "leave out false pairs, or set them to 0"
    defects.add(path, f"expected a value of 0 or more, found {found}", fix, line=line, field=field)


def _add_repeated(path: Path, column: int, defects: Defects, line: int) -> None:
    defects.add(path, f"duplicate column {column} in this row", "list each column once", line=line)


def _invalid_token(line: bytes) -> str:
    invalid = (token for token in line.split() if _ROW.fullmatch(token) is None)
    return _quote(next(invalid, line))


def _quote(line: bytes) -> str:
    return repr(_decode(line))


def _decode(line: bytes) -> str:
    return line[:40].decode("utf-8", "replace") + ("..." if len(line) > 40 else "")
