"""Work directories: where a stage keeps what an interrupted run goes on from, and whose it is.

A directory is named by what was asked for (stage, sections, inputs, code), so a checkpoint can only be found again by
the run that would have written it. If the same output is asked for in another way while an interrupted run waits, that
is refused: someone may not want to lose hours of training over a changed knob.
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

from ramen.artifacts import checked, naming, read_json, write_json
from ramen.errors import ArtifactError
from ramen.tracking import flat_params

WORK_ENV = "RAMEN_WORK"
"""Environment variable naming the directory of work directories (checkpoints); default .ramen/work."""

TASK_FILE = "task.json"
"""In a work directory or a checkpoint: what was asked for."""


def work_directory(task: Mapping[str, Any]) -> Path:
    """The same stage with the same sections, inputs and code finds the same directory again."""
    key = json.dumps([task[part] for part in ("stage", "sections", "inputs", "code")], sort_keys=True)
    root = Path(os.environ.get(WORK_ENV, ".ramen/work"))
    return root / f"{task['stage']}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@contextmanager
def lock_workdir(work: Path, task: Mapping[str, Any]) -> Iterator[None]:
    """Hold the lock of a work directory; the system lets go of it when the process ends, however it ends.

    Raises:
        ArtifactError: another process, maybe on another machine, is at the same task, or checkpoints have no place.
    """
    path = work.with_name(f"{work.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"{path.parent}: the directory for checkpoints cannot be made ({error.strerror}); set {WORK_ENV} to another"
        ) from None
    while True:
        with path.open("a+", encoding="utf-8", errors="replace") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise ArtifactError(
                    f"{task['stage']}: {lock.read().strip() or 'another process'} is at the very same task and writes "
                    f"checkpoints to {work}; wait for it, or give this one another {WORK_ENV}"
                ) from None
            except OSError:
                pass  # a file system without locks: as before there were any
            if not path.exists() or path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
                continue  # removed by its last holder just now
            with naming(path):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {socket.gethostname()}")
                lock.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def claim(work: Path, task: Mapping[str, Any], outputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """Note whose work directory it is, unless unfinished work of another task waits for the same outputs.

    Raises:
        ArtifactError: it does: someone changed a knob, the data or the code under a checkpoint.
    """
    places = {name: str(Path(place).absolute()) for name, place in outputs.items()}
    for other in sorted(work.parent.glob(f"{task['stage']}-*/{TASK_FILE}")):
        theirs = read_task(other)  # what is not readable is nobody's: it blocks no other task
        if theirs and other.parent != work and theirs.get("outputs") == places and _unfinished(other.parent):
            raise ArtifactError(
                f"{task['stage']}: an interrupted run for the same output left a checkpoint in {other.parent}, but "
                f"{'; '.join(differences(theirs, task))}; go back to resume it, or start afresh: rm -r {other.parent}"
            )
    write_json(work / TASK_FILE, {**task, "outputs": places})


def release(work: Path) -> None:
    """Remove a work directory in which nothing was left to go on from."""
    if work.is_dir() and not _unfinished(work):
        shutil.rmtree(work, ignore_errors=True)


def inputs_in_use() -> set[str]:
    """Digests of the artifacts that tasks with a work directory read: running ones, and interrupted ones.

    Raises:
        ArtifactError: what a checkpoint needs is unknown, since its task cannot be read.
    """
    found: set[str] = set()
    for file in sorted(Path(os.environ.get(WORK_ENV, ".ramen/work")).glob(f"*/{TASK_FILE}")):
        if task := read_task(file):
            found |= set(task["inputs"].values())
        elif _unfinished(file.parent):
            raise ArtifactError(
                f"{file}: damaged, so what the checkpoint next to it needs is unknown; run its command again, or "
                f"delete it: rm -r {file.parent}"
            )
    return found


def read_task(file: Path) -> dict[str, Any]:
    """A task as `claim` wrote it; empty if the file is damaged."""
    with suppress(ArtifactError):
        task: dict[str, Any] = read_json(file, dict[str, Any])
        forms = {"sections": dict[str, dict[str, Any]], "inputs": dict[str, str], "outputs": dict[str, str]}
        return task | {key: checked(task.get(key, {}), form, str(file)) for key, form in forms.items()}
    return {}


def _unfinished(work: Path) -> bool:
    """Whether anything but the task was left in a work directory."""
    return any(path.name != TASK_FILE and (not path.is_dir() or any(path.iterdir())) for path in work.iterdir())


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What two tasks differ in, a phrase each."""
    before, now = (flat_params(task.get("sections", {})) for task in (theirs, ours))
    found = [
        f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    inputs = theirs.get("inputs", {})
    found += [f"{name} is another one" for name, digest in ours["inputs"].items() if inputs.get(name) != digest]
    if theirs.get("stage") != ours["stage"]:
        found.append(f"it is of stage {theirs.get('stage')}")
    elif theirs.get("code") != ours["code"]:
        found.append("ramen's code has changed")
    return found
