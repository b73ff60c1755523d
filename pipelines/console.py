"""Terminal output of the local runner: one line per stage, and the lines that the stages print."""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from components.step import EXIT_LINE
from ramen.errors import ERROR_PREFIX, RamenError
from ramen.stages import STAGES

_LOG = re.compile(r"^\s*\d\d:\d\d:\d\d\.\d{3} - (?:INFO|WARNING|ERROR) - (.*)$")
_EXIT = re.compile(EXIT_LINE.format(r"(\d+)"))
_EXECUTOR = re.compile(r"^\s*(\[KFP Executor |[\"\[\]{}]|Could not load|ModuleNotFoundError)")
"""Lines of the runner's wrapper: its log records, and the JSON that they spread over many lines."""

_COLOUR = re.compile(r"\x1b\[\d+m")
_TASK = re.compile(r"[Tt]ask '?([\w-]+)'?")


class Console(io.TextIOBase):
    """Replaces the runner's output by one line per stage, and passes on the lines of the stages.

    The runner prints log records and the output of the stages to stdout; it reports cache hits to the root logger only.

    Attributes:
        cached: stages whose result came from the cache.
        stopped: whether `stop` was called.
        exit_code: of the failed stage.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.order = list(STAGES)
        self.stage: str | None = None
        self.started = 0.0
        self.stage_errors: list[str] = []
        self.last_lines: list[str] = []
        self.cached: list[str] = []
        self.stopped = False
        self.exit_code = RamenError.exit_code
        self._partial = ""
        self._streaming = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Capture stdout and the root logger within the context."""
        root, handler = logging.getLogger(), _ForwardRecords(self)
        level, handlers = root.level, root.handlers[:]
        root.handlers, root.level = [handler], logging.INFO
        try:
            with redirect_stdout(self):
                yield
        finally:
            root.handlers, root.level = handlers, level

    def write(self, text: str) -> int:
        self._partial += text
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            self._handle_line(line)
        return len(text)

    def _handle_line(self, line: str) -> None:
        if found := _LOG.match(line):
            self.record(found.group(1))
        elif self._streaming and (ended := _EXIT.fullmatch(line.strip())):
            self.exit_code = int(ended.group(1))
        elif self._streaming and line.strip().startswith(ERROR_PREFIX):  # not printed here: `failure` returns it
            self.stage_errors.append(line.strip().removeprefix(ERROR_PREFIX))
        elif self._streaming and line.strip() and not _EXECUTOR.match(line):
            self.last_lines = [*self.last_lines[-2:], line.strip()]
            if not self.stopped:
                self._print(f"  {line.strip()}")

    def record(self, message: str) -> None:
        """Handle one log record of the runner.

        Raises:
            KeyboardInterrupt: a stage would start after `stop`.
        """
        message = _COLOUR.sub("", message)
        task = _TASK.search(message)
        stage = task.group(1) if task else ""
        self._streaming = message.startswith("Streamed logs")
        if "cache hit" in message:
            self.cached.append(stage)
            self._print(f"{self._number(stage)} {stage}: from the cache")
        elif message.startswith("Executing task"):
            if self.stopped:  # requested between two stages
                raise KeyboardInterrupt
            self.stage, self.started, self.stage_errors, self.last_lines = stage, self.clock(), [], []
            self._print(f"{self._number(stage)} {stage}")
        elif "finished with status SUCCESS" in message and stage == self.stage:
            self._print(f"{self._number(stage)} {stage}: done in {self.clock() - self.started:.1f} s")

    def stop(self) -> None:
        """Print that the run is stopping; lines of the stage after this appear in `failure` only."""
        self.stopped, self.stage_errors, self.last_lines = True, [], []
        self._print("stopping")

    def failure(self) -> str:
        """Return the failed stage's error lines, or else its last lines; without error lines, "" after a stop."""
        lines = self.stage_errors or ([] if self.stopped else self.last_lines)
        return "\n".join(f"{self.stage}: {line}" for line in lines)

    def _number(self, stage: str) -> str:
        return f"[{self.order.index(stage) + 1}/{len(self.order)}]" if stage in self.order else "[?]"

    def _print(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class _ForwardRecords(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.record(record.getMessage())
