"""Printing to people: every line goes to stderr, on one line and without credentials."""

from __future__ import annotations

import sys

from ramen.errors import printable
from ramen.redaction import redact


def report(text: object) -> None:
    """Print a line of progress."""
    print(printable(redact(str(text))), file=sys.stderr, flush=True)


def warn(text: object) -> None:
    """Print a warning: something the user should know, although the command continues."""
    report(f"warning: {text}")
