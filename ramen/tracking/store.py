"""Connect to the MLflow tracking store, check it, and create and end runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ramen.errors import ConfigError, Interrupted, RamenError, first_line, short_repr
from ramen.provenance import dvc_project, pipeline_key, provenance_tags
from ramen.tracking.errors import explain
from ramen.tracking.journal import SPOOL_ENV, Journal, journals_folder
from ramen.tracking.retries import CONNECT_RETRIES, configure_mlflow, environment_defaults
from ramen.tracking.uris import registry_uri, sqlite_file, tracking_uri, uri_variable

EXPERIMENT = "ramen"
PARENT_ENV = "RAMEN_PARENT_RUN"
TRACKING_ENV = "RAMEN_TRACKING"
PIPELINE_TAG = "ramen.pipeline"
KEY_TAG = "ramen.pipeline_key"
ERROR_TAG = "ramen.error"
LOCK_SECONDS = 20.0
"""Time to wait for another process's transaction in a SQLite file, the same as MLflow's."""
MAX_NAME = 500
"""Characters of an experiment's name."""


def tracking_is_off() -> bool:
    """Return whether the variable `RAMEN_TRACKING` disables tracking."""
    return os.environ.get(TRACKING_ENV, "").lower() in {"off", "0", "false", "no"}


@dataclass(frozen=True)
class Store:
    """A reachable MLflow store and the experiment of this project; writes go through a journal.

    Attributes:
        client: MlflowClient.
        experiment_id: the experiment of new runs.
        journal: executes the writes, and stores them on disk during an outage.
    """

    client: Any
    experiment_id: str
    journal: Journal

    @classmethod
    @contextmanager
    def session(cls, run_id: str | None = None) -> Iterator[Store]:
        """Connect as `connect` does; flush the journal at the end, with a warning if writes are still pending."""
        store = cls.connect(run_id)
        try:
            yield store
        finally:
            store.journal.close()

    @classmethod
    def connect(cls, run_id: str | None = None) -> Store:
        """Connect to `MLFLOW_TRACKING_URI`, by default sqlite:///mlflow.db, and find or create the experiment.

        Args:
            run_id: a run whose experiment is used; None = `MLFLOW_EXPERIMENT_ID`, else the experiment
                `MLFLOW_EXPERIMENT_NAME`, by default "ramen", created if missing.

        Raises:
            RamenError: the store cannot be used; ConfigError for an invalid environment variable.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow

        configure_mlflow()
        given_id, name = _experiment_settings()
        _check_database(tracking_uri())
        setting = "MLFLOW_TRACKING_URI"
        try:
            with environment_defaults(CONNECT_RETRIES), _lock_database_creation(mlflow.get_tracking_uri()):
                client = mlflow.MlflowClient()
                if run_id:
                    experiment = client.get_run(run_id).info.experiment_id
                elif given_id:
                    experiment = client.get_experiment(given_id).experiment_id
                else:
                    experiment = _find_or_create_experiment(client, name)
                if not str(experiment).strip():
                    raise ValueError("the response has no experiment id; it does not come from an MLflow server")
        except Exception as error:
            if given_id and not run_id and getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                setting = "MLFLOW_EXPERIMENT_ID"
            raise RamenError(
                f"MLflow store {tracking_uri()}: cannot be used ({explain(error)}); "
                f"check {setting}, or set {TRACKING_ENV}=off"
            ) from error
        return cls(client, str(experiment), Journal(client, journals_folder()))

    def create_run(self, name: str, parent: str | None, tags: Mapping[str, str]) -> str:
        """Create a run, nested under `parent` unless it is None; return its id."""
        nested = {"mlflow.parentRunId": parent} if parent else {}
        return self.journal.create_run(self.experiment_id, name, {**tags, **nested})

    def parent_id(self, run_id: str) -> str | None:
        """Return the id of a run's parent, None if the run is not nested."""
        parent: str | None = self.client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        return parent

    @contextmanager
    def pipeline_run(self) -> Iterator[str | None]:
        """Yield the parent of a stage's run: the given one, or the one shared by a KFP run or a `dvc repro`.

        No process runs as long as a KFP or DVC pipeline, so each stage reopens the shared parent and ends it with the
        stage's own status.
        """
        given, key = os.environ.get(PARENT_ENV), pipeline_key()
        if given or key is None:
            yield given
            return
        runs = self.client.search_runs([self.experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        if runs:
            shared = str(runs[0].info.run_id)
            self.client.update_run(shared, status="RUNNING")
            if ERROR_TAG in runs[0].data.tags:
                self.client.delete_tag(shared, ERROR_TAG)
        else:
            name = "dvc repro" if key.startswith("dvc:") else f"kfp {key.removeprefix('kfp:')}"
            shared = self.create_run(name, None, provenance_tags() | {KEY_TAG: key, PIPELINE_TAG: "true"})
        with self.end_with_body(shared):
            yield shared

    @contextmanager
    def end_with_body(self, run_id: str) -> Iterator[None]:
        """End the run when the body ends: FINISHED, KILLED after an interrupt, or FAILED with the error in a tag."""
        try:
            yield
        except (KeyboardInterrupt, Interrupted):
            self._end(run_id, "KILLED")
            raise
        except BaseException as error:
            self.journal.write("tags", run_id, values={ERROR_TAG: first_line(error)[:500]})
            self._end(run_id, "FAILED")
            raise
        self._end(run_id, "FINISHED")

    def _end(self, run_id: str, status: str) -> None:
        self.journal.write("end", run_id, status=status, time=int(time.time() * 1000))


def use_project_store() -> None:
    """In a temporary workspace of `dvc exp run`, use the tracking store and the journals of the original project.

    Raises:
        RamenError: the project is not on this machine, or the environment names a store in the workspace.
    """
    project = dvc_project()
    if project is None or tracking_is_off():
        return
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        file = sqlite_file(uri)
        if file is not None and file.is_relative_to(Path.cwd()):
            raise RamenError(
                f"MLFLOW_TRACKING_URI = {uri}: lies in a temporary workspace of DVC that is deleted after the "
                "experiment; give an absolute path or a server"
            )
    elif not project.is_dir():
        raise RamenError(
            f"DVC_ROOT = {project}: this experiment's project is not on this machine, and its workspace is deleted "
            "after the experiment; set MLFLOW_TRACKING_URI"
        )
    else:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{quote(str(project / 'mlflow.db'))}"
    if project.is_dir():
        os.environ.setdefault(SPOOL_ENV, str(project / ".ramen" / "tracking"))


def require_store(registry: bool = False) -> None:
    """Check a SQLite store before it is read: MLflow would create a missing database, or tables in an empty one.

    Args:
        registry: also check the store of the model registry.

    Raises:
        RamenError: the database is missing, empty, locked, damaged or a directory.
    """
    for uri in (tracking_uri(), registry_uri()) if registry else (tracking_uri(),):
        _check_database(uri, must_exist=True)


def _check_database(uri: str, must_exist: bool = False) -> None:
    """Raise RamenError for a SQLite file that cannot be opened; MLflow would retry for minutes."""
    file, check = sqlite_file(uri), f"check {uri_variable(uri)}"
    if file is None:
        return
    if file.is_dir():
        raise RamenError(f"{uri}: is a directory, expected a database file; {check}")
    if must_exist and not file.exists():
        raise RamenError(f"no tracking database at {uri}; run `ramen run` here or set {uri_variable(uri)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=LOCK_SECONDS)) as database:
            empty = database.execute("SELECT name FROM sqlite_master").fetchone() is None
    except (OSError, sqlite3.Error) as error:
        locked = "end the process that locks it, or " if "locked" in str(error) else ""
        raise RamenError(f"{uri}: {error}; {locked}{check}") from error
    if empty and must_exist:
        raise RamenError(f"{uri}: the database is empty; run `ramen run` here or set {uri_variable(uri)}")


@contextmanager
def _lock_database_creation(uri: str) -> Iterator[None]:
    """Let one process at a time create the tables of a SQLite store; concurrent attempts fail in MLflow."""
    file = sqlite_file(uri)
    if file is None:
        yield
        return
    name = hashlib.sha256(f"{os.getuid()} {file}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"ramen-mlflow-{name}.lock"
    # every user can write to this folder: O_NOFOLLOW refuses a link that somebody else created
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _experiment_settings() -> tuple[str, str]:
    """Return `MLFLOW_EXPERIMENT_ID`, "" if unset, and `MLFLOW_EXPERIMENT_NAME`, by default "ramen".

    Raises:
        ConfigError: one of them is invalid.
    """
    number, name = (os.environ.get(f"MLFLOW_EXPERIMENT_{key}", "") for key in ("ID", "NAME"))
    if number and not re.fullmatch("[0-9]{1,18}", number):
        wrong = f"ID = {short_repr(number)}: expected a number of at most 18 digits"
    elif name and (not name.strip() or not name.isprintable() or len(name) > MAX_NAME):
        wrong = f"NAME = {short_repr(name)}: expected a name of at most {MAX_NAME} printable characters"
    else:
        return number, name or EXPERIMENT
    raise ConfigError(f"MLFLOW_EXPERIMENT_{wrong}; correct the variable or unset it")


def _find_or_create_experiment(client: Any, name: str) -> Any:
    """Return the id of the experiment of this name; another process may create it at the same time."""
    experiment = client.get_experiment_by_name(name)
    if not experiment:
        try:
            project = dvc_project() if sqlite_file(str(client.tracking_uri)) else None
            # by default MLflow stores files in the working directory, here a workspace that DVC deletes
            return client.create_experiment(name, str(project / "mlruns" / name) if project else None)
        except Exception:
            experiment = client.get_experiment_by_name(name)
            if not experiment:
                raise
    return experiment.experiment_id
