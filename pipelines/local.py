"""Run the pipeline on Kubeflow's local subprocess runner: the same components as on a cluster, cached."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil

from components.step import EXIT_LINE
from pipelines.ramen import Outputs, build
from ramen.cleanup import drop_cached_result
from ramen.config import Config
from ramen.console import warn
from ramen.errors import ERROR_PREFIX, Interrupted, RamenError
from ramen.files import apply_umask, read_json
from ramen.processes import environment
from ramen.provenance import ARM_ENV
from ramen.signals import on_interrupt
from ramen.stages import STAGES, record_cached

STORE = ".kfp"
"""Folder under `--out` that holds the runner's outputs and its cache."""

_LOG = re.compile(r"^\s*\d\d:\d\d:\d\d\.\d{3} - (?:INFO|WARNING|ERROR) - (.*)$")
_EXIT = re.compile(EXIT_LINE.format(r"(\d+)"))
_EXECUTOR = re.compile(r"^\s*(\[KFP Executor |[\"\[\]{}]|Could not load|ModuleNotFoundError)")
"""Lines of the runner's wrapper: its log records and the JSON they spread over many lines."""

_COLOUR = re.compile(r"\x1b\[\d+m")
_TASK = re.compile(r"[Tt]ask '?([\w-]+)'?")


def run_local(settings: Config, out: Path, *, arm: str) -> dict[str, Path]:
    """Run all stages; finished ones come from the cache while code, sections, inputs and raw data are the same.

    Args:
        settings: the configuration.
        out: gets a link per artifact, `<out>/<arm>/<artifact>`; the files are in `<out>/.kfp`, shared by all arms.
        arm: name of the variant ("ramen", "base").

    Returns:
        Artifact name -> its link.

    Raises:
        RamenError: a stage failed; the message is the stage's own.
        Interrupted: SIGTERM or Ctrl-C; the running stage was asked to stop, and wrote its checkpoint if it trains.
    """
    from kfp import local

    check_links(out, arm)
    store = (out / STORE).absolute()
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=str(store), raise_on_error=True, enable_caching=True,
        cache_root=str(store / "cache"),
    )  # fmt: skip
    console = Console(sys.stderr)
    with environment({ARM_ENV: arm}), console.attached(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pipeline = build(settings, versions(settings), retry=False)
            try:
                finished = _run(pipeline, console)
            except RamenError as error:
                text, _, remedy = str(error).rpartition("; ")
                stage = drop_cached_result(store, str(error)) if remedy.startswith("run ") else ""
                if not stage:
                    raise
                if "removed by `ramen gc`" not in text:
                    damaged = RamenError(f"{text}; run the same command again, which computes {stage} again")
                    damaged.exit_code = error.exit_code
                    raise damaged from None
                warn("`ramen gc` removed the training state that prune-retrain needs: warmup runs again")
                console.cached.clear()
                finished = _run(pipeline, console)
        finally:
            if (store / "cache").is_dir():  # the runner writes its entries with mode 0600
                apply_umask(store / "cache")
        made = {name: Path(finished.outputs[name].path) for name in Outputs._fields}
        for stage in console.cached:
            outputs = {name: made[name] for name in STAGES[stage].writes}
            scalars = outputs[STAGES[stage].writes[0]].parent / "scalars"
            record_cached(stage, read_json(scalars, dict[str, float]), outputs)
    return {name: _link(out / arm / name, target) for name, target in made.items()}


def check_links(out: Path, arm: str) -> None:
    """Raise RamenError if something that is no link is where a run links its artifacts."""
    for place in (out / arm / name for name in Outputs._fields):
        if place.exists() and not place.is_symlink():
            raise RamenError(
                f"{place}: a link to the run's {place.name} belongs there; move it away, or give another --out"
            )


def _run(pipeline: Callable[[], Any], console: Console) -> Any:
    """Run the pipeline; a stop is passed on to the running stage, whose own end then ends the pipeline."""

    def stop() -> None:
        console.stop()
        _signal_step(signal.SIGTERM)

    with on_interrupt(stop):
        try:
            return pipeline()
        except RuntimeError as error:
            if console.stopped:
                raise Interrupted(console.failure() or "stopped on request") from None
            failed = RamenError(console.failure() or str(error))
            failed.exit_code = console.exit_code
            raise failed from None
        except KeyboardInterrupt:
            _signal_step(signal.SIGKILL)
            raise Interrupted("stopped on request") from None


def _signal_step(number: signal.Signals) -> None:
    """Signal the running stage; the runner starts it from a shell, which does not pass signals on."""
    with suppress(psutil.Error):  # it ended meanwhile
        for shell in psutil.Process().children():
            for process in shell.children() or [shell]:
                process.send_signal(number)


def versions(settings: Config) -> dict[str, str]:
    """What each stage's cached result depends on beside its inputs."""
    return {name: stage.cache_version(settings) for name, stage in STAGES.items()}


def _link(place: Path, target: Path) -> Path:
    """Point `place` to `target` by a relative link, replacing an older link in one step."""
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.parent / f".{place.name}.link"
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(target, place.parent.absolute()))
    beside.replace(place)
    return place


