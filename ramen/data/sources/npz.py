"""Safe reader of scipy's sparse matrices in `.npz` files from untrusted sources.

`scipy.sparse.load_npz` allocates what a header claims, decompresses without limit, and accepts indices of any type.
This reader checks every claim against the size of the file before it allocates memory.
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
"""Format of a sparse matrix -> names of its arrays."""
_KINDS = {"format": "SU", "data": "biuf"}
"""Array -> allowed kinds of its dtype; other arrays hold integers."""
_LARGEST_RATIO = 1100
"""Upper bound of deflate's compression ratio, which is 1,032."""
_SMALL = 1 << 20
_BLOCK = 1 << 24


class NotSparse(ValueError):
    """A file is not a valid sparse matrix; the message gives the reason."""


def read_npz(path: Path, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """Read a CSR, CSC or COO matrix written by `scipy.sparse.save_npz`.

    Args:
        path: the file.
        shape: expected rows and columns, checked before the arrays are loaded; None = any.

    Returns:
        CSR as stored: columns may be unsorted or repeated, values are integers or floating-point numbers.

    Raises:
        NotSparse: damaged, encrypted, of another type or format, or larger than the free memory.
        WrongShape: not of the expected shape.
    """
    with _open_archive(path) as archive:
        return _read_matrix(archive, path.stat().st_size, shape)


def read_npz_shape(path: Path) -> tuple[int, int]:
    """Read only the number of rows and columns. Raises NotSparse."""
    with _open_archive(path) as archive:
        return _read_format(archive, path.stat().st_size)[1]


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; errors of reading it are raised as NotSparse."""
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers written by Python 2
            yield archive
    except NotSparse:
        raise
    except OSError as error:
        raise NotSparse(os_error_text(error)) from None
    except MemoryError:
        raise NotSparse("not enough memory") from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise NotSparse(str(error)) from None
    except Exception as error:  # zipfile, numpy and scipy raise many kinds of errors on damaged input
        raise NotSparse(f"{type(error).__name__}: {error}") from None


class WrongShape(NotSparse):
    """A sparse matrix does not have the expected shape.

    Attributes:
        found: rows and columns.
    """

    def __init__(self, found: tuple[int, int]) -> None:
        super().__init__(f"{found[0]} rows and {found[1]} columns")
        self.found = found


def _read_format(archive: zipfile.ZipFile, file_bytes: int) -> tuple[str, tuple[int, int]]:
    """Read the format ("csr", "csc" or "coo") and the shape."""
    names = {info.filename for info in archive.infolist()}
    if "format.npy" not in names or "shape.npy" not in names:
        raise NotSparse("no arrays `format` and `shape`; write it with scipy.sparse.save_npz")
    array = _read_array(archive, "format", file_bytes)
    value = array.item() if array.size == 1 else b""
    kind = value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)
    if kind not in FORMATS:
        raise NotSparse(f"expected the format {', '.join(FORMATS)}, found {kind[:20]!r}; convert it with .tocsr()")
    shape = _read_array(archive, "shape", file_bytes)
    if shape.shape != (2,) or not all(0 <= int(size) < 2**31 for size in shape):
        raise NotSparse(f"expected two numbers from 0 to {2**31 - 1} as its shape")
    return kind, (int(shape[0]), int(shape[1]))


def _read_matrix(archive: zipfile.ZipFile, file_bytes: int, shape: tuple[int, int] | None) -> sp.csr_matrix:
    kind, (rows, columns) = _read_format(archive, file_bytes)
    if shape is not None and (rows, columns) != shape:
        raise WrongShape((rows, columns))
    first, second, values = (_read_array(archive, name, file_bytes) for name in FORMATS[kind])
    if len(first) != len(values) or (kind == "coo" and len(second) != len(values)):
        raise NotSparse(f"{len(first)} positions, but {len(values)} values")
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
    make = sp.csr_matrix if kind == "csr" else sp.csc_matrix
    return sp.csr_matrix(make((values, first, second), shape=(rows, columns)))


def _check_range(positions: NDArray[Any], size: int, axis: str) -> None:
    invalid = (positions < 0) | (positions >= size)
    if invalid.any():
        raise NotSparse(f"expected a {axis} below {size}, found {positions[invalid][0]}")


def _read_array(archive: zipfile.ZipFile, name: str, file_bytes: int) -> NDArray[Any]:
    """Read an array of the archive in native byte order. Raises NotSparse before memory is allocated."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise NotSparse(f"no array `{name}`") from None
    if info.flag_bits & 0x1:
        raise NotSparse("encrypted; write it without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotSparse(f"`{name}` has an unsupported compression method; write it with scipy.sparse.save_npz")
    if info.compress_size > file_bytes or info.file_size > info.compress_size * _LARGEST_RATIO + _SMALL:
        raise NotSparse(f"`{name}` claims {info.file_size:,} bytes, more than the file can hold")
    with archive.open(info) as stream:
        shape, dtype = _read_header(stream)
        if dtype.hasobject or dtype.kind not in _KINDS.get(name, "iu"):
            expected = "numbers" if name == "data" else "text" if name == "format" else "integers"
            raise NotSparse(f"`{name}` holds {dtype.name}, expected {expected}")
        size = math.prod(shape) * dtype.itemsize
        if len(shape) > 1 or (not shape and name != "format") or size != info.file_size - stream.tell():
            raise NotSparse(
                f"`{name}` claims {shape} {dtype.name} values, but holds {info.file_size - stream.tell():,} bytes"
            )
        free = psutil.virtual_memory().available
        if size > max(free, _SMALL):
            raise NotSparse(f"`{name}` needs {size / 2**30:.1f} GB of memory, {free / 2**30:.1f} GB are free")
        values = np.empty(shape, dtype)
        view = values.reshape(-1).view(np.uint8).data if size else memoryview(b"")
        filled = 0
        while filled < size:
            if not (count := stream.readinto(view[filled : filled + _BLOCK])):  # type: ignore[attr-defined]
                raise NotSparse(f"`{name}` ends after {filled:,} of {size:,} bytes")
            filled += count
        if stream.read(1):  # at the end of the stream zipfile verifies the checksum
            raise NotSparse(f"`{name}` has more than {size:,} bytes")
    return values if name == "format" else values.astype(dtype.newbyteorder("="), copy=False)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and dtype of an array and leave the stream at its first value."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise NotSparse(
            f"unsupported version {version[0]}.{version[1]} of numpy's format; write it with scipy.sparse.save_npz"
        )
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if any(size < 0 for size in shape):
        raise NotSparse(f"an array of shape {shape}")
    return shape, dtype
