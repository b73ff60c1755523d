"""Runs in MLflow.

One parent run per pipeline run, one child per stage, one grandchild per pruning round. The parent is found in
this order, so that every front gives the same picture:

1. `MLFLOW_RUN_ID`: set by KFP's own MLflow plugin; that run *is* the stage's run and is resumed;
2. `RAMEN_PARENT_RUN`: the parent's id, passed on by `ramen run`;
3. `KFP_RUN_ID` (from the pod's label) or a running `dvc repro`: the parent is the run tagged with that key, made
   by whichever stage comes first;
4. none: the stage's run stands alone.

A store that cannot be reached when a stage starts ends it: nothing is lost yet. From then on all writes go through a
`Journal`, so an outage stops nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ramen.console import warn
from ramen.errors import ArtifactError, ConfigError, Interrupted, RamenError, reason, shown
from ramen.processes import environment, rank
from ramen.provenance import dvc_project, pipeline_key, provenance
from ramen.redaction import redact
from ramen.tracking.errors import explained, prepare_mlflow, registry_uri, tracking_uri, uri_variable
from ramen.tracking.journal import NO_LONG_WAIT, SPOOL_ENV, Journal, environment_defaults, kept, spool
from ramen.tracking.protocol import NullTracker, Tracker

EXPERIMENT = "ramen"
PARENT_ENV = "RAMEN_PARENT_RUN"
SWITCH_ENV = "RAMEN_TRACKING"
UNTRACKED = (
    f"publish-index registers in MLflow, but tracking is off: unset {SWITCH_ENV}, or set index.model to '' to write "
    "the retriever without registering it"
)
PIPELINE_TAG = "ramen.pipeline"
KEY_TAG = "ramen.pipeline_key"
ERROR_TAG = "ramen.error"
FEW_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15", **NO_LONG_WAIT}
"""When a stage starts: a wrong address should be told in seconds."""
LOCK_SECONDS = 20.0
"""Time for another process to end its transaction in a SQLite file; MLflow waits as long."""
PARAM_LIMIT = 500
"""Characters of a parameter's value that are kept; config.yaml on the parent holds everything."""


