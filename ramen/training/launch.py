"""Starting the other processes of a training stage (`training.processes`), or joining those that torchrun started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import torch

from ramen.artifacts import Artifact
from ramen.config import Section, TrainingConfig
from ramen.errors import ERROR, ConfigError, Interrupted, MissingExtra, RamenError
from ramen.processes import environment, world_size
from ramen.retrieval import faiss_threads
from ramen.training.distributed import Processes, joined

GRACE = 30.0
"""Seconds that the other processes get to end by themselves."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def launch_processes(
    stage: str, inputs: Mapping[str, Artifact], sections: Mapping[str, Section], training: TrainingConfig
) -> Iterator[Processes]:
    """All processes of a stage, this one among them.

    Under torchrun they are there already. Else, with `training.processes` above 1, this process becomes rank 0 and
    starts the others on this machine; each runs the same stage with the same sections and inputs, and writes nothing.

    Raises:
        ConfigError: the machine is too small for so many.
        RamenError: another process failed; its last line is in the message.
    """
    count = training.processes or max(1, torch.cuda.device_count())
    if world_size() == 1:
        _check_room(count)
    if world_size() > 1 or count == 1:
        with joined() as processes, _limited_threads(training, processes):
            yield processes
        return
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as params:
        json.dump({name: section.model_dump() for name, section in sections.items()}, params)
        params.flush()
        command = [sys.executable, "-m", "ramen", stage, "--params", params.name]
        for name, artifact in inputs.items():
            command += [f"--{name.replace('_', '-')}", str(artifact.path)]
        others = [_start(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, count)]
        try:
            with (
                environment({**shared, "RANK": "0", "LOCAL_RANK": "0"}),
                joined() as processes,
                _limited_threads(training, processes),
            ):
                yield processes
        except Exception as error:
            if said := _last_words(others):
                raise RamenError(said) from error
            raise
        finally:
            _end(others)


def _check_room(count: int) -> None:
    """Refuse more processes than GPUs, or than cores where there is none: they would only fill the memory."""
    gpus = torch.cuda.device_count()
    most = gpus or max(2, cores())  # two on one core are slow, and show that it works
    if count > most:
        what = "GPUs" if gpus else "cores"
        raise ConfigError(f"training.processes = {count}: this machine has {gpus or cores()} {what}; {most} at most")


def _start(command: list[str], names: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**os.environ, **names}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _limited_threads(training: TrainingConfig, processes: Processes) -> Iterator[None]:
    """`training.threads`, or an even share of the cores; whatever follows in this process has its own again."""
    each = training.threads or max(1, cores() // processes.size)
    before = torch.get_num_threads()
    torch.set_num_threads(each)
    try:
        with ExitStack() as stack:
            if processes.size > 1:  # alone, mining and validation may use all cores whatever a step does
                with suppress(MissingExtra):  # who needs it will say so
                    stack.enter_context(faiss_threads(each))
            yield
    finally:
        torch.set_num_threads(before)


def _last_words(others: list[subprocess.Popen[str]]) -> str:
    """What the first process that ended badly said last."""
    for rank, other in enumerate(others, start=1):
        try:
            code = other.wait(timeout=2)
        except subprocess.TimeoutExpired:
            continue
        if code not in (0, Interrupted.exit_code):
            assert other.stderr is not None
            lines = other.stderr.read().strip().splitlines()
            reason = lines[-1].removeprefix(ERROR) if lines else "it said nothing"
            return f"training process {rank} ended with code {code}: {reason}"
    return ""


def _end(others: list[subprocess.Popen[str]]) -> None:
    for other in others:
        try:
            other.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()
        if other.stderr is not None:
            other.stderr.close()
