"""Reading and writing of single files: atomic replacement, JSON, arrays, sparse matrices, text tables, hashes.

Readers treat every file as possibly damaged or foreign: an error becomes one line that names the file, and nothing is
unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ramen.errors import ArtifactError

RERUN = "run the stage that wrote it again"
"""Default remedy in the errors of the readers below."""
MAX_NAME_BYTES = 255 - len(".01234567.tmp") - 1
"""Longest file name for which the name of the temporary copy still fits the file system, in bytes."""
MAX_JSON_BYTES = 256 << 20
"""Largest JSON file that is read; the largest that ramen writes takes a few megabytes."""
ROWS_PER_WRITE = 1 << 17
"""Rows of a text table that are converted and written at a time."""

_WRITER_LIBRARIES = ("safetensors", "safetensors_rust", "pyarrow")
"""Libraries with their own error classes for a failed read or write."""
_TEMPORARY_NAME = re.compile(r"(?<=/)\.([^/]+)\.\w{8}(?:\.tmp)?(?=[/'\"]|$)")
"""Name made by `temporary_path`, inside a path; group 1 is the final name."""


# --- file system: permissions, space, errors --------------------------------------------------------------------


def check_writable(path: Path, what: str = "", remedy: str = "choose another path") -> None:
    """Raise an error if a file or directory cannot be created at a path; tried in the nearest existing folder.

    Args:
        path: the path; existing content is not touched.
        what: start of the message, such as an option's name and a space.
        remedy: end of the message.

    Raises:
        ArtifactError: the path cannot be written; the message gives the reason.
    """
    parent = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), Path("/"))
    try:
        if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is not a directory")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"{what}{path}: cannot be written ({reason}); {remedy}") from None


def check_room(needed: Mapping[Path, int]) -> None:
    """Raise an error if the disks of the outputs have too little free space.

    Args:
        needed: output path -> bytes that it needs at least.

    Raises:
        ArtifactError: a disk has less free space than its outputs need.
    """
    needed_by_disk: dict[int, tuple[Path, int]] = {}
    for path, size in needed.items():
        folder = next((folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()), Path("/"))
        device = folder.stat().st_dev
        first_folder, total = needed_by_disk.get(device, (folder, 0))
        needed_by_disk[device] = (first_folder, total + size)
    for folder, size in needed_by_disk.values():
        if (free := shutil.disk_usage(folder).free) < size:
            raise ArtifactError(
                f"{folder}: {free / 1e6:,.0f} MB free on its disk, expected at least {size / 1e6:,.0f} MB; free some "
                "space, or choose another directory"
            )


def describe_io_error(error: BaseException) -> str:
    """Return one line for an error of the file system (disk full, read-only, missing), "" for any other error.

    The line names the output, not the temporary file next to it.
    """
    if isinstance(error, OSError) and (error.filename or error.errno):
        return describe_os_error(error)
    if type(error).__module__.partition(".")[0] in _WRITER_LIBRARIES:
        text = re.sub(r"^.*I/O error: | \(os error \d+\)", "", str(error).strip().splitlines()[0])
        return _TEMPORARY_NAME.sub(r"\1", text)
    return ""


def describe_os_error(error: OSError) -> str:
    """Return `path: what is wrong` for an error of the operating system, without the path if it has none."""
    text = error.strerror or str(error).strip().partition("\n")[0] or type(error).__name__
    text = re.sub(r"^\[[Ee]rrno \d+\] ", "", text)
    if isinstance(error, FileExistsError) and error.filename and Path(error.filename).is_file():
        text = "is a file, expected a directory"
    if "[errno" in text.lower():  # pyarrow repeats the system's error at the end of its own
        text = os.strerror(error.errno) if error.errno else text
    if error.filename is None:
        return _TEMPORARY_NAME.sub(r"\1", text)
    path = _TEMPORARY_NAME.sub(r"\1", os.fsdecode(error.filename))
    return f"{path}: {text}"


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path being written to an error of the file system that names none, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def apply_umask(folder: Path) -> None:
    """Give every file under a folder that this process created the permissions of the folder.

    safetensors writes its files with mode 0600, which other users of a shared disk cannot read.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def sync_folder(folder: Path) -> None:
    """Apply the umask to everything under a new folder and write all of it to the disk, before it is renamed."""
    apply_umask(folder)
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- atomic writes and hashes -----------------------------------------------------------------------------------


def temporary_path(path: Path, suffix: str = "") -> Path:
    """Return an unused hidden path in the same folder. Unlike with `tempfile`, the umask decides the permissions."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: yields a temporary path to write, synced and renamed at the end, deleted on error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode & 0o777
    try:
        with add_path_to_errors(path):
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.chmod(mode)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically, in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with sorted keys: equal values give equal bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_sha256(path: Path) -> str:
    """Return the hex sha256 of the relative paths and bytes of a folder's files."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\0".encode())
    return digest.hexdigest()


