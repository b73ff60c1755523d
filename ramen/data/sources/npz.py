"""Reading scipy's sparse matrices from `.npz` files that anyone may have written.

`scipy.sparse.load_npz` allocates what a header claims, unpacks whatever the archive says, and takes positions of any
type. Here every claim is checked against the bytes that are there before memory is taken for it.
"""

from __future__ import annotations

import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.errors import os_error_text

FORMATS = {
    "csr": ("indices", "indptr", "data"),
    "csc": ("indices", "indptr", "data"),
    "coo": ("row", "col", "data"),
}
"""Form of a sparse matrix -> its arrays."""
_KINDS = {"format": "SU", "data": "biuf"}
"""Array -> kinds of numpy's types that it may have; others hold whole numbers."""
_LARGEST_RATIO = 1100
"""Deflate packs at most 1,032 bytes into one."""
_SMALL = 1 << 20
_BLOCK = 1 << 24


class NotSparse(ValueError):
    """A file does not hold a sparse matrix; the message says why."""


def read_npz(path: Path, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """Read a CSR, CSC or COO matrix written by `scipy.sparse.save_npz`.

    Args:
        path: of the file.
        shape: expected rows and columns; a matrix of another shape is not loaded. None = any.

    Returns:
        CSR as stored: columns may be unsorted or repeated, values are whole or floating-point numbers. Of a matrix of
        another shape than `shape`, its entries are left out and its arrays are not allocated (see `WrongShape`).

    Raises:
        NotSparse: damaged, encrypted, another type or form, or larger than the memory that is free.
        WrongShape: not of the expected shape.
    """
    with _opened(path) as archive:
        return _read(archive, path.stat().st_size, shape)


def read_npz_shape(path: Path) -> tuple[int, int]:
    """Read only the rows and columns that a matrix states. Raises NotSparse."""
    with _opened(path) as archive:
        return _form(archive, path.stat().st_size)[1]


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; what reading it raises is raised as NotSparse."""
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, about headers written by Python 2
            yield archive
    except NotSparse:
        raise
    except OSError as error:
        raise NotSparse(os_error_text(error)) from None
    except MemoryError:
        raise NotSparse("not enough memory") from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise NotSparse(str(error)) from None
    except Exception as error:  # zipfile, numpy and scipy raise errors of a dozen kinds on damaged input
        raise NotSparse(f"{type(error).__name__}: {error}") from None


class WrongShape(NotSparse):
    """A sparse matrix is not of the expected shape.

    Attributes:
        found: rows and columns.
    """

    def __init__(self, found: tuple[int, int]) -> None:
        super().__init__(f"{found[0]} rows and {found[1]} columns")
        self.found = found


def _form(archive: zipfile.ZipFile, file_bytes: int) -> tuple[str, tuple[int, int]]:
    """Form and shape that a matrix states."""
    names = {info.filename for info in archive.infolist()}
    if "format.npy" not in names or "shape.npy" not in names:
        raise NotSparse("no sparse matrix of scipy (no `format` and `shape` in it); write it with save_npz")
    form = _array(archive, "format", file_bytes)
    kind = form.item() if form.size == 1 else b""
    kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    if kind not in FORMATS:
        raise NotSparse(
            f"a sparse matrix of the form {kind[:20]!r}, expected {', '.join(FORMATS)}; convert it by .tocsr()"
        )
    found = _array(archive, "shape", file_bytes)
    if found.shape != (2,) or not all(0 <= int(size) < 2**31 for size in found):
        raise NotSparse(f"expected two numbers from 0 to {2**31 - 1} as its shape")
    return kind, (int(found[0]), int(found[1]))


def _read(archive: zipfile.ZipFile, file_bytes: int, shape: tuple[int, int] | None) -> sp.csr_matrix:
    kind, (rows, columns) = _form(archive, file_bytes)
    if shape is not None and (rows, columns) != shape:
        raise WrongShape((rows, columns))
    first, second, values = (_array(archive, name, file_bytes) for name in FORMATS[kind])
    if len(first) != len(values) or (kind == "coo" and len(second) != len(values)):
        raise NotSparse(f"{len(values)} values for {len(first)} positions")
    if kind == "coo":
        _check_range(first, rows, "row")
        _check_range(second, columns, "column")
        return sp.csr_matrix((values, (first, second)), shape=(rows, columns))
    major, minor = (rows, columns) if kind == "csr" else (columns, rows)
    if len(second) != major + 1 or second[0] != 0 or int(second[-1]) != len(values) or (second[1:] < second[:-1]).any():
        raise NotSparse(
            f"`indptr` does not divide {len(values)} values into {major} {'rows' if kind == 'csr' else 'columns'}"
        )
    _check_range(first, minor, "column" if kind == "csr" else "row")
    made = sp.csr_matrix if kind == "csr" else sp.csc_matrix
    return sp.csr_matrix(made((values, first, second), shape=(rows, columns)))


def _check_range(positions: NDArray[Any], size: int, what: str) -> None:
    wrong = (positions < 0) | (positions >= size)
    if wrong.any():
        raise NotSparse(f"expected a {what} below {size}, found {positions[wrong][0]}")


def _array(archive: zipfile.ZipFile, name: str, file_bytes: int) -> NDArray[Any]:
    """One array of the archive, in the machine's byte order. Raises NotSparse before its memory is taken."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise NotSparse(f"no array `{name}` in it") from None
    if info.flag_bits & 0x1:
        raise NotSparse("encrypted; write it without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotSparse(f"`{name}` is packed by another method than numpy's; write it with save_npz")
    if info.compress_size > file_bytes or info.file_size > info.compress_size * _LARGEST_RATIO + _SMALL:
        raise NotSparse(f"`{name}` claims {info.file_size:,} bytes, which the file cannot hold")
    with archive.open(info) as stream:
        shape, dtype = _header(stream)
        if dtype.hasobject or dtype.kind not in _KINDS.get(name, "iu"):
            expected = "numbers" if name == "data" else "text" if name == "format" else "whole numbers"
            raise NotSparse(f"`{name}` holds {dtype.name}, expected {expected}")
        size = math.prod(shape) * dtype.itemsize
        if len(shape) > 1 or (not shape and name != "format") or size != info.file_size - stream.tell():
            raise NotSparse(
                f"`{name}` claims {shape} {dtype.name} values, but holds {info.file_size - stream.tell():,} bytes"
            )
        free = psutil.virtual_memory().available
        if size > max(free, _SMALL):
            raise NotSparse(f"`{name}` takes {size / 2**30:.1f} GB of memory, {free / 2**30:.1f} GB are free")
        values = np.empty(shape, dtype)
        view = values.reshape(-1).view(np.uint8).data if size else memoryview(b"")
        filled = 0
        while filled < size:
            if not (got := stream.readinto(view[filled : filled + _BLOCK])):  # type: ignore[attr-defined]
                raise NotSparse(f"`{name}` ends after {filled:,} of {size:,} bytes")
            filled += got
        if stream.read(1):  # at the end, zipfile compares the checksum
            raise NotSparse(f"`{name}` goes on after its end")
    return values if name == "format" else values.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, whose values come next in the stream."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise NotSparse(f"version {version[0]}.{version[1]} of numpy's format; write it with save_npz")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if any(size < 0 for size in shape):
        raise NotSparse(f"an array of shape {shape}")
    return shape, dtype
