"""Journal of pending tracking writes, for an MLflow store that is unreachable.

A tracking server that restarts must neither end nor stall a training. A write that fails after a few retries is
appended to a journal on disk, and so are all later writes, which keeps their order. The journal is flushed every
`FLUSH_SECONDS` and when the run ends; `ramen tracking push` flushes what is left then.

Files are uploaded separately (to an object store, or through a proxy with a size limit), so a file that fails does
not delay the writes after it: it is retried at the next flush, or dropped if the error is permanent.

A journal is a folder with
* `writes.jsonl`, one write per line, and the files of the writes under `files`;
* `sent.json`, the progress: lines sent, lines to retry, and the run id of each placeholder;
* `lock`, held by the process that writes the journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ramen.artifacts import is_safe_relative_path
from ramen.console import report, warn
from ramen.errors import ArtifactError, first_line
from ramen.files import check_type, read_json, wrap_read_errors, write_json
from ramen.redaction import redact_values
from ramen.tracking.retries import OFFLINE_RETRIES, ONLINE_RETRIES, environment_defaults

SPOOL_ENV = "RAMEN_SPOOL"
"""Folder of the journals, by default .ramen/tracking in the working directory. In a pod: a volume that outlives it."""
FLUSH_SECONDS = 60.0
"""Time between two attempts to flush a journal."""
PERMANENT_ERRORS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
"""MLflow's error codes for a write that fails at every attempt."""
RETRYABLE_STATUS = {401, 403, 404, 408, 425, 429}
"""HTTP status codes below 500 that a retry may not get again; the others mean that the write itself is wrong."""

DAMAGED = ""
"""Kind of a write that cannot be read."""
WRITES, SENT, LOCK, FILES = "writes.jsonl", "sent.json", "lock", "files"


