"""Tracking: a small protocol, a tracker that does nothing, and MLflow.

One parent run per pipeline run, one child per stage, one grandchild per pruning round. The parent is found in
this order, so that every front gives the same picture:

1. `MLFLOW_RUN_ID`: set by KFP's own MLflow plugin; that run *is* the stage's run and is resumed;
2. `RAMEN_PARENT_RUN`: the parent's id, passed on by `ramen run`;
3. `KFP_RUN_ID` (from the pod's label) or a running `dvc repro`: the parent is the run tagged with that key, made
   by whichever stage comes first;
4. none: the stage's run stands alone.

mlflow is imported only when a tracker is opened. `RAMEN_TRACKING=off` turns tracking off.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ramen.errors import Interrupted, RamenError
from ramen.processes import rank
from ramen.provenance import pipeline_key, provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERIMENT = "ramen"
PARENT_ENV = "RAMEN_PARENT_RUN"
SWITCH_ENV = "RAMEN_TRACKING"
PIPELINE_TAG = "ramen.pipeline"
KEY_TAG = "ramen.pipeline_key"
ERROR_TAG = "ramen.error"
PARAM_LIMIT = 500
"""Characters of a parameter's value that are kept; config.yaml on the parent holds everything."""


class Tracker(Protocol):
    """What a stage may report. All calls are cheap and may be made from rank 0 only."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Record flat parameters."""

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics, at a step if there is one."""

    def headline(self, metrics: Mapping[str, float]) -> None:
        """Record metrics on this run and on its pipeline's parent, so that pipelines compare row by row."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags on this run."""

    def dataset(self, name: str, digest: str, source: str) -> None:
        """Record an input artifact."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Store a file or a folder with the run."""

    def figure(self, figure: Figure, name: str) -> None:
        """Store a matplotlib figure as `name`.png."""

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> AbstractContextManager[Tracker]:
        """Open a nested run."""

    @property
    def run_id(self) -> str | None:
        """Id of this run, None when nothing is tracked."""


class NullTracker:
    """Accepts everything, does nothing."""

    run_id: str | None = None

    def params(self, values: Mapping[str, Any]) -> None: ...
    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...
    def headline(self, metrics: Mapping[str, float]) -> None: ...
    def tags(self, values: Mapping[str, str]) -> None: ...
    def dataset(self, name: str, digest: str, source: str) -> None: ...
    def artifact(self, path: Path, folder: str = "") -> None: ...
    def figure(self, figure: Figure, name: str) -> None: ...

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
        yield self


