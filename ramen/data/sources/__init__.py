"""Sources of data: a table of names, and what every source module offers.

A source module has the functions of `Source`, and may have `fetch_if_missing(settings) -> bool`. Modules are imported
only when they are used.
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
    """What a source module offers."""

    def read(self, settings: config.DataConfig) -> Dataset:
        """Read the raw data. Raises DataError with one problem per defect."""

    def anchor_set_names(self, path: Path) -> Sequence[str]:
        """Names that anchor sets of the raw data can have. Raises OSError."""


def _source(settings: config.DataConfig) -> Source:
    return cast(Source, importlib.import_module(SOURCES[settings.source]))


def read(settings: config.DataConfig) -> Dataset:
    """Read the problem from the source that `settings` names. Raises DataError."""
    return _source(settings).read(settings)


def fetch_if_missing(settings: config.DataConfig) -> bool:
    """Get the raw data of a source that can do so, if they are not there; true if something was fetched.

    Raises:
        DataError: the machine cannot provide them.
    """
    fetch = getattr(_source(settings), "fetch_if_missing", None)
    return bool(fetch(settings)) if fetch else False


def anchor_set_names(settings: config.DataConfig) -> Sequence[str] | None:
    """Names that anchor sets of the raw data can have, in alphabetical order; None if the data cannot be read."""
    with suppress(OSError):  # `read` reports it
        return _source(settings).anchor_set_names(Path(settings.path))
    return None


def fingerprint(settings: config.DataConfig) -> str:
    """Hex sha256 that changes when the raw data change, for cache keys.

    A file is hashed whole; of a folder, the sorted (path, size, modification time) of its files.

    Raises:
        DataError: `settings.path` does not exist.
    """
    path = Path(settings.path)
    if path.is_file():
        return sha256(path)
    if not path.is_dir():
        raise errors.DataError(missing(settings))
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            facts = file.stat()
            name = os.fsencode(file.relative_to(path).as_posix())  # of any bytes: the folder may hold anything
            digest.update(name + f"\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def missing(settings: config.DataConfig) -> errors.Defect:
    """The problem of a `data.path` that does not exist, or is a folder for a file, or a file for a folder."""
    path = Path(settings.path)
    if path.is_dir():
        found = f"a folder, where data.source = {settings.source} reads a file"
        return errors.Defect(settings.path, found, "for one in the layout of the XC repository set data.source=xc")
    debian = settings.source == "debian"
    mend = "set data.path to a snapshot" if debian else "set data.path to the folder of the data set"
    if os.path.lexists(path):
        kind = errors.not_a_file(path) or "a file"
        found = f"{kind}, where data.source = {settings.source} reads {'a file' if debian else 'a folder'}"
        return errors.Defect(settings.path, found, mend)
    return errors.Defect(settings.path, "no such file or folder", "run `ramen fetch`" if debian else mend)
