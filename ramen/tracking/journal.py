"""Writes to an MLflow store that may be out of reach: bounded retries, then a journal on disk, sent later.

Training must not die, nor stand still, because a tracking server restarts. A write that fails after a few retries is
appended to a journal, and so is everything after it, so the order stays; every `TRY_AGAIN` seconds, and when the run
ends, the journal is sent. What is left then is sent by `ramen tracking push`.

Files go another way than the rest (to an object store, or through a proxy that may find them too large). One that is
not taken holds up no metric behind it: it waits for the next attempt, or, if it never will be taken, is dropped.

A journal is a folder: `writes.jsonl` (a write per line, its files beside it), `sent.json` (how far it was sent, what
was passed over, and which run stands for which placeholder) and `lock`, held by the process that writes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ramen.artifacts import is_inside
from ramen.console import warn
from ramen.errors import ArtifactError, reason
from ramen.files import checked, read_json, reading, write_json
from ramen.redaction import redact_values

SPOOL_ENV = "RAMEN_SPOOL"
"""Folder of the journals; by default .ramen/tracking in the working directory. In a pod: a volume that outlives it."""
TRY_AGAIN = 60.0
"""Seconds between two attempts to send a journal."""
NO_LONG_WAIT = {"MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false"}
"""A server may ask for an hour between two attempts."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30", **NO_LONG_WAIT}
"""Of a write: about a minute. MLflow's own patience is many silent minutes."""
OFFLINE_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15", **NO_LONG_WAIT}
"""While the store is known to be out of reach."""
PERMANENT_ERRORS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's codes for a write that no later attempt makes good."""
MAY_PASS = {401, 403, 404, 408, 425, 429}
"""HTTP answers below 500 that a later attempt may not get again: the others say that the write itself is at fault."""

NOTHING = ""
"""Name of a write that is damaged."""
WRITES, SENT, LOCK, FILES = "writes.jsonl", "sent.json", "lock", "files"


