"""Work directories: checkpoints of an interrupted stage, and the record of the task that they belong to.

A directory is named by its task (stage, sections, inputs, code), so only the same task finds its checkpoint again. A
different task with the same outputs is refused while an interrupted run waits: hours of training should not be lost
because of a changed knob.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ramen.errors import ArtifactError
from ramen.files import add_path_to_errors, check_type, read_json, write_json
from ramen.tracking import flat_params

WORK_ENV = "RAMEN_WORK"
"""Environment variable with the directory of work directories (checkpoints); default .ramen/work."""

TASK_FILE = "task.json"
"""The task of a work directory or of a checkpoint."""


def stage_key(stage: str, sections: Mapping[str, Any], inputs: Mapping[str, Any], code: str) -> str:
    """Return a key of everything that a stage's result depends on: 16 hex digits.

    Args:
        stage: name of the stage.
        sections: values of the config sections that it sees.
        inputs: digests of what it reads.
        code: version of its code.
    """
    return hashlib.sha256(json.dumps([stage, sections, inputs, code], sort_keys=True).encode()).hexdigest()[:16]


def work_directory(task: Mapping[str, Any]) -> Path:
    """Return the work directory of a task (keys: stage, sections, inputs, code)."""
    key = stage_key(*(task[part] for part in ("stage", "sections", "inputs", "code")))
    return work_root() / f"{task['stage']}-{key}"


def work_root() -> Path:
    """Return the directory of all work directories."""
    return Path(os.environ.get(WORK_ENV, ".ramen/work"))


@contextmanager
def lock_workdir(work: Path, task: Mapping[str, Any]) -> Iterator[None]:
    """Hold the lock of a work directory inside the block; the system releases it if the process is killed.

    Raises:
        ArtifactError: another process, maybe on another machine, runs the same task, or the parent directory cannot be
            created.
    """
    path = work.with_name(f"{work.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"{path.parent}: cannot create the directory for checkpoints ({error.strerror}); set {WORK_ENV} to another "
            "directory"
        ) from None
    while True:
        with path.open("a+", encoding="utf-8", errors="replace") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise ArtifactError(
                    f"{task['stage']}: {lock.read().strip() or 'another process'} runs the same task with checkpoints "
                    f"in {work}; wait for it to end, or set {WORK_ENV} to another directory"
                ) from None
            except OSError:
                pass  # the file system has no locks: run without
            if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
                continue  # the previous holder has just removed the file
            with add_path_to_errors(path):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                lock.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def record_task(work: Path, task: Mapping[str, Any], outputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """Write the task into its work directory, unless an interrupted run of another task has the same outputs.

    Raises:
        ArtifactError: it has: a knob, the data or the code changed after the checkpoint was written.
    """
    output_paths = {name: str(Path(path).absolute()) for name, path in outputs.items()}
    for file in sorted(work.parent.glob(f"{task['stage']}-*/{TASK_FILE}")):
        other = read_task(file)  # a damaged task blocks no other
        if other and file.parent != work and other.get("outputs") == output_paths and _has_checkpoint(file.parent):
            raise ArtifactError(
                f"{task['stage']}: an interrupted run with the same output left a checkpoint in {file.parent}, but "
                f"{'; '.join(describe_differences(other, task))}; undo the change to resume it, or delete it to start "
                f"over: rm -r {file.parent}"
            )
    write_json(work / TASK_FILE, {**task, "outputs": output_paths})


def remove_if_empty(work: Path) -> None:
    """Delete a work directory that contains nothing to resume from."""
    if work.is_dir() and not _has_checkpoint(work):
        shutil.rmtree(work, ignore_errors=True)


def inputs_in_use() -> set[str]:
    """Return the digests of the artifacts that running and interrupted tasks read.

    Raises:
        ArtifactError: the task of a checkpoint cannot be read, so its inputs are unknown.
    """
    digests: set[str] = set()
    for file in sorted(work_root().glob(f"*/{TASK_FILE}")):
        if task := read_task(file):
            digests |= set(task["inputs"].values())
        elif _has_checkpoint(file.parent):
            raise ArtifactError(
                f"{file}: damaged, so the inputs of the checkpoint next to it are unknown; run its command again, or "
                f"delete it: rm -r {file.parent}"
            )
    return digests


def read_task(file: Path) -> dict[str, Any]:
    """Read a task written by `record_task`; empty if the file is damaged."""
    with suppress(ArtifactError):
        task: dict[str, Any] = read_json(file, dict[str, Any])
        forms = {"sections": dict[str, dict[str, Any]], "inputs": dict[str, str], "outputs": dict[str, str]}
        return task | {key: check_type(task.get(key, {}), form, str(file)) for key, form in forms.items()}
    return {}


def _has_checkpoint(work: Path) -> bool:
    """Whether a work directory contains anything but the task and empty folders."""
    return any(path.name != TASK_FILE and (not path.is_dir() or any(path.iterdir())) for path in work.iterdir())


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two tasks, one phrase each."""
    before, now = (flat_params(task.get("sections", {})) for task in (old, new))
    phrases = [
        f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    inputs = old.get("inputs", {})
    phrases += [f"the input {name} has changed" for name, digest in new["inputs"].items() if inputs.get(name) != digest]
    if old.get("stage") != new["stage"]:
        phrases.append(f"it belongs to the stage {old.get('stage')}")
    elif old.get("code") != new["code"]:
        phrases.append("ramen's code has changed")
    return phrases
