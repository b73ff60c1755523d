"""Record stages and pipelines as MLflow runs, and read them back.

A pipeline is a parent run, its stages are the children, pruning rounds the grandchildren. A stage finds its parent
in this order, so that the tree looks the same regardless of how the pipeline was started:

1. `MLFLOW_RUN_ID`, set by KFP's MLflow plugin: that run *is* the stage's run and is resumed;
2. `RAMEN_PARENT_RUN`, set by `ramen run`: the parent's id;
3. `KFP_RUN_ID` (from the pod's label) or a running `dvc repro`: the parent is the run with that key in a tag, created
   by the first stage;
4. otherwise the stage's run has no parent.

A store that is unreachable when a stage starts ends the stage, because no work is lost yet. Later writes go through a
`Journal`, so an outage does not end the run.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramen.console import report, warn
from ramen.errors import ArtifactError
from ramen.processes import environment, rank
from ramen.provenance import provenance_tags
from ramen.redaction import redact
from ramen.tracking.journal import Journal, find_journals, journals_folder
from ramen.tracking.protocol import NullTracker, Tracker
from ramen.tracking.store import PARENT_ENV, PIPELINE_TAG, TRACKING_ENV, Store, require_store, tracking_is_off

MAPPING_KNOBS = ("objective.lambdas", "index.gate")
"""Knobs whose value is a mapping: recorded as one parameter. Other mappings within a section are nested sections."""
REGISTRATION_NEEDS_TRACKING = (
    f"publish-index registers in MLflow, but tracking is off: unset {TRACKING_ENV}, or set index.model to '' to write "
    "the retriever without registering it"
)
PARAM_LIMIT = 500
"""Characters of a parameter's value that are recorded; the parent's config.yaml has the complete values."""


@contextmanager
def open_tracker(stage: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
    """Yield the tracker of a stage's run; the module's docstring says which run is its parent.

    With several worker processes (`torchrun`), only rank 0 tracks. The run ends FINISHED, KILLED after an interrupt,
    or FAILED with the first line of the error in the tag `ramen.error`.

    Args:
        stage: name of the run.
        tags: of the run, in addition to the provenance.

    Raises:
        RamenError: the tracking store cannot be reached.
    """
    if tracking_is_off() or rank() > 0:
        yield NullTracker()
        return
    run_id = os.environ.pop("MLFLOW_RUN_ID", None)  # child processes must not resume this run as well
    tags = provenance_tags() | {"ramen.stage": stage} | dict(tags or {})
    with Store.session(run_id) as store:
        if run_id:
            tracker = MlflowTracker(store, run_id, parent := store.parent_id(run_id))
            tracker.tags(tags)
            if parent and "KFP_RUN_ID" in os.environ:  # the plugin created the parent; `ramen compare` needs the tag
                store.journal.write("tags", parent, values={PIPELINE_TAG: "true"})
            with store.end_with_body(run_id):
                yield tracker
            return
        with store.pipeline_run() as parent:
            run_id = store.create_run(stage, parent, tags)
            with store.end_with_body(run_id):
                yield MlflowTracker(store, run_id, parent)


@contextmanager
def start_pipeline_run(
    name: str,
    config_yaml: str,
    tags: Mapping[str, str] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[str | None]:
    """Create the parent run of a pipeline and pass its id to the stages in `RAMEN_PARENT_RUN`.

    Args:
        name: of the run.
        config_yaml: the complete configuration, stored as config.yaml with credentials redacted.
        tags: of the run, in addition to the provenance.
        sections: the configuration's values, recorded as parameters (stages read from a cache do not record theirs).

    Yields:
        The run's id, or None when tracking is off.
    """
    if tracking_is_off():
        yield None
        return
    with Store.session() as store:
        run_id = store.create_run(name, None, provenance_tags() | {PIPELINE_TAG: "true"} | dict(tags or {}))
        with environment({PARENT_ENV: run_id}), store.end_with_body(run_id):
            tracker = MlflowTracker(store, run_id, None)
            tracker.params(flat_params(sections or {}))
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "config.yaml"
                file.write_text(redact(config_yaml), encoding="utf-8")
                tracker.artifact(file)
            yield run_id


def flat_params(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Section values by path: `section.key`, or `section.nested.key` for a nested section."""
    params: dict[str, Any] = {}
    for section, values in sections.items():
        for key, value in values.items():
            path = f"{section}.{key}"
            is_nested = isinstance(value, Mapping) and path not in MAPPING_KNOBS
            params |= flat_params({path: value}) if is_nested else {path: value}
    return params


