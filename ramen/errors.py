"""Every error a user can cause, and the exit code it ends with.

RamenError (1)
├── ConfigError (2)      a knob is unknown, out of range, or contradicts another
├── DataError (3)        input data is broken: one `Problem` per defect
├── ArtifactError (4)    an artifact is missing, foreign, damaged or of another format
├── GateRefused (5)      a candidate did not pass the gate
└── MissingExtra (6)     an optional dependency is not installed
Interrupted (130)        stopped on purpose (SIGTERM, SIGINT); no Exception, so that nobody takes it for a failure

The CLI prints the message of either and exits with its code; anything else is a bug and keeps its traceback.

Every message goes through `printable`: values and file names come from files that anyone may have written, and must
neither control the terminal nor break a line in two.
"""

from __future__ import annotations

import difflib
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ramen.redaction import redact

ERROR = "error: "
"""What a line begins with that says an error."""


LONGEST = 1000
"""Characters of a line that are shown; a file may hold a value of megabytes."""
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that no path or name may hold."""
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_ERRNO = re.compile(r"\[Errno -?\d+\] (?P<what>[^:'\[]+)(?:: '(?P<path>[^']+)')?(?: -> '[^']+')?")
"""How Python writes an error of the operating system."""


def printable(text: str) -> str:
    r"""One line that any terminal or log can show.

    Control characters, line ends of every kind, marks that change the direction of the text and lone surrogates are
    escaped as in a Python literal; a byte of a file name that is not UTF-8 is shown as `\xff`. A line of more than
    `LONGEST` characters loses its middle.
    """
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
    return _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return match[0].encode("unicode_escape").decode("ascii")


def _path_first(match: re.Match[str]) -> str:
    """`path: what is wrong with it`, without the number of the error."""
    return f"{match['path']}: {match['what']}" if match["path"] else match["what"]


def shown(value: object, longest: int = 80) -> str:
    """A value as a Python literal for a message, cut after `longest` characters."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more than 4,300 digits has no text
        return "a number of thousands of digits"
    return text if len(text) <= longest else f"{text[:longest]}..."


def lone_surrogate(text: str) -> str:
    """What a text holds that is no character, as an escape: a lone surrogate; "" = nothing."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return printable(text[error.start])
    return ""


class RamenError(Exception):
    """An error caused by the user's input or configuration.

    The arguments are the causes; the message has one line for each, without the credentials of URLs: messages are
    printed, logged and tracked.
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
        file: the offending file, as the user named it.
        expected: what should have been there, and what was.
        mend: what the user can do about it.
        line: one-based line (or row) number, where there is one.
        field: column, key or matrix name, where there is one.
    """

    file: str
    expected: str
    mend: str = ""
    line: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = self.file + (f":{self.line}" if self.line is not None else "")
        where += f" [{self.field}]" if self.field else ""
        return f"{where}: {self.expected}" + (f"; {self.mend}" if self.mend else "")


class DataError(RamenError):
    """The input data is broken; the message holds one line per problem."""

    exit_code = 3

    def __init__(self, *problems: Defect) -> None:
        assert problems, "a DataError without a problem says nothing"
        self.problems = problems
        super().__init__(*problems)


class ArtifactError(RamenError):
    """An artifact on disk is missing, of another kind or format, or does not match its manifest."""

    exit_code = 4


class StateRemoved(ArtifactError):
    """A warm model lacks the training state that `ramen gc` removed."""


class GateRefused(RamenError):
    """A candidate did not pass a gate that it had to pass."""

    exit_code = 5


class MissingExtra(RamenError):
    """An optional dependency is needed; the message names the command that installs it."""

    exit_code = 6


class Interrupted(BaseException):
    """Stopped on purpose; what was done so far is safe on disk."""

    exit_code = 130


def error_lines(message: str) -> list[str]:
    """The lines that are shown of an error's message."""
    return [ERROR + line for line in redact(message).splitlines()]


def warn(text: object) -> None:
    """Say on stderr what the user should know though the work goes on."""
    print(f"warning: {printable(redact(str(text)))}", file=sys.stderr, flush=True)


def os_error_text(error: OSError) -> str:
    """What the operating system says of a failed read or write, without the number of the error."""
    return error.strerror or str(error) or type(error).__name__


def not_a_file(path: Path) -> str:
    """Return what a path is if it is neither a regular file nor a link to one, else "".

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


def reason(error: BaseException) -> str:
    """First line of an error; of a failed request only what the network said, at the end of a long nested text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = re.search(r"Caused by \w+\([\"'].*?\): (.*)[\"']\)\)$", lines[0])
    return redact(cause.group(1) if cause else lines[0])


def decoding_error(error: UnicodeDecodeError) -> tuple[int, str]:
    """Line, from 1, and byte, as 0xe9, at which a file that was read whole is not in its encoding."""
    return error.object[: error.start].count(b"\n") + 1, f"0x{error.object[error.start]:02x}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """What to say of a name that is not among the valid ones."""
    names = list(valid)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid names: {', '.join(names)}"