# --- reading files that may be damaged or foreign ---------------------------------------------------------------


@contextmanager
def wrap_read_errors(file: Path, remedy: str = RERUN) -> Iterator[None]:
    """Turn every error while a file is read and parsed into one line that names the file.

    Raises:
        ArtifactError: the file is missing, cannot be read, or has unexpected content.
    """
    try:
        yield
    except ArtifactError:
        raise
    except FileNotFoundError:
        raise ArtifactError(f"{file}: missing; {remedy}") from None
    except OSError as error:
        reason = error.strerror or str(error).strip().partition("\n")[0]
        raise ArtifactError(f"{file}: cannot be read ({shorten(reason)}); {remedy}") from None
    except MemoryError:
        raise ArtifactError(f"{file}: needs more memory than is available and may be damaged; {remedy}") from None
    except Exception as error:  # parsers raise anything, from KeyError to zipfile's own classes
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ArtifactError(f"{file}: cannot be read ({shorten(reason)}); {remedy}") from None


def read_json(file: Path, form: Any = Any, *, remedy: str = RERUN) -> Any:
    """Read a JSON file and check its type.

    Args:
        file: the file, in UTF-8.
        form: a type that pydantic checks strictly, such as `dict[str, float]`.
        remedy: end of the message about a broken file.

    Raises:
        ArtifactError: missing, too large, not valid JSON, or of another type.
    """
    from pydantic_core import from_json

    with wrap_read_errors(file, remedy):
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise ArtifactError(f"{file}: is not a file; {remedy}")
        if status.st_size > MAX_JSON_BYTES:
            raise ArtifactError(f"{file}: {status.st_size:,} bytes, expected at most {MAX_JSON_BYTES:,}; {remedy}")
        data = file.read_bytes()
    try:
        value = from_json(data)
    except ValueError as error:
        raise ArtifactError(f"{file}: not valid JSON ({shorten(error)}); {remedy}") from None
    return check_type(value, form, str(file), remedy)


def check_type(value: Any, form: Any, where: str, remedy: str = RERUN) -> Any:
    """Return a value read from JSON if it has the expected type.

    Args:
        value: as read.
        form: a type that pydantic checks strictly.
        where: start of the message: the file, and the key in it.
        remedy: end of the message.

    Raises:
        ArtifactError: it has another type; the message reports the first difference.
    """
    from pydantic import TypeAdapter, ValidationError

    if form is Any:
        return value
    try:
        return TypeAdapter(form).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        location = "".join(f"{shorten(part)}: " for part in first["loc"])
        reason = "missing" if first["type"] == "missing" else first["msg"][:1].lower() + first["msg"][1:]
        raise ArtifactError(f"{where}: {location}{reason}; {remedy}") from None


def shorten(value: object) -> str:
    """Return a value from a foreign file as short printable text on one line, at most 120 characters."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value)[:200])
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- arrays, sparse matrices, text tables -----------------------------------------------------------------------


def read_arrays(file: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the arrays of an uncompressed .npz file.

    Args:
        file: the archive.
        names: required arrays; None = any.

    Returns:
        Array name -> numpy array.

    Raises:
        ArtifactError: missing, damaged, compressed (it could unpack to any size), or without one of `names`.
    """
    import zipfile

    import numpy as np

    with wrap_read_errors(file):
        with zipfile.ZipFile(file) as archive:
            if packed := [each.filename for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]:
                raise ArtifactError(f"{file}: {shorten(packed[0])} is compressed, expected stored arrays; {RERUN}")
        with np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    for name in names or ():
        if name not in arrays:
            raise ArtifactError(f"{file}: has no array {name!r}; {RERUN}")
    return arrays


def read_array(file: Path, kinds: str, shape: tuple[int | None, ...], *, mapped: bool = False) -> Any:
    """Read an .npy file.

    Args:
        file: the file.
        kinds: allowed `dtype.kind` letters, such as "iu".
        shape: expected shape; None = any size.
        mapped: map the file into memory instead of loading it.

    Raises:
        ArtifactError: missing, damaged, or of another kind or shape.
    """
    import numpy as np

    with wrap_read_errors(file):
        array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
        shape_fits = len(shape) == array.ndim and all(
            expected in (None, size) for expected, size in zip(shape, array.shape, strict=True)
        )
        if array.dtype.kind not in kinds or not shape_fits:
            expected_shape = " x ".join("any" if size is None else str(size) for size in shape)
            raise ArtifactError(
                f"{file}: holds {array.dtype} of shape {array.shape}, expected {expected_shape} values of kind "
                f"{kinds!r}; {RERUN}"
            )
        return array