class Journal:
    """Carries out writes on an MLflow client, or keeps them until it can.

    Args:
        client: MlflowClient.
        folder: where the journals of all processes go; this one makes a folder of its own when it needs one.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._spool = client, folder
        self._folder: Path | None = None
        self._lock: TextIO | None = None
        self._ids: dict[str, str] = {}
        self._kept = self._sent = 0
        self._later: list[int] = []
        self._next_try = 0.0

    @classmethod
    def reopen(cls, client: Any, folder: Path) -> Journal | None:
        """Take over a journal that its process left; None while that process lives."""
        journal = cls(client, folder.parent)
        journal._folder, journal._lock = folder, (folder / LOCK).open("a")
        try:
            fcntl.flock(journal._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            journal._lock.close()
            return None
        try:
            journal._kept = len(_lines(folder / WRITES))
            if (folder / SENT).exists():
                progress = read_json(folder / SENT, dict[str, Any], remedy=f"to drop what it holds: rm -r {folder}")
                journal._restore(progress)
        except ArtifactError:
            journal.release()
            raise
        return journal

    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Continue from a `sent.json`. Raises ArtifactError unless it fits the journal."""
        assert self._folder is not None
        forms = {"sent": int, "ids": dict[str, str], "later": list[int]}
        where, remedy = self._folder / SENT, f"to drop what it holds: rm -r {self._folder}"
        self._sent, self._ids, self._later = (
            checked(progress.get(key, [] if key == "later" else None), form, f"{where}: {key}", remedy)
            for key, form in forms.items()
        )
        if not all(0 <= number <= self._kept for number in (self._sent, *self._later)) or self._kept in self._later:
            raise ArtifactError(f"{where}: counts writes that {WRITES} does not hold; {remedy}")

    @property
    def pending(self) -> int:
        """Writes that the store does not have yet."""
        return self._kept - self._sent + len(self._later)

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        """Open a run; returns its id, a placeholder if the store is out of reach."""
        tags = redact_values(tags)
        if self._online():
            try:
                with environment_defaults(PATIENCE):
                    return str(self._create(experiment, name, tags))
            except Exception as error:
                self._lost(error)
        placeholder = f"kept-{uuid.uuid4().hex}"
        self._keep({"write": "create_run", "run": placeholder, "experiment": experiment, "name": name,
                    "tags": dict(tags), "time": _now()})  # fmt: skip
        return placeholder

    def write(self, write: str, run: str, file: Path | None = None, **values: Any) -> None:
        """One write: a name of `_WRITES`, its run, its values, and a file or folder that goes with it.

        A file that the store will never take is dropped with a warning; any other refusal is raised. Credentials are
        removed from the values.
        """
        values = redact_values(values)
        if self._online():
            try:
                with environment_defaults(PATIENCE):
                    _WRITES[write](self._client, self._ids.get(run, run), file=file, **values)
                return
            except Exception as error:
                if file is not None and not _out_of_reach(error):
                    warn(f"{file.name} was refused by the tracking store and is dropped: {reason(error)}")
                    return
                self._lost(error)
        self._keep({"write": write, "run": run, "values": values}, file)

    def send(self) -> bool:
        """Send what is kept, in order; True when nothing is left. Killed on the way, it goes on where it was."""
        if self._folder is None:
            return True
        rows = _lines(self._folder / WRITES)
        files_wait = False
        with environment_defaults(OFFLINE_RETRIES):
            for number in (*self._later, *range(self._sent, len(rows))):
                row = self._row(rows[number], number + 1)
                taken = not (files_wait and "file" in row)
                try:
                    if taken:
                        self._carry_out(row)
                except Exception as error:
                    if not _out_of_reach(error):
                        warn(f"a write was refused and is dropped: {reason(error)}")
                    elif "file" in row:
                        taken, files_wait = False, True
                    else:
                        break
                self._passed(number, taken)
        if self.pending:
            self._next_try = time.monotonic() + TRY_AGAIN
            return False
        self.release()  # before the folder goes: NFS keeps a file that is open, and its folder with it
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._kept, self._sent = None, 0, 0
        return True

    def _row(self, line: str, number: int) -> dict[str, Any]:
        """A write as `_keep` wrote it; one that is damaged is dropped with a warning, and does nothing."""
        assert self._folder is not None
        where = f"{self._folder / WRITES}:{number}"
        try:
            with reading(self._folder / WRITES):
                row = checked(json.loads(line), dict[str, Any], where)
            known = row.get("write") == "create_run" or row.get("write") in _WRITES
            forms: dict[str, Any] = {"write": str, "run": str}
            if "file" in row:
                forms["file"] = str
            for key, form in forms.items():
                checked(row.get(key), form, f"{where}: {key}")
            if known and ("file" not in row or is_inside(row["file"])):
                return dict(row)
        except ArtifactError:
            pass
        warn(f"{where}: damaged: this write is dropped")
        return {"write": NOTHING, "run": ""}

    def _passed(self, number: int, taken: bool) -> None:
        """Note that a row is done, or is to be tried once more at the next attempt."""
        assert self._folder is not None
        self._sent = max(self._sent, number + 1)
        later = set(self._later) - {number} if taken else {*self._later, number}
        self._later = sorted(later)
        write_json(self._folder / SENT, {"sent": self._sent, "ids": self._ids, "later": self._later})

    def close(self) -> None:
        """Send what can be sent, and say what could not."""
        if not self.send():
            warn(
                f"the tracking store is out of reach; {self.pending} writes are kept in {self._folder}: "
                "`ramen tracking push` sends them"
            )
            self.release()

    def release(self) -> None:
        """Leave the journal on disk to others."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _online(self) -> bool:
        if self._folder is not None and time.monotonic() >= self._next_try and self.send():
            print("the tracking store is back; everything kept was sent", file=sys.stderr, flush=True)
        return self._folder is None

    def _lost(self, error: Exception) -> None:
        """Begin a journal, unless the error is one that no later attempt makes good."""
        if not _out_of_reach(error):
            raise error
        self._folder = self._spool / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        (self._folder / FILES).mkdir(parents=True)
        self._lock = (self._folder / LOCK).open("a")
        with suppress(OSError):  # a file system without locks: as before there were any
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._next_try = time.monotonic() + TRY_AGAIN
        warn(f"the tracking store is out of reach ({reason(error)}); writes are kept in {self._folder}")

    def _keep(self, row: dict[str, Any], file: Path | None = None) -> None:
        assert self._folder is not None
        if file is not None:
            place = self._folder / FILES / str(self._kept) / file.name
            place.parent.mkdir()
            shutil.copytree(file, place) if file.is_dir() else shutil.copyfile(file, place)
            row["file"] = str(place.relative_to(self._folder))
        with (self._folder / WRITES).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._kept += 1

    def _carry_out(self, row: dict[str, Any]) -> None:
        assert self._folder is not None
        if row["write"] == NOTHING:
            return
        if row["write"] == "create_run":
            self._ids[row["run"]] = self._create(row["experiment"], row["name"], row["tags"], row["time"])
            return
        file = self._folder / row["file"] if "file" in row else None
        _WRITES[row["write"]](self._client, self._ids.get(row["run"], row["run"]), file=file, **row["values"])

    def _create(self, experiment: str, name: str, tags: Mapping[str, str], start: int | None = None) -> str:
        parent = tags.get("mlflow.parentRunId")
        own = {**tags, **({"mlflow.parentRunId": self._ids.get(parent, parent)} if parent else {})}
        run = self._client.create_run(experiment, run_name=name, tags=own, start_time=start)
        if not str(run.info.run_id or "").strip():
            raise ValueError("the answer names no run, as an MLflow server's does")
        return str(run.info.run_id)


def _params(client: Any, run: str, *, values: dict[str, str], file: Path | None = None) -> None:
    """Parameters a run does not hold yet; MLflow refuses to change one."""
    from mlflow.entities import Param

    known = client.get_run(run).data.params
    client.log_batch(run, params=[Param(key, value) for key, value in values.items() if key not in known])


def _metrics(client: Any, run: str, *, points: list[list[Any]], file: Path | None = None) -> None:
    from mlflow.entities import Metric

    for start in range(0, len(points), 900):  # the API takes 1,000 at a time
        client.log_batch(run, metrics=[Metric(*point) for point in points[start : start + 900]])


def _tags(client: Any, run: str, *, values: dict[str, str], file: Path | None = None) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run, tags=[RunTag(key, value) for key, value in values.items()])


def _dataset(client: Any, run: str, *, name: str, digest: str, source: str, file: Path | None = None) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(name, digest, "local", json.dumps({"uri": source}))
    client.log_inputs(run, [DatasetInput(entity, [InputTag("mlflow.data.context", name)])])


def _artifact(client: Any, run: str, *, folder: str, file: Path | None = None) -> None:
    assert file is not None
    if file.is_dir():
        client.log_artifacts(run, str(file), folder or None)
    else:
        client.log_artifact(run, str(file), folder or None)


def _end(client: Any, run: str, *, status: str, time: int, file: Path | None = None) -> None:
    client.set_terminated(run, status, time)


_WRITES: dict[str, Callable[..., None]] = {
    "params": _params, "metrics": _metrics, "tags": _tags, "dataset": _dataset, "artifact": _artifact, "end": _end,
}  # fmt: skip


def spool() -> Path:
    """Folder of the journals."""
    return Path(os.environ.get(SPOOL_ENV) or Path(".ramen") / "tracking")


def kept(folder: Path) -> list[Path]:
    """Journals in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{WRITES}"))


