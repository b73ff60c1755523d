"""Every error a user can cause, and the exit code it ends with.

RamenError (1)
├── ConfigError (2)      a knob is unknown, out of range, or contradicts another
├── DataError (3)        input data is broken: one `Problem` per defect
├── ArtifactError (4)    an artifact is missing, foreign, damaged or of another format
├── GateRefused (5)      a candidate did not pass the gate
└── MissingExtra (6)     an optional dependency is not installed
Interrupted (130)        stopped on purpose (SIGTERM, SIGINT); no Exception, so that nobody takes it for a failure

The CLI prints the message of either and exits with its code; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ramen.redaction import redact

ERROR = "error: "
"""What a line begins with that says an error."""


class RamenError(Exception):
    """A mistake the user can mend. The message is what the user reads."""

    exit_code = 1

    def __init__(self, *details: object) -> None:
        """Keep the message without the credentials of URLs: messages are printed, logged and tracked."""
        super().__init__(*(redact(detail) if isinstance(detail, str) else detail for detail in details))


class ConfigError(RamenError):
    """A configuration value is unknown, out of range, or contradicts another."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
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

    def __init__(self, *problems: Problem) -> None:
        assert problems, "a DataError without a problem says nothing"
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


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
    print(redact(f"warning: {text}"), file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """First line of an error; of a failed request only what the network said, at the end of a long nested text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = re.search(r"Caused by \w+\([\"'].*?\): (.*)[\"']\)\)$", lines[0])
    return redact(cause.group(1) if cause else lines[0])


def undecoded(error: UnicodeDecodeError) -> tuple[int, str]:
    """Line, from 1, and byte, as 0xe9, at which a file that was read whole is not in its encoding."""
    return error.object[: error.start].count(b"\n") + 1, f"0x{error.object[error.start]:02x}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """What to say of a name that is not among the valid ones."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid names: {', '.join(names)}"