def read_tensors(file: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Read the tensors of a safetensors file as numpy arrays.

    Raises:
        ArtifactError: missing, damaged, or without one of `names`.
    """
    from safetensors.numpy import load_file

    with wrap_read_errors(file):
        tensors: dict[str, Any] = load_file(file)
    for name in names:
        if name not in tensors:
            raise ArtifactError(f"{file}: has no tensor {name!r}; {RERUN}")
    return tensors


def write_texts(path: Path, uids: Sequence[str], texts: Sequence[str], titles: Sequence[str] | None = None) -> None:
    """Write string columns `uid`, `text` and, if given, `title` as Parquet; row i is item i."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"uid": uids, "text": texts} | ({} if titles is None else {"title": titles})
    schema = pa.schema([(name, pa.string()) for name in columns])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        # in parts: a second copy of all full texts would take tens of gigabytes
        for start in range(0, max(len(uids), 1), ROWS_PER_WRITE):
            part = [pa.array(values[start : start + ROWS_PER_WRITE], pa.string()) for values in columns.values()]
            writer.write_table(pa.Table.from_arrays(part, schema=schema))


def read_texts(path: Path) -> tuple[list[str], list[str]]:
    """Read (uids, texts) written by `write_texts`."""
    uids, texts = _read_strings(path, ("uid", "text"))
    return uids, texts


def read_titles(path: Path) -> list[str] | None:
    """Read the titles written by `write_texts`, None if there are none."""
    import pyarrow.parquet as pq

    with wrap_read_errors(path):
        if "title" not in pq.read_schema(path).names:
            return None
    return _read_strings(path, ("title",))[0]


def _read_strings(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Read string columns of a Parquet file. Raises ArtifactError for another type or missing values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with wrap_read_errors(path):
        table = pq.ParquetFile(path).read(columns=list(columns))
        for name in columns:
            if name not in table.column_names:
                raise ArtifactError(f"{path}: has no column {name!r}; {RERUN}")
            if not pa.types.is_string(table[name].type) or table[name].null_count:
                raise ArtifactError(f"{path}: column {name!r} does not hold a string in every row; {RERUN}")
        return [table[name].to_pylist() for name in columns]


def write_csr(path: Path, matrix: Any) -> None:
    """Write a scipy sparse matrix as CSR .npz: sorted int32 indices, no duplicates, no explicit zeros."""
    import numpy as np
    import scipy.sparse as sp

    path.parent.mkdir(parents=True, exist_ok=True)
    matrix = sp.csr_matrix(matrix, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.indices = matrix.indices.astype(np.int32)
    sp.save_npz(path, matrix, compressed=False)


def read_csr(path: Path, shape: tuple[int | None, int | None] = (None, None)) -> Any:
    """Read a `scipy.sparse.csr_matrix` written by `write_csr`.

    Args:
        path: the .npz file.
        shape: expected rows and columns; None = any.

    Raises:
        ArtifactError: missing, damaged, of another shape, or with indices out of range.
    """
    import scipy.sparse as sp

    arrays = read_arrays(path, ("data", "indices", "indptr", "shape"))
    size = check_csr_arrays(path, arrays, "data", shape)
    with wrap_read_errors(path):
        return sp.csr_matrix((arrays["data"], arrays["indices"], arrays["indptr"]), shape=size)


def check_csr_arrays(
    path: Path, arrays: Mapping[str, Any], values: str, shape: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Check the arrays of a CSR matrix and return its shape.

    Args:
        path: the file they were read from.
        arrays: `indptr`, `indices`, `shape`, and the values.
        values: name of the values.
        shape: expected rows and columns; None = any.

    Raises:
        ArtifactError: wrong shape, `indptr` not ascending, an index out of range, or a value not finite.
    """
    import numpy as np

    def refuse(problem: str) -> ArtifactError:
        return ArtifactError(f"{path}: {problem}; {RERUN}")

    indptr, indices, numbers, size = (arrays[name] for name in ("indptr", "indices", values, "shape"))
    if size.dtype.kind not in "iu" or size.shape != (2,) or (size < 0).any():
        raise refuse("its shape is not two non-negative integers")
    rows, columns = (int(each) for each in size)
    for count, expected, unit in ((rows, shape[0], "rows"), (columns, shape[1], "columns")):
        if expected is not None and count != expected:
            raise refuse(f"has {count:,} {unit}, expected {expected:,}")
    if indptr.dtype.kind not in "iu" or indptr.shape != (rows + 1,) or indices.dtype.kind not in "iu":
        raise refuse(f"indptr and indices do not fit {rows:,} rows")
    if indices.ndim != 1 or numbers.shape != indices.shape or numbers.dtype.kind not in "fiub":
        raise refuse("indices and values do not have the same length")
    if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise refuse("indptr does not ascend from 0 to the number of entries")
    if len(indices) and (indices.min() < 0 or indices.max() >= columns):
        raise refuse(f"an index is outside of {columns:,} columns")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise refuse("a value is not finite")
    return rows, columns