@contextmanager
def open_tracker(stage: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
    """The tracker of one stage's run, regardless of how it was started (see the module's docstring).

    Of several processes that run it together (`torchrun`), rank 0 tracks.

    Args:
        stage: name of the run.
        tags: of the run, in addition to the provenance.

    The run ends FINISHED, KILLED on an interrupt, or FAILED with the error's first line in the tag `ramen.error`.

    Raises:
        RamenError: the tracking store cannot be reached.
    """
    if tracking_is_off() or rank() > 0:
        yield NullTracker()
        return
    given = os.environ.pop("MLFLOW_RUN_ID", None)  # popped: children of a stage must not take the run for theirs
    tags = provenance() | {"ramen.stage": stage} | dict(tags or {})
    with Store.opened(given) as store:
        if given:
            tracker = MlflowTracker(store, given, parent := store.parent_of(given))
            tracker.tags(tags)
            if parent and "KFP_RUN_ID" in os.environ:  # the plugin's own: `ramen compare` looks for the tag
                store.journal.write("tags", parent, values={PIPELINE_TAG: "true"})
            with store.ending(given):
                yield tracker
            return
        with store.parent() as parent:
            run_id = store.create(stage, parent, tags)
            with store.ending(run_id):
                yield MlflowTracker(store, run_id, parent)


@contextmanager
def start_pipeline_run(
    name: str,
    config_yaml: str,
    tags: Mapping[str, str] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[str | None]:
    """Open the parent run of a pipeline and hand its id to the stages by `RAMEN_PARENT_RUN`.

    Args:
        name: of the run.
        config_yaml: the whole configuration, stored as config.yaml without credentials.
        tags: beside the provenance.
        sections: the configuration's values, recorded as parameters (stages from a cache record none themselves).

    Yields:
        The run's id, or None when tracking is off.
    """
    if tracking_is_off():
        yield None
        return
    with Store.opened() as store:
        run_id = store.create(name, None, provenance() | {PIPELINE_TAG: "true"} | dict(tags or {}))
        with environment({PARENT_ENV: run_id}), store.ending(run_id):
            tracker = MlflowTracker(store, run_id, None)
            tracker.params(flat_params(sections or {}))
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "config.yaml"
                file.write_text(redact(config_yaml), encoding="utf-8")
                tracker.artifact(file)
            yield run_id


def push_kept(folder: Path | None = None) -> tuple[int, int]:
    """Send what runs kept while the store was out of reach.

    Args:
        folder: of the journals; None = `RAMEN_SPOOL`, by default .ramen/tracking.

    Returns:
        Writes sent, and writes that are still kept (the store went away again, or their run is still under way).

    Raises:
        RamenError: the store cannot be reached.
    """
    folder = folder or spool()
    found = kept(folder)
    if not found:
        return 0, 0
    client = Store.connect().client
    sent = left = 0
    for place in found:
        try:
            journal = Journal.reopen(client, place)
        except ArtifactError as error:  # the other journals are sent
            warn(error)
            left += 1
            continue
        if journal is None:
            print(f"{place}: its run is under way and sends it itself", file=sys.stderr)
            continue
        before = journal.pending
        journal.send()
        journal.release()
        sent, left = sent + before - journal.pending, left + journal.pending
    return sent, left


def flat_params(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Section values as `section.key` parameters."""
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def tracking_is_off() -> bool:
    """Whether `RAMEN_TRACKING` switches tracking off."""
    return os.environ.get(SWITCH_ENV, "").lower() in {"off", "0", "false", "no"}


@dataclass(frozen=True)
class PipelineRun:
    """A pipeline's parent run.

    Attributes:
        run_id, name, status: as in MLflow.
        started: milliseconds since the epoch.
        metrics, params, tags: flat.
    """

    run_id: str
    name: str
    status: str
    started: int
    metrics: dict[str, float]
    params: dict[str, str]
    tags: dict[str, str]


def list_pipeline_runs(limit: int = 1000) -> list[PipelineRun]:
    """Parent runs of pipelines, newest first. Raises RamenError if the store is not there or cannot be reached."""
    require_store()
    store = Store.connect()
    found = store.client.search_runs(
        [store.experiment_id], f"tags.`{PIPELINE_TAG}` = 'true'", max_results=limit, order_by=["start_time DESC"]
    )
    return [
        PipelineRun(
            run.info.run_id,
            run.info.run_name,
            run.info.status,
            run.info.start_time,
            dict(run.data.metrics),
            dict(run.data.params),
            dict(run.data.tags),
        )
        for run in found
    ]


def run_files(run_id: str, folder: str) -> dict[str, str]:
    """Text files that a pipeline's run or its stages keep under a folder: name -> content; a later run's wins.

    Args:
        run_id: parent run of a pipeline.
        folder: as given to `Tracker.artifact`.

    Raises:
        RamenError: the store cannot be reached.
    """
    store = Store.connect(run_id)
    children = store.client.search_runs(
        [store.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'", order_by=["start_time ASC"]
    )
    found: dict[str, str] = {}
    for run in [run_id, *(child.info.run_id for child in children)]:
        for entry in store.client.list_artifacts(run, folder):
            with tempfile.TemporaryDirectory() as scratch:
                place = store.client.download_artifacts(run, entry.path, scratch)
                found[Path(entry.path).name] = Path(place).read_text(encoding="utf-8")
    return found


@dataclass(frozen=True)
class Store:
    """A reachable MLflow store and the experiment of this project; writes to it survive an outage."""

    client: Any
    experiment_id: str
    journal: Journal

    @classmethod
    @contextmanager
    def opened(cls, run_id: str | None = None) -> Iterator[Store]:
        """As `connect`; at the end, what an outage held back is sent, or said to be kept."""
        store = cls.connect(run_id)
        try:
            yield store
        finally:
            store.journal.close()

    @classmethod
    def connect(cls, run_id: str | None = None) -> Store:
        """Open `MLFLOW_TRACKING_URI`, by default sqlite:///mlflow.db, and an experiment.

        Args:
            run_id: a run whose experiment is used; None = `MLFLOW_EXPERIMENT_ID`, else the experiment named by
                `MLFLOW_EXPERIMENT_NAME`, by default "ramen", made if missing.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        import mlflow

        prepare_mlflow()
        given, name = _experiment_settings()
        _check_database(tracking_uri())
        setting = "MLFLOW_TRACKING_URI"
        try:
            with environment_defaults(FEW_RETRIES), _one_creator(mlflow.get_tracking_uri()):
                client = mlflow.MlflowClient()
                if run_id:
                    experiment = client.get_run(run_id).info.experiment_id
                elif given:
                    experiment = client.get_experiment(given).experiment_id
                else:
                    experiment = _experiment(client, name)
                if not str(experiment).strip():
                    raise ValueError("the answer names no experiment, as an MLflow server's does")
        except Exception as error:
            if given and not run_id and getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                setting = "MLFLOW_EXPERIMENT_ID"
            raise RamenError(
                f"MLflow store {tracking_uri()}: cannot be used ({explained(error)}); "
                f"check {setting}, or set {SWITCH_ENV}=off"
            ) from error
        return cls(client, str(experiment), Journal(client, spool()))

    def create(self, name: str, parent: str | None, tags: Mapping[str, str]) -> str:
        """Open a run, nested under `parent` if there is one."""
        nested = {"mlflow.parentRunId": parent} if parent else {}
        return self.journal.create_run(self.experiment_id, name, {**tags, **nested})

    def parent_of(self, run_id: str) -> str | None:
        """Parent of a run, if it is nested."""
        parent: str | None = self.client.get_run(run_id).data.tags.get("mlflow.parentRunId")
        return parent

    @contextmanager
    def parent(self) -> Iterator[str | None]:
        """The parent of a stage's run: given, or shared by all stages of one KFP run or one `dvc repro`.

        No process lives as long as a shared parent's pipeline, so each stage opens it again and ends it as it ends.
        """
        given, key = os.environ.get(PARENT_ENV), pipeline_key()
        if given or key is None:
            yield given
            return
        found = self.client.search_runs([self.experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        if found:
            shared = str(found[0].info.run_id)
            self.client.update_run(shared, status="RUNNING")
            if ERROR_TAG in found[0].data.tags:
                self.client.delete_tag(shared, ERROR_TAG)
        else:
            name = "dvc repro" if key.startswith("dvc:") else f"kfp {key.removeprefix('kfp:')}"
            shared = self.create(name, None, provenance() | {KEY_TAG: key, PIPELINE_TAG: "true"})
        with self.ending(shared):
            yield shared

    @contextmanager
    def ending(self, run_id: str) -> Iterator[None]:
        """End the run as its body ends."""
        try:
            yield
        except (KeyboardInterrupt, Interrupted):
            self._end(run_id, "KILLED")
            raise
        except BaseException as error:
            self.journal.write("tags", run_id, values={ERROR_TAG: reason(error)[:500]})
            self._end(run_id, "FAILED")
            raise
        self._end(run_id, "FINISHED")

    def _end(self, run_id: str, status: str) -> None:
        self.journal.write("end", run_id, status=status, time=int(time.time() * 1000))


class MlflowTracker:
    """Reports to an MLflow run; explicit run ids throughout, so nothing global is touched."""

    def __init__(self, store: Store, run_id: str, parent: str | None) -> None:
        self._store, self._write = store, store.journal.write
        self.run_id: str | None = run_id
        self.id, self._parent = run_id, parent

    def params(self, values: Mapping[str, Any]) -> None:
        """Record on this run, and on the parent what it does not hold yet, so that pipelines compare by parameters."""
        flat = {key: _short(value) for key, value in values.items()}
        for run in self._lineage():
            self._write("params", run, values=flat)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite values; a value that is not finite would spoil the chart and is tagged instead."""
        self._log(self.id, metrics, step)

    def curve(self, metrics: Mapping[str, float], step: int) -> None:
        for run in self._lineage():
            self._log(run, metrics, step)

    def headline(self, metrics: Mapping[str, float]) -> None:
        for run in self._lineage():
            self._log(run, metrics, None)

    def _lineage(self) -> list[str]:
        return [self.id, *([self._parent] if self._parent else [])]

    def _log(self, run: str, metrics: Mapping[str, float], step: int | None) -> None:
        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        if odd := {f"ramen.not_finite.{key.replace('/', '.')}": str(metrics[key]) for key in metrics.keys() - finite}:
            self._write("tags", run, values=odd)
        self._write("metrics", run, points=[[key, value, now, step or 0] for key, value in finite.items()])

    def tags(self, values: Mapping[str, str]) -> None:
        self._write("tags", self.id, values={key: str(value) for key, value in values.items()})

    def dataset(self, name: str, digest: str, source: str) -> None:
        # the store keeps 36 characters of a digest
        self._write("dataset", self.id, name=name, digest=digest[:36], source=source)

    def artifact(self, path: Path, folder: str = "") -> None:
        self._write("artifact", self.id, file=path, folder=folder)

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
        run_id = self._store.create(name, self.id, provenance() | dict(tags or {}))
        with self._store.ending(run_id):
            yield MlflowTracker(self._store, run_id, self.id)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= PARAM_LIMIT else text[: PARAM_LIMIT - 3] + "..."


def use_project_store() -> None:
    """In a temporary workspace of `dvc exp run`, keep runs, versions and journals in the project it was started from.

    Raises:
        RamenError: the project is not on this machine, or the environment names a store in the workspace.
    """
    project = dvc_project()
    if project is None or tracking_is_off():
        return
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        file = _database(given)
        if file is not None and file.is_relative_to(Path.cwd()):
            raise RamenError(
                f"MLFLOW_TRACKING_URI = {given}: lies in a temporary workspace of DVC that is deleted after the "
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
    """Check a database that is only read, or that of the registry too: MLflow would create one, or fill an empty one.

    Raises:
        RamenError: it is missing, empty, locked, damaged or a directory.
    """
    for uri in (tracking_uri(), registry_uri()) if registry else (tracking_uri(),):
        _check_database(uri, must_exist=True)


def _check_database(uri: str, must_exist: bool = False) -> None:
    """Raise RamenError for a SQLite file that cannot be opened; MLflow would try for minutes."""
    file, check = _database(uri), f"check {uri_variable(uri)}"
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


def _database(uri: str) -> Path | None:
    """The file of a store that is a SQLite database; None for any other store. MLflow writes a space as %20."""
    place, _, _ = uri.removeprefix("sqlite:///").partition("?")
    return Path.cwd() / unquote(place) if uri.startswith("sqlite:///") and place else None


@contextmanager
def _one_creator(uri: str) -> Iterator[None]:
    """Of processes that open a database file at once, one makes its tables; MLflow alone would fail in the others."""
    file = _database(uri)
    if file is None:
        yield
        return
    name = hashlib.sha256(f"{os.getuid()} {file}".encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"ramen-mlflow-{name}.lock"
    # the folder is everybody's: a link that somebody else put there is not followed
    with os.fdopen(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _experiment_settings() -> tuple[str, str]:
    """`MLFLOW_EXPERIMENT_ID`, "" if unset, and `MLFLOW_EXPERIMENT_NAME`, by default "ramen". Raises ConfigError."""
    number, name = (os.environ.get(f"MLFLOW_EXPERIMENT_{key}", "") for key in ("ID", "NAME"))
    if number and not re.fullmatch("[0-9]{1,18}", number):
        wrong = f"ID = {shown(number)}: expected a number of at most 18 digits"
    elif name and (not name.strip() or not name.isprintable() or len(name) > PARAM_LIMIT):
        wrong = f"NAME = {shown(name)}: expected a name of at most {PARAM_LIMIT} printable characters"
    else:
        return number, name or EXPERIMENT
    raise ConfigError(f"MLFLOW_EXPERIMENT_{wrong}; correct the variable or unset it")


def _experiment(client: Any, name: str) -> Any:
    """Id of the experiment of this name, made if missing; of two processes making it at once, the later finds it."""
    found = client.get_experiment_by_name(name)
    if not found:
        try:
            project = dvc_project() if _database(str(client.tracking_uri)) else None
            # else MLflow puts files under the working directory, which DVC deletes
            return client.create_experiment(name, str(project / "mlruns" / name) if project else None)
        except Exception:
            found = client.get_experiment_by_name(name)
            if not found:
                raise
    return found.experiment_id
