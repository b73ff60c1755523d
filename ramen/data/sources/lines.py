"""Reading lines of raw files so that every defect is reported with file and line."""

from __future__ import annotations

import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from ramen.errors import DataError
from ramen.errors import Problem as Defect

MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}
"""Suffix of a packed file -> its first bytes."""
MAX_DEFECTS = 20
"""Reading stops when this many defects were found."""


class Defects:
    """Collects defects, and stops the reading when there are many."""

    def __init__(self) -> None:
        self.found: list[Defect] = []

    def add(
        self, file: Path, expected: str, mend: str = "", *, line: int | None = None, field: str | None = None
    ) -> None:
        """Record one defect. Raises DataError when `MAX_DEFECTS` are together."""
        self.found.append(Defect(str(file), expected, mend, line, field))
        if len(self.found) >= MAX_DEFECTS:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise DataError if a defect was recorded."""
        if self.found:
            raise DataError(*self.found)


def open_binary(path: Path) -> IO[bytes]:
    """Open a plain, gzipped or xz-packed file for reading bytes; what it begins with says it, else its name."""
    with path.open("rb") as stream:
        begins = stream.read(max(map(len, MAGIC.values())))
    packed = next((end for end, magic in MAGIC.items() if begins.startswith(magic)), path.suffix)
    if packed == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if packed == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    return path.open("rb")


def numbered_lines(path: Path, defects: Defects) -> Iterator[tuple[int, bytes]]:
    """Yield (one-based number, line without its end); only a line feed ends a line, and a byte-order mark is no text.

    A compressed file that is cut short or damaged becomes a defect, and the iteration ends there.
    """
    number = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(stream, 1):
                yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        defects.add(path, f"cannot be unpacked after this line ({error})", "copy or download it again", line=number)


def decoded_lines(path: Path, encoding: str, defects: Defects) -> Iterator[tuple[int, str]]:
    """Yield (one-based number, text); of a line that is not in `encoding`, a defect, what can be read."""
    for number, line in numbered_lines(path, defects):
        try:
            yield number, line.decode(encoding)
        except UnicodeDecodeError as error:
            mend = "set data.encoding=latin-1" if encoding.lower().replace("-", "") == "utf8" else "set data.encoding"
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                mend = "save it as UTF-8"
            expected = f"expected {encoding}, found byte 0x{line[error.start]:02x} at column {error.start + 1}"
            defects.add(path, expected, mend, line=number)
            yield number, line.decode(encoding, "replace")  # so that what follows does not add defects of its own
