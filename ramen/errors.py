"""Errors that a user can cause, with their exit codes.

RamenError (1)
├── ConfigError (2)      a knob is unknown, out of range, or contradicts another
├── DataError (3)        input data is broken: one `Defect` per line
├── ArtifactError (4)    an artifact is missing, foreign, damaged or of another format
├── GateRefused (5)      a candidate did not pass the gate
└── MissingExtra (6)     an optional dependency is not installed
Interrupted (130)        interrupted (SIGTERM, SIGINT); not an Exception, so that no handler takes it for a failure

The CLI prints the message and exits with the code. Any other exception is a bug and keeps its traceback.

Every message goes through `printable`: values and file names may come from foreign files, and must not control the
terminal or add lines.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ramen.redaction import redact

ERROR_PREFIX = "error: "
"""Prefix of a printed error."""
MAX_LINE = 1000
"""Characters of a line that are shown: a file may contain a value of megabytes."""
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that no path or name may contain."""
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_ERRNO = re.compile(r"\[Errno -?\d+\] (?P<what>[^:'\[]+)(?:: '(?P<path>[^']+)')?(?: -> '[^']+')?")
"""Text of an OSError."""


def printable(text: str) -> str:
    r"""Return one line that any terminal or log can show.

    Control characters, line ends, bidirectional marks and lone surrogates are escaped as in a Python literal; a byte of
    a file name that is not UTF-8 becomes `\xff`. A line of more than `MAX_LINE` characters loses its middle.
    """
    if len(text) > MAX_LINE:
        half = MAX_LINE // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return match[0].encode("unicode_escape").decode("ascii")


def _path_first(match: re.Match[str]) -> str:
    """Return `path: what is wrong`, without the error number."""
    return f"{match['path']}: {match['what']}" if match["path"] else match["what"]


def short_repr(value: object, longest: int = 80) -> str:
    """Return a value as a Python literal, cut after `longest` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= longest else f"{text[:longest]}..."


def find_lone_surrogate(text: str) -> str:
    """Return the first lone surrogate of a text as an escape, "" if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return printable(text[error.start])
    return ""


class RamenError(Exception):
    """An error caused by the user's input or configuration.

    The message has one line per argument, without credentials: messages are printed, logged and tracked.
    """

    exit_code = 1

    def __str__(self) -> str:
        return "\n".join(printable(redact(_ERRNO.sub(_path_first, str(cause)))) for cause in self.args)


class ConfigError(RamenError):
    """A configuration value is unknown, out of range, or contradicts another."""

    exit_code = 2


@dataclass(frozen=True)
class Defect:
    """One defect of the input data.

    Attributes:
        file: path as the user gave it.
        expected: what was expected, and what was found.
        fix: what the user can do to fix it.
        line: line or row number, from 1.
        field: column, key or matrix name.
    """

    file: str
    expected: str
    fix: str = ""
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = self.file + (f":{self.line}" if self.line is not None else "")
        where += f" [{self.field}]" if self.field else ""
        return f"{where}: {self.expected}" + (f"; {self.fix}" if self.fix else "")


class DataError(RamenError):
    """The input data is broken; the message has one line per defect."""

    exit_code = 3

    def __init__(self, *problems: Defect) -> None:
        assert problems, "a DataError needs at least one defect"
        self.defects = problems
        super().__init__(*problems)


class ArtifactError(RamenError):
    """An artifact on disk is missing, of another kind or format, or does not match its manifest."""

    exit_code = 4


class StateRemoved(ArtifactError):
    """A warm model lacks the training state that `ramen gc` removed."""


class GateRefused(RamenError):
    """A candidate did not pass a required gate."""

    exit_code = 5


class MissingExtra(RamenError):
    """An optional dependency is not installed; the message gives the command that installs it."""

    exit_code = 6


class Interrupted(BaseException):
    """Interrupted by a signal; work done so far is saved on disk."""

    exit_code = 130


def error_lines(message: str) -> list[str]:
    """Return the lines to print for an error's message."""
    return [ERROR_PREFIX + line for line in redact(message).splitlines()]


def os_error_text(error: OSError) -> str:
    """Return the operating system's message of a failed read or write, without path and error number."""
    return error.strerror or str(error) or type(error).__name__


def describe_non_file(path: Path) -> str:
    """Return what a path is instead of a regular file or a link to one; "" if it is a file.

    Check this before opening a file that a user names: opening a named pipe waits for its writer.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        if path.is_symlink():
            return f"a symbolic link to {path.readlink()} ({os_error_text(error)})"
        return "nothing" if isinstance(error, FileNotFoundError) else f"no access ({os_error_text(error)})"
    known = {stat.S_IFREG: "", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return known.get(kind, "a device")


def first_line(error: BaseException) -> str:
    """Return the first line of an error; of a failed request, only the network's message inside the nested text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = re.search(r"Caused by \w+\([\"'].*?\): (.*)[\"']\)\)$", lines[0])
    return redact(cause.group(1) if cause else lines[0])


def locate_decoding_error(error: UnicodeDecodeError) -> tuple[int, str]:
    """Return the line (from 1) and the byte (as "0xe9") at which a whole file cannot be decoded."""
    return error.object[: error.start].count(b"\n") + 1, f"0x{error.object[error.start]:02x}"


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest valid name, or all of them."""
    names = list(valid)
    matches = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else f"valid names: {', '.join(names)}"