class Journal:
    """Executes writes on an MLflow client, or stores them on disk while the MLflow store is unreachable.

    Args:
        client: MlflowClient.
        folder: parent folder of the journals of all processes; this journal creates its own folder when it needs one.
    """

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._spool = client, folder
        self._folder: Path | None = None
        self._lock: TextIO | None = None
        self._run_ids: dict[str, str] = {}  # by placeholder
        self._lines = self._sent = 0
        self._retry: list[int] = []  # lines before `_sent` whose files are pending
        self._next_flush = 0.0

    @classmethod
    def reopen(cls, client: Any, folder: Path) -> Journal | None:
        """Return the journal of an ended process, locked by this one; None if its process is still running.

        Raises:
            ArtifactError: the journal's files are damaged.
        """
        journal = cls(client, folder.parent)
        journal._folder, journal._lock = folder, (folder / LOCK).open("a")
        try:
            fcntl.flock(journal._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            journal._lock.close()
            return None
        try:
            journal._lines = len(_read_lines(folder / WRITES))
            if (folder / SENT).exists():
                journal._restore(read_json(folder / SENT, dict[str, Any], remedy=_remedy(folder)))
        except ArtifactError:
            journal.unlock()
            raise
        return journal

    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Load the content of `sent.json`. Raises ArtifactError if it does not match `writes.jsonl`."""
        assert self._folder is not None
        forms = {"sent": int, "ids": dict[str, str], "later": list[int]}
        where, remedy = self._folder / SENT, _remedy(self._folder)
        self._sent, self._run_ids, self._retry = (
            check_type(progress.get(key, [] if key == "later" else None), form, f"{where}: {key}", remedy)
            for key, form in forms.items()
        )
        if not all(0 <= number <= self._lines for number in (self._sent, *self._retry)) or self._lines in self._retry:
            raise ArtifactError(f"{where}: refers to lines that {WRITES} does not have; {remedy}")

    @property
    def pending(self) -> int:
        """Number of writes that the store does not have yet."""
        return self._lines - self._sent + len(self._retry)

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        """Create a run and return its id, or a placeholder if the store is unreachable."""
        tags = redact_values(tags)
        if self._is_online():
            try:
                with environment_defaults(ONLINE_RETRIES):
                    return str(self._create_run(experiment, name, tags))
            except Exception as error:
                self._start(error)
        placeholder = f"kept-{uuid.uuid4().hex}"
        self._append({"write": "create_run", "run": placeholder, "experiment": experiment, "name": name,
                      "tags": dict(tags), "time": int(time.time() * 1000)})  # fmt: skip
        return placeholder

    def write(self, kind: str, run: str, file: Path | None = None, **values: Any) -> None:
        """Execute a write, or append it to the journal.

        A file that the store refuses permanently is dropped with a warning; other permanent errors are raised.

        Args:
            kind: key of `_WRITES`.
            run: id or placeholder.
            file: file or folder to upload.
            values: arguments of the write; credentials in them are redacted.
        """
        values = redact_values(values)
        if self._is_online():
            try:
                with environment_defaults(ONLINE_RETRIES):
                    _WRITES[kind](self._client, self._run_ids.get(run, run), file=file, **values)
                return
            except Exception as error:
                if file is not None and not _is_retryable(error):
                    warn(f"{file.name}: dropped, because the tracking store refused it: {first_line(error)}")
                    return
                self._start(error)
        self._append({"write": kind, "run": run, "values": values}, file)

    def flush(self) -> bool:
        """Flush: execute the pending writes in order; return whether none is left. A killed flush can be resumed."""
        if self._folder is None:
            return True
        lines = _read_lines(self._folder / WRITES)
        files_blocked = False
        with environment_defaults(OFFLINE_RETRIES):
            for number in (*self._retry, *range(self._sent, len(lines))):
                row = self._parse(lines[number], number + 1)
                done = not (files_blocked and "file" in row)
                try:
                    if done:
                        self._replay(row)
                except Exception as error:
                    if not _is_retryable(error):
                        warn(f"dropped a write, because the tracking store refused it: {first_line(error)}")
                    elif "file" in row:
                        done, files_blocked = False, True
                    else:
                        break
                self._save_progress(number, done)
        if self.pending:
            self._next_flush = time.monotonic() + FLUSH_SECONDS
            return False
        self.unlock()  # before the folder is deleted: NFS keeps an open file, and therefore its folder
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._lines, self._sent = None, 0, 0
        return True

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        """Return a write as `_append` stored it; a damaged one becomes a write that does nothing, with a warning."""
        assert self._folder is not None
        where = f"{self._folder / WRITES}:{number}"
        try:
            with wrap_read_errors(self._folder / WRITES):
                row = check_type(json.loads(line), dict[str, Any], where)
            known = row.get("write") == "create_run" or row.get("write") in _WRITES
            forms: dict[str, Any] = {"write": str, "run": str}
            if "file" in row:
                forms["file"] = str
            for key, form in forms.items():
                check_type(row.get(key), form, f"{where}: {key}")
            if known and ("file" not in row or is_safe_relative_path(row["file"])):
                return dict(row)
        except ArtifactError:
            pass
        warn(f"{where}: damaged; this write is dropped")
        return {"write": DAMAGED, "run": ""}

    def _save_progress(self, number: int, done: bool) -> None:
        """Record that a line is done, or that the next flush retries it."""
        assert self._folder is not None
        self._sent = max(self._sent, number + 1)
        self._retry = sorted(set(self._retry) - {number} if done else {*self._retry, number})
        write_json(self._folder / SENT, {"sent": self._sent, "ids": self._run_ids, "later": self._retry})

    def close(self) -> None:
        """Flush; warn if writes are still pending."""
        if not self.flush():
            warn(
                f"the tracking store is unreachable: {self.pending} writes are pending in {self._folder}; "
                "send them with `ramen tracking push`"
            )
            self.unlock()

    def unlock(self) -> None:
        """Unlock the journal, so that another process can flush it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _is_online(self) -> bool:
        """Return whether writes go to the store directly; flush first if the time has come."""
        if self._folder is not None and time.monotonic() >= self._next_flush and self.flush():
            report("the tracking store is reachable again; all pending writes were sent")
        return self._folder is None

    def _start(self, error: Exception) -> None:
        """Create the journal's folder after a failed write; raise the error if a retry cannot succeed."""
        if not _is_retryable(error):
            raise error
        self._folder = self._spool / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        (self._folder / FILES).mkdir(parents=True)
        self._lock = (self._folder / LOCK).open("a")
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        warn(f"the tracking store is unreachable ({first_line(error)}); writes are saved in {self._folder}")

    def _append(self, row: dict[str, Any], file: Path | None = None) -> None:
        assert self._folder is not None
        if file is not None:
            copy = self._folder / FILES / str(self._lines) / file.name
            copy.parent.mkdir()
            shutil.copytree(file, copy) if file.is_dir() else shutil.copyfile(file, copy)
            row["file"] = str(copy.relative_to(self._folder))
        with (self._folder / WRITES).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._lines += 1

    def _replay(self, row: dict[str, Any]) -> None:
        assert self._folder is not None
        if row["write"] == DAMAGED:
            return
        if row["write"] == "create_run":
            self._run_ids[row["run"]] = self._create_run(row["experiment"], row["name"], row["tags"], row["time"])
            return
        file = self._folder / row["file"] if "file" in row else None
        _WRITES[row["write"]](self._client, self._run_ids.get(row["run"], row["run"]), file=file, **row["values"])

    def _create_run(self, experiment: str, name: str, tags: Mapping[str, str], start: int | None = None) -> str:
        parent = tags.get("mlflow.parentRunId")
        tags = {**tags, **({"mlflow.parentRunId": self._run_ids.get(parent, parent)} if parent else {})}
        run = self._client.create_run(experiment, run_name=name, tags=tags, start_time=start)
        if not str(run.info.run_id or "").strip():
            raise ValueError("the response has no run id; it does not come from an MLflow server")
        return str(run.info.run_id)


def _log_params(client: Any, run: str, *, values: dict[str, str], file: Path | None = None) -> None:
    """Log the parameters that a run does not have yet; MLflow refuses to change one."""
    from mlflow.entities import Param

    known = client.get_run(run).data.params
    client.log_batch(run, params=[Param(key, value) for key, value in values.items() if key not in known])


def _log_metrics(client: Any, run: str, *, points: list[list[Any]], file: Path | None = None) -> None:
    from mlflow.entities import Metric

    for start in range(0, len(points), 900):  # the API accepts 1,000 per request
        client.log_batch(run, metrics=[Metric(*point) for point in points[start : start + 900]])


def _set_tags(client: Any, run: str, *, values: dict[str, str], file: Path | None = None) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run, tags=[RunTag(key, value) for key, value in values.items()])


