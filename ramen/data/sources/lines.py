"""Reading the lines of raw files, with every defect reported by file and line."""

from __future__ import annotations

import codecs
import gzip
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ramen.errors import DataError, Defect, describe_non_file, os_error_text

MAGIC = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00"}
"""Suffix of a compressed file -> its first bytes."""
MAX_DEFECTS = 20
"""Reading stops after this many defects."""
MAX_LINE = 1 << 25
"""Longest line in bytes: a compressed file of a megabyte may expand to one line of a gigabyte."""
MAX_RATIO, LINE_COST = 100, 64
"""Content, counting `LINE_COST` bytes of overhead per line, may be `MAX_RATIO` times the file's size.

Plain files always stay below, and text compresses by a factor of 3 to 10. Content below 4 `MAX_LINE` is exempt.
"""


@dataclass(frozen=True)
class LineLimit:
    """Largest number of lines of a file.

    Attributes:
        count: of lines.
        expected: the expectation and its origin, for messages.
        fix: what the user can do, for messages.
    """

    count: int
    expected: str
    fix: str = "row i of every file must be the same item"


class Defects:
    """Collects the defects of the input, up to `MAX_DEFECTS`."""

    def __init__(self) -> None:
        self.found: list[Defect] = []
        self._unreadable: set[str] = set()

    def add(
        self, file: Path, expected: str, fix: str = "", *, line: int | None = None, field: str | None = None
    ) -> None:
        """Record a defect, unless its file is unreadable. Raises DataError when there are `MAX_DEFECTS`."""
        if str(file) in self._unreadable:
            return
        self.found.append(Defect(str(file), expected, fix, line, field))
        if len(self.found) >= MAX_DEFECTS:
            self.raise_if_any()

    def add_unreadable(self, file: Path, expected: str, fix: str = "", *, line: int | None = None) -> None:
        """Record a defect that makes the rest of a file unreadable; further defects of the file are ignored."""
        self.add(file, expected, fix, line=line)
        self._unreadable.add(str(file))

    def check_file(self, path: Path) -> bool:
        """Return whether a path is a regular file or a link to one; record a defect if it is not."""
        if kind := describe_non_file(path):
            self.add_unreadable(path, f"expected a file, found {kind}", "replace it by the file, or remove it")
        return not kind

    def raise_if_any(self) -> None:
        """Raise DataError if a defect was recorded."""
        if self.found:
            raise DataError(*self.found)


def open_binary(path: Path) -> IO[bytes]:
    """Open a plain, gzip or xz file for reading bytes; its first bytes decide the format, else its suffix."""
    with path.open("rb") as stream:
        first_bytes = stream.read(max(map(len, MAGIC.values())))
    compression = next((suffix for suffix, magic in MAGIC.items() if first_bytes.startswith(magic)), path.suffix)
    if compression == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    return path.open("rb")


def numbered_lines(path: Path, defects: Defects, limit: LineLimit | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (one-based number, line without line ending); only line feeds end a line, a byte-order mark is skipped.

    A file that cannot be opened, is truncated or damaged, has more lines than `limit`, a line beyond `MAX_LINE`, or
    more content than `MAX_RATIO` allows is a defect, and the iteration ends there.
    """
    number = content_size = 0
    if not defects.check_file(path):
        return
    try:
        file_size = path.stat().st_size
        max_content = max(4 * MAX_LINE, MAX_RATIO * file_size)
        with open_binary(path) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    message = f"expected lines of at most {MAX_LINE:,} bytes, found a longer one"
                    defects.add_unreadable(path, message, "check that it is a text file", line=number)
                    return
                if limit is not None and number > limit.count:
                    defects.add_unreadable(path, f"{limit.expected}, found more", limit.fix)
                    return
                if (content_size := content_size + len(line) + LINE_COST) > max_content:
                    message = f"expands to at least {number:,} lines, too many for a file of {file_size:,} bytes"
                    defects.add_unreadable(path, message, "if the file is right, decompress it first")
                    return
                if number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip(b"\r"):
                    message = "expected lines that end with a line feed, found only carriage returns"
                    defects.add_unreadable(path, message, "convert the line endings")
                    return
                yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        message = "cannot be decompressed after this line" if number else "cannot be decompressed"
        defects.add_unreadable(path, f"{message} ({error})", "copy or download it again", line=number or None)
    except OSError as error:
        defects.add_unreadable(path, f"cannot be read ({os_error_text(error)})", line=number or None)


def decoded_lines(
    path: Path, encoding: str, defects: Defects, limit: LineLimit | None = None
) -> Iterator[tuple[int, str]]:
    """Yield (one-based number, text); bytes that are not valid in `encoding` are replaced.

    Only the first line that cannot be decoded is recorded as a defect of the file.
    """
    for number, line in numbered_lines(path, defects, limit):
        try:
            text = line.decode(encoding)
            if "\0" in text:  # UTF-16 of ASCII text is valid UTF-8
                message = f"expected {encoding} text, found a NUL character at column {text.index(chr(0)) + 1}"
                defects.add_unreadable(path, message, "save it as UTF-8", line=number)
            yield number, text
        except UnicodeError as error:
            start = error.start if isinstance(error, UnicodeDecodeError) else 0
            fix = "set data.encoding=latin-1" if encoding.lower().replace("-", "") == "utf8" else "set data.encoding"
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                fix = "save it as UTF-8"
            message = f"expected {encoding}, found byte 0x{line[start]:02x} at column {start + 1}"
            defects.add_unreadable(path, message, fix, line=number)
            yield number, line.decode(encoding, "replace")
