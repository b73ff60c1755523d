"""Start the worker processes of a training stage (`training.processes`), or join those started by torchrun."""

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
from ramen.errors import ERROR_PREFIX, ConfigError, Interrupted, MissingExtra, RamenError
from ramen.processes import environment, world_size
from ramen.retrieval import faiss_threads
from ramen.training.distributed import Processes, joined

GRACE = 30.0
"""Seconds that worker processes have to exit before they are killed."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def launch_processes(
    stage: str, inputs: Mapping[str, Artifact], sections: Mapping[str, Section], training: TrainingConfig
) -> Iterator[Processes]:
    """The processes that train a stage together, including this one.

    Under torchrun they are already running. Otherwise, with `training.processes` above 1, this process becomes rank 0
    and starts the workers on this machine. Each runs the same stage with the same sections and inputs, and writes no
    files.

    Raises:
        ConfigError: the machine has too few GPUs or cores.
        RamenError: a worker process failed; the message contains its last line.
    """
    count = training.processes or max(1, torch.cuda.device_count())
    if world_size() == 1:
        _check_process_count(count)
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
        workers = [_start(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, count)]
        try:
            with (
                environment({**shared, "RANK": "0", "LOCAL_RANK": "0"}),
                joined() as processes,
                _limited_threads(training, processes),
            ):
                yield processes
        except Exception as error:
            if failure := _worker_failure(workers):
                raise RamenError(failure) from error
            raise
        finally:
            _end(workers)


def _check_process_count(count: int) -> None:
    """Refuse more processes than GPUs, or than cores without GPUs: they would only use more memory."""
    gpus = torch.cuda.device_count()
    largest = gpus or max(2, cores())  # two processes on one core are slow, but useful as a test
    if count > largest:
        what = "GPUs" if gpus else "cores"
        raise ConfigError(
            f"training.processes = {count}: this machine has {gpus or cores()} {what}; set at most {largest}"
        )


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
    """Limit torch to `training.threads`, or to an even share of the cores, for the duration of the block."""
    threads = training.threads or max(1, cores() // processes.size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            if processes.size > 1:  # a single process may mine and validate on all cores
                with suppress(MissingExtra):  # reported where faiss is needed
                    stack.enter_context(faiss_threads(threads))
            yield
    finally:
        torch.set_num_threads(before)


def _worker_failure(workers: list[subprocess.Popen[str]]) -> str:
    """Exit code and last line of the first worker that failed; empty if none did."""
    for rank, worker in enumerate(workers, start=1):
        try:
            code = worker.wait(timeout=2)
        except subprocess.TimeoutExpired:
            continue
        if code not in (0, Interrupted.exit_code):
            assert worker.stderr is not None
            lines = worker.stderr.read().strip().splitlines()
            reason = lines[-1].removeprefix(ERROR_PREFIX) if lines else "no output"
            return f"training process {rank} exited with code {code}: {reason}"
    return ""


def _end(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        try:
            worker.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        if worker.stderr is not None:
            worker.stderr.close()