class Console(io.TextIOBase):
    """Turns the runner's chatter into one line per stage and lets the stages' own lines through.

    The runner prints log records and the stages' output to stdout; cache hits only reach the root logger.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.clock = stream, clock
        self.order = list(STAGES)
        self.stage: str | None = None
        self.started = 0.0
        self.refusals: list[str] = []
        self.recent: list[str] = []
        self.cached: list[str] = []
        self.stopped = False
        self.exit_code = RamenError.exit_code
        self._partial = ""
        self._streaming = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Take over stdout and the root logger for a while."""
        root, handler = logging.getLogger(), _Forward(self)
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
            self._line(line)
        return len(text)

    def _line(self, line: str) -> None:
        if found := _LOG.match(line):
            self.record(found.group(1))
        elif self._streaming and (ended := _EXIT.fullmatch(line.strip())):
            self.exit_code = int(ended.group(1))
        elif self._streaming and line.strip().startswith(ERROR_PREFIX):  # said at the end, by `failure`
            self.refusals.append(line.strip().removeprefix(ERROR_PREFIX))
        elif self._streaming and line.strip() and not _EXECUTOR.match(line):
            self.recent = [*self.recent[-2:], line.strip()]
            if not self.stopped:
                self._say(f"  {line.strip()}")

    def record(self, message: str) -> None:
        """One log record of the runner."""
        message = _COLOUR.sub("", message)
        task = _TASK.search(message)
        stage = task.group(1) if task else ""
        self._streaming = message.startswith("Streamed logs")
        if "cache hit" in message:
            self.cached.append(stage)
            self._say(f"{self._number(stage)} {stage}: from the cache")
        elif message.startswith("Executing task"):
            if self.stopped:  # asked for between two stages
                raise KeyboardInterrupt
            self.stage, self.started, self.refusals, self.recent = stage, self.clock(), [], []
            self._say(f"{self._number(stage)} {stage}")
        elif "finished with status SUCCESS" in message and stage == self.stage:
            self._say(f"{self._number(stage)} {stage}: done in {self.clock() - self.started:.1f} s")

    def stop(self) -> None:
        """Say that a stop was asked for; what the stage says from now on shows in `failure` alone."""
        self.stopped, self.refusals, self.recent = True, [], []
        self._say("stopping")

    def failure(self) -> str:
        """What the failed stage said: its error lines, else its last words (none if it was told to stop)."""
        said = self.refusals or ([] if self.stopped else self.recent)
        return "\n".join(f"{self.stage}: {line}" for line in said)

    def _number(self, stage: str) -> str:
        return f"[{self.order.index(stage) + 1}/{len(self.order)}]" if stage in self.order else "[?]"

    def _say(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class _Forward(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.record(record.getMessage())