def _lines(path: Path) -> list[str]:
    """Whole lines; a last one that a kill cut off is no write."""
    text = ""
    if path.exists():
        with reading(path, f"to drop what it holds: rm -r {path.parent}"):
            text = path.read_bytes().decode("utf-8", errors="replace")
    return text.split("\n")[:-1]


def _out_of_reach(error: Exception) -> bool:
    """Whether a later attempt may succeed: no answer, an error of the server, or keys that it does not take."""
    if getattr(error, "error_code", "") in PERMANENT_ERRORS or isinstance(error, TypeError | AssertionError):
        return False
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore's
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(answer, "status_code", None)
    return status is None or status >= 500 or status in MAY_PASS


def _now() -> int:
    return int(time.time() * 1000)


_defaults_lock = threading.Lock()
_defaults_held: dict[str, int] = {}
"""Variables that `environment_defaults` set -> how many callers need them; threads of a server share them."""


@contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while, of those that the caller's environment does not set.

    Several threads may use it at once: a variable stays until the last of them ends.
    """
    taken = []
    with _defaults_lock:
        for key, value in values.items():
            if key in _defaults_held or key not in os.environ:
                os.environ.setdefault(key, value)
                _defaults_held[key] = _defaults_held.get(key, 0) + 1
                taken.append(key)
    try:
        yield
    finally:
        with _defaults_lock:
            for key in taken:
                _defaults_held[key] -= 1
                if not _defaults_held[key]:
                    del _defaults_held[key]
                    os.environ.pop(key, None)