@contextmanager
def open_tracker(stage: str) -> Iterator[Tracker]:
    """The tracker of one stage's run, whatever the front (see the module's docstring).

    Of several processes that run it together (`torchrun`), rank 0 tracks.

    The run ends FINISHED, KILLED on an interrupt, or FAILED with the error's first line in the tag `ramen.error`.

    Raises:
        RamenError: the tracking store cannot be reached.
    """
    if tracking_is_off() or rank() > 0:
        yield NullTracker()
        return
    given = os.environ.pop("MLFLOW_RUN_ID", None)  # popped: children of a stage must not take the run for theirs
    store = Store.connect(given)
    tags = provenance() | {"ramen.stage": stage}
    if given:
        tracker = MlflowTracker(store, given, store.parent_of(given))
        tracker.tags(tags)
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
        config_yaml: the whole configuration, stored as config.yaml.
        tags: beside the provenance.
        sections: the configuration's values, recorded as parameters (stages from a cache record none themselves).

    Yields:
        The run's id, or None when tracking is off.
    """
    if tracking_is_off():
        yield None
        return
    store = Store.connect()
    run_id = store.create(name, None, provenance() | {PIPELINE_TAG: "true"} | dict(tags or {}))
    store.client.log_text(run_id, config_yaml, "config.yaml")
    MlflowTracker(store, run_id, None).params(flat_params(sections or {}))
    before = os.environ.get(PARENT_ENV)
    os.environ[PARENT_ENV] = run_id
    try:
        with store.ending(run_id):
            yield run_id
    finally:
        if before is None:
            del os.environ[PARENT_ENV]
        else:
            os.environ[PARENT_ENV] = before


def record_cached(stage: str, metrics: Mapping[str, float]) -> None:
    """File a stage whose result came from a cache: a child of the running pipeline, tagged `ramen.cached`."""
    if tracking_is_off():
        return
    store = Store.connect()
    with store.parent() as parent:
        run_id = store.create(stage, parent, provenance() | {"ramen.stage": stage, "ramen.cached": "true"})
        with store.ending(run_id):
            MlflowTracker(store, run_id, parent).log(metrics)


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
    """Parent runs of pipelines, newest first. Raises RamenError if the store cannot be reached."""
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
    """A reachable MLflow store and the experiment of this project."""

    client: Any
    experiment_id: str

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

        for noisy in ("alembic", "mlflow"):  # after the import, which sets levels of its own
            logging.getLogger(noisy).setLevel(logging.ERROR)

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        try:
            with _few_retries():
                client = mlflow.MlflowClient()
                if run_id:
                    experiment = client.get_run(run_id).info.experiment_id
                elif given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
                    experiment = client.get_experiment(given).experiment_id
                else:
                    experiment = _experiment(client, name)
        except Exception as error:
            raise RamenError(
                f"MLflow store {mlflow.get_tracking_uri()}: cannot be used ({_reason(error)}); "
                f"check MLFLOW_TRACKING_URI, or set {SWITCH_ENV}=off"
            ) from error
        return cls(client, str(experiment))

    def create(self, name: str, parent: str | None, tags: Mapping[str, str]) -> str:
        """Open a run, nested under `parent` if there is one."""
        nested = {"mlflow.parentRunId": parent} if parent else {}
        run = self.client.create_run(self.experiment_id, run_name=name, tags={**tags, **nested})
        return str(run.info.run_id)

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
            self.client.set_terminated(run_id, "KILLED")
            raise
        except BaseException as error:
            self.client.set_tag(run_id, ERROR_TAG, _reason(error)[:500])
            self.client.set_terminated(run_id, "FAILED")
            raise
        self.client.set_terminated(run_id, "FINISHED")


class MlflowTracker:
    """Reports to an MLflow run; explicit run ids throughout, so nothing global is touched."""

    def __init__(self, store: Store, run_id: str, parent: str | None) -> None:
        self._store, self._client = store, store.client
        self.run_id: str | None = run_id
        self.id, self._parent = run_id, parent

    def params(self, values: Mapping[str, Any]) -> None:
        """Record on this run, and on the parent what it does not hold yet, so that pipelines compare by parameters."""
        from mlflow.entities import Param

        flat = {key: _short(value) for key, value in values.items()}
        for run in (self.id, *([self._parent] if self._parent else [])):
            known = self._client.get_run(run).data.params
            new = [Param(key, value) for key, value in flat.items() if key not in known]
            self._client.log_batch(run, params=new)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite values; a value that is not finite would spoil the chart and is tagged instead."""
        self._log(self.id, metrics, step)

    def headline(self, metrics: Mapping[str, float]) -> None:
        for run in (self.id, *([self._parent] if self._parent else [])):
            self._log(run, metrics, None)

    def _log(self, run: str, metrics: Mapping[str, float], step: int | None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        for key in metrics.keys() - finite.keys():
            self._client.set_tag(run, f"ramen.not_finite.{key.replace('/', '.')}", str(metrics[key]))
        entries = [Metric(key, value, now, step or 0) for key, value in finite.items()]
        for start in range(0, len(entries), 900):  # the API takes 1,000 at a time
            self._client.log_batch(run, metrics=entries[start : start + 900])

    def tags(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self.id, tags=[RunTag(key, str(value)) for key, value in values.items()])

    def dataset(self, name: str, digest: str, source: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        # the store keeps 36 characters of a digest
        entity = Dataset(name, digest[:36], "local", json.dumps({"uri": source}))
        self._client.log_inputs(self.id, [DatasetInput(entity, [InputTag("mlflow.data.context", name)])])

    def artifact(self, path: Path, folder: str = "") -> None:
        if path.is_dir():
            self._client.log_artifacts(self.id, str(path), folder or None)
        else:
            self._client.log_artifact(self.id, str(path), folder or None)

    def figure(self, figure: Figure, name: str) -> None:
        self._client.log_figure(self.id, figure, f"figures/{name}.png")

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
        run_id = self._store.create(name, self.id, provenance() | dict(tags or {}))
        with self._store.ending(run_id):
            yield MlflowTracker(self._store, run_id, self.id)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= PARAM_LIMIT else text[: PARAM_LIMIT - 3] + "..."


def _experiment(client: Any, name: str) -> Any:
    """Id of the experiment of this name, made if missing; of two processes making it at once, the later finds it."""
    found = client.get_experiment_by_name(name)
    if not found:
        try:
            return client.create_experiment(name)
        except Exception:
            found = client.get_experiment_by_name(name)
            if not found:
                raise
    return found.experiment_id


def _reason(error: BaseException) -> str:
    """First line of an error; of a failed request only what the network said, at the end of a long nested text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = re.search(r"Caused by \w+\([\"'].*?\): (.*)[\"']\)\)$", lines[0])
    return cause.group(1) if cause else lines[0]


@contextmanager
def _few_retries() -> Iterator[None]:
    """Ask a server that may be out of reach for seconds only; MLflow's own patience is many silent minutes.

    Later calls, with a run under way, have MLflow's own patience again.
    """
    impatience = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
    added = {key: value for key, value in impatience.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
