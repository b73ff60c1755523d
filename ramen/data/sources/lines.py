"""Reading lines of raw files so that every defect is reported with file and line."""

from __future__ import annotations

import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ramen.errors import DataError, Defect, not_a_file, os_error_text

MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}
"""Suffix of a packed file -> its first bytes."""
MAX_DEFECTS = 20
"""Reading stops when this many defects were found."""
MAX_LINE = 1 << 25
"""Bytes of a line: a packed file of a megabyte may unpack to one line of a gigabyte."""
MAX_RATIO, LINE_COST = 100, 64
"""A file may hold `MAX_RATIO` times its size, where a line counts for its bytes and `LINE_COST` more. No plain file
holds as much, text packs by a factor of 3 to 10, and what holds less than 4 `MAX_LINE` is exempt."""


@dataclass(frozen=True)
class LineLimit:
    """Lines that a file may have.

    Attributes:
        count: of lines.
        expected: for messages, what was expected and where the limit comes from.
        mend: for messages, what the user can do.
    """

    count: int
    expected: str
    mend: str = "row i of every file must be the same item"


class Defects:
    """Collects defects, and stops the reading when there are many."""

    def __init__(self) -> None:
        self.found: list[Defect] = []
        self._unreadable: set[str] = set()

    def add(
        self, file: Path, expected: str, mend: str = "", *, line: int | None = None, field: str | None = None
    ) -> None:
        """Record one defect, unless its file is unreadable. Raises DataError when `MAX_DEFECTS` are together."""
        if str(file) in self._unreadable:
            return
        self.found.append(Defect(str(file), expected, mend, line, field))
        if len(self.found) >= MAX_DEFECTS:
            self.raise_if_any()

    def add_unreadable(self, file: Path, expected: str, mend: str = "", *, line: int | None = None) -> None:
        """Record a defect that makes the rest of a file unreadable: further ones of the file have the same cause."""
        self.add(file, expected, mend, line=line)
        self._unreadable.add(str(file))

    def check_file(self, path: Path) -> bool:
        """Return whether a path is a regular file or a link to one; record a defect if not."""
        if found := not_a_file(path):
            self.add_unreadable(path, f"expected a file, found {found}", "put the file there, or remove it")
        return not found

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


def numbered_lines(path: Path, defects: Defects, limit: LineLimit | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (one-based number, line without its end); only a line feed ends a line, and a byte-order mark is no text.

    A file that cannot be opened, is cut short or damaged, has more lines than `limit`, a line beyond `MAX_LINE`, or
    unpacks to more than `MAX_RATIO` allows becomes a defect, and the iteration ends there.
    """
    number = held = 0
    if not defects.check_file(path):
        return
    try:
        most = max(4 * MAX_LINE, MAX_RATIO * path.stat().st_size)
        with open_binary(path) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    found = f"expected lines of at most {MAX_LINE:,} bytes, found a longer one"
                    defects.add_unreadable(path, found, "is it a text file?", line=number)
                    return
                if limit is not None and number > limit.count:
                    defects.add_unreadable(path, f"{limit.expected}, found more", limit.mend)
                    return
                if (held := held + len(line) + LINE_COST) > most:
                    found = f"expected less in a file of {path.stat().st_size:,} bytes, found at least {number:,} lines"
                    defects.add_unreadable(path, found, "if the file is right, unpack it first")
                    return
                if number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip(b"\r"):
                    found = "expected lines that end with a line feed, found only carriage returns"
                    defects.add_unreadable(path, found, "convert the line ends")
                    return
                yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        what = "cannot be unpacked after this line" if number else "cannot be unpacked"
        defects.add_unreadable(path, f"{what} ({error})", "copy or download it again", line=number or None)
    except OSError as error:
        defects.add_unreadable(path, f"cannot be read ({os_error_text(error)})", line=number or None)


def decoded_lines(
    path: Path, encoding: str, defects: Defects, limit: LineLimit | None = None
) -> Iterator[tuple[int, str]]:
    """Yield (one-based number, text); of lines that are not in `encoding`, what can be read.

    The first one is a defect that stands for all of the file.
    """
    for number, line in numbered_lines(path, defects, limit):
        try:
            text = line.decode(encoding)
            if "\0" in text:  # UTF-16 of ASCII text is valid UTF-8
                found = f"expected {encoding} text, found a NUL character at column {text.index(chr(0)) + 1}"
                defects.add_unreadable(path, found, "save it as UTF-8", line=number)
            yield number, text
        except UnicodeError as error:
            at = error.start if isinstance(error, UnicodeDecodeError) else 0
            mend = "set data.encoding=latin-1" if encoding.lower().replace("-", "") == "utf8" else "set data.encoding"
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                mend = "save it as UTF-8"
            expected = f"expected {encoding}, found byte 0x{line[at]:02x} at column {at + 1}"
            defects.add_unreadable(path, expected, mend, line=number)
            yield number, line.decode(encoding, "replace")
