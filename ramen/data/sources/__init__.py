"""Sources of raw data: the table of source modules, and their common interface.

A source module has the functions of `Source` and, optionally, `fetch_if_missing(settings) -> bool`. It is imported when
it is first used.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ramen import config, errors
from ramen.files import sha256

if TYPE_CHECKING:
    from ramen.data.dataset import Dataset

SOURCES = {"debian": "ramen.data.sources.debian", "xc": "ramen.data.sources.xc"}
"""Value of `data.source` -> module."""


class Source(Protocol):
    """Interface of a source module."""

    def read(self, settings: config.DataConfig) -> Dataset:
        """Read the raw data. Raises DataError with one `Defect` per defect."""

    def anchor_set_names(self, path: Path) -> Sequence[str]:
        """Return the names of the anchor sets that the raw data can have. Raises OSError."""


def _source(settings: config.DataConfig) -> Source:
    return cast(Source, importlib.import_module(SOURCES[settings.source]))


def read(settings: config.DataConfig) -> Dataset:
    """Read the raw data of `data.source`. Raises DataError."""
    return _source(settings).read(settings)


def fetch_if_missing(settings: config.DataConfig) -> bool:
    """Fetch the raw data if it is missing and the source can fetch it; return whether it was fetched.

    Raises:
        DataError: the machine cannot provide the data.
    """
    fetch = getattr(_source(settings), "fetch_if_missing", None)
    return bool(fetch(settings)) if fetch else False


def anchor_set_names(settings: config.DataConfig) -> Sequence[str] | None:
    """Return the names of the anchor sets that the raw data can have, sorted; None if the data cannot be read."""
    with suppress(OSError):  # `read` reports the error
        return _source(settings).anchor_set_names(Path(settings.path))
    return None


def fingerprint(settings: config.DataConfig) -> str:
    """Return a hex sha256 that changes when the raw data changes, for cache keys.

    Of a file, the digest covers the content; of a folder, the path, size and modification time of each file.

    Raises:
        DataError: `settings.path` does not exist.
    """
    path = Path(settings.path)
    if path.is_file():
        return sha256(path)
    if not path.is_dir():
        raise errors.DataError(path_defect(settings))
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            status = file.stat()
            name = os.fsencode(file.relative_to(path).as_posix())  # names need not be valid UTF-8
            digest.update(name + f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def path_defect(settings: config.DataConfig) -> errors.Defect:
    """Return the defect of a `data.path` that does not exist or has the wrong type (file or folder)."""
    path, is_debian = Path(settings.path), settings.source == "debian"
    expected = f"data.source = {settings.source} reads a {'file' if is_debian else 'folder'}"
    fix = "set data.path to a snapshot" if is_debian else "set data.path to the folder of the data set"
    if path.is_dir():
        fix = "for a folder in the layout of the XC repository set data.source=xc"
        return errors.Defect(settings.path, f"{expected}, found a folder", fix)
    if os.path.lexists(path):
        return errors.Defect(settings.path, f"{expected}, found {errors.describe_non_file(path) or 'a file'}", fix)
    return errors.Defect(settings.path, "no such file or folder", "run `ramen fetch`" if is_debian else fix)