def _log_dataset(client: Any, run: str, *, name: str, digest: str, source: str, file: Path | None = None) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(name, digest, "local", json.dumps({"uri": source}))
    client.log_inputs(run, [DatasetInput(entity, [InputTag("mlflow.data.context", name)])])


def _log_artifact(client: Any, run: str, *, folder: str, file: Path | None = None) -> None:
    assert file is not None
    if file.is_dir():
        client.log_artifacts(run, str(file), folder or None)
    else:
        client.log_artifact(run, str(file), folder or None)


def _end_run(client: Any, run: str, *, status: str, time: int, file: Path | None = None) -> None:
    client.set_terminated(run, status, time)


_WRITES: dict[str, Callable[..., None]] = {
    "params": _log_params, "metrics": _log_metrics, "tags": _set_tags, "dataset": _log_dataset,
    "artifact": _log_artifact, "end": _end_run,
}  # fmt: skip
"""Kind of a write, as in `writes.jsonl` -> function."""


def journals_folder() -> Path:
    """Return the folder of the journals: RAMEN_SPOOL, by default .ramen/tracking."""
    return Path(os.environ.get(SPOOL_ENV) or Path(".ramen") / "tracking")


def find_journals(folder: Path) -> list[Path]:
    """Return the journals in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{WRITES}"))


def _remedy(folder: Path) -> str:
    return f"to delete this journal and its pending writes: rm -r {folder}"


def _read_lines(path: Path) -> list[str]:
    """Return the complete lines; a kill may leave a last line without an end."""
    text = ""
    if path.exists():
        with wrap_read_errors(path, _remedy(path.parent)):
            text = path.read_bytes().decode("utf-8", errors="replace")
    return text.split("\n")[:-1]


def _is_retryable(error: Exception) -> bool:
    """Return whether a retry may succeed: no response, an error of the server, or refused credentials."""
    if getattr(error, "error_code", "") in PERMANENT_ERRORS or isinstance(error, TypeError | AssertionError):
        return False
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None)
    return status is None or status >= 500 or status in RETRYABLE_STATUS