def push_pending_writes(folder: Path | None = None) -> tuple[int, int]:
    """Send the writes that are pending in the journals of earlier runs.

    Args:
        folder: of the journals; None = `RAMEN_SPOOL`, by default .ramen/tracking.

    Returns:
        Number of writes sent, and of writes still pending because the store became unreachable again or a journal is
        damaged. Journals of running processes are skipped and not counted.

    Raises:
        RamenError: the store cannot be reached.
    """
    journals = find_journals(folder or journals_folder())
    if not journals:
        return 0, 0
    client = Store.connect().client
    sent = left = 0
    for path in journals:
        try:
            journal = Journal.reopen(client, path)
        except ArtifactError as error:  # the other journals can still be sent
            warn(error)
            left += 1
            continue
        if journal is None:
            report(f"{path}: skipped, because its run is still running and will send it")
            continue
        before = journal.pending
        journal.flush()
        journal.unlock()
        sent, left = sent + before - journal.pending, left + journal.pending
    return sent, left


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
    """Return the parent runs of pipelines, newest first.

    Raises:
        RamenError: the store does not exist or cannot be reached.
    """
    require_store()
    store = Store.connect()
    runs = store.client.search_runs(
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
        for run in runs
    ]


def read_run_files(run_id: str, folder: str) -> dict[str, str]:
    """Return the text files that a pipeline's run and its stages store under a folder.

    Args:
        run_id: parent run of a pipeline.
        folder: as passed to `Tracker.artifact`.

    Returns:
        File name -> content; of files with the same name, the one of the latest stage.

    Raises:
        RamenError: the store cannot be reached.
    """
    store = Store.connect(run_id)
    children = store.client.search_runs(
        [store.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'", order_by=["start_time ASC"]
    )
    contents: dict[str, str] = {}
    for run in [run_id, *(child.info.run_id for child in children)]:
        for entry in store.client.list_artifacts(run, folder):
            with tempfile.TemporaryDirectory() as scratch:
                file = store.client.download_artifacts(run, entry.path, scratch)
                contents[Path(entry.path).name] = Path(file).read_text(encoding="utf-8")
    return contents


class MlflowTracker:
    """Reports to an MLflow run by its id; MLflow's global active run is not used."""

    def __init__(self, store: Store, run_id: str, parent: str | None) -> None:
        self._store, self._write = store, store.journal.write
        self.run_id = run_id
        self._with_parent = [run_id, *([parent] if parent else [])]

    def params(self, values: Mapping[str, Any]) -> None:
        """Record parameters on this run, and on the parent those that it lacks, so that pipelines can be compared."""
        flat = {key: _cut(value) for key, value in values.items()}
        for run in self._with_parent:
            self._write("params", run, values=flat)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record finite values as metrics, others as tags `ramen.not_finite.*`: they break MLflow's charts."""
        self._log(self.run_id, metrics, step)

    def curve(self, metrics: Mapping[str, float], step: int) -> None:
        for run in self._with_parent:
            self._log(run, metrics, step)

    def headline(self, metrics: Mapping[str, float]) -> None:
        for run in self._with_parent:
            self._log(run, metrics, None)

    def _log(self, run: str, metrics: Mapping[str, float], step: int | None) -> None:
        now = int(time.time() * 1000)
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        if rest := {f"ramen.not_finite.{key.replace('/', '.')}": str(metrics[key]) for key in metrics.keys() - finite}:
            self._write("tags", run, values=rest)
        self._write("metrics", run, points=[[key, value, now, step or 0] for key, value in finite.items()])

    def tags(self, values: Mapping[str, str]) -> None:
        self._write("tags", self.run_id, values={key: str(value) for key, value in values.items()})

    def dataset(self, name: str, digest: str, source: str) -> None:
        # MLflow stores 36 characters of a digest
        self._write("dataset", self.run_id, name=name, digest=digest[:36], source=source)

    def artifact(self, path: Path, folder: str = "") -> None:
        self._write("artifact", self.run_id, file=path, folder=folder)

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
        run_id = self._store.create_run(name, self.run_id, provenance_tags() | dict(tags or {}))
        with self._store.end_with_body(run_id):
            yield MlflowTracker(self._store, run_id, self.run_id)


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= PARAM_LIMIT else text[: PARAM_LIMIT - 3] + "..."
