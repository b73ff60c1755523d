"""Progress reports: one rewritten line on a terminal, otherwise a parsable line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

INTERVAL = 10.0
"""Seconds between two plain lines."""


class Progress:
    """Reports steps of a long loop to stderr.

    Args:
        name: name of the task.
        total: total number of items; None = unknown. May be set later.
        unit: name of the items.
        done: items finished before this process started (in a resumed run).
        stream: where to print; None = stderr.
    """

    def __init__(self, name: str, total: int | None, unit: str, done: int = 0, stream: TextIO | None = None) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.started = self.shown = time.monotonic()
        self.first = self.done = done
        self._open = False  # a rewritten line has no line end yet

    def advance(self, items: int, facts: str) -> None:
        """Count `items` more as finished; `facts` follows the rate in the line."""
        self.done += items
        now = time.monotonic()
        finished = self.total is not None and self.done >= self.total
        if now - self.shown >= (0.2 if self.live else INTERVAL) or finished:
            self.shown = now
            self._show(facts, finished)

    def close(self) -> None:
        """End a rewritten line."""
        if self._open:
            self.stream.write("\n")
            self._open = False

    @property
    def rate(self) -> float:
        """Items per second since this process started."""
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    def _show(self, facts: str, finished: bool) -> None:
        rate = self.rate
        if self.total is None:
            count, eta = f"{self.done}", ""
        else:
            left = int(max(self.total - self.done, 0) / rate) if rate else 0
            count, eta = f"{self.done}/{self.total}", f" eta {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        line = f"{self.name} {count} {self.unit} {rate:.0f}/s{eta} {facts}"
        if self.live:
            self.stream.write(f"\r\x1b[K{line}" + ("\n" if finished else ""))
            self._open = not finished
        else:
            self.stream.write(line + "\n")
        self.stream.flush()
