"""Read the evaluations of pipeline runs from MLflow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramen.tracking.retries import environment_defaults
from ramen.tracking.store import Store


@dataclass(frozen=True)
class RunEvaluation:
    """The evaluation of one pipeline run.

    Attributes:
        dataset: digest of the dataset artifact, as MLflow stores it (36 characters); None = not recorded.
        file: local copy of the requested file; None = the evaluation did not store it.
    """

    dataset: str | None
    file: Path | None


def fetch_evaluations(run_ids: Iterable[str], name: str, folder: Path) -> dict[str, RunEvaluation]:
    """Read the last `evaluate` stage of some pipeline runs: its dataset, and one of its files.

    Args:
        run_ids: parent runs of pipelines.
        name: of the file, as passed to `Tracker.artifact`.
        folder: receives the downloaded files.

    Returns:
        Run id -> its evaluation, without the runs that have none.

    Raises:
        RamenError: the store cannot be reached.
    """
    store = Store.connect()
    evaluations = {}
    for run_id in run_ids:
        query = f"tags.`mlflow.parentRunId` = '{run_id}' and tags.`ramen.stage` = 'evaluate'"
        stages = store.client.search_runs(
            [store.experiment_id], query, order_by=["attributes.start_time DESC"], max_results=1
        )
        if stages:
            target = folder / run_id
            target.mkdir()
            file = _download(store.client, stages[0].info.run_id, name, target)
            evaluations[run_id] = RunEvaluation(_dataset_digest(stages[0]), file)
    return evaluations


def _dataset_digest(run: Any) -> str | None:
    digests = [used.dataset.digest for used in run.inputs.dataset_inputs if used.dataset.name == "dataset"]
    return digests[0] if digests else None


def _download(client: Any, run_id: str, name: str, folder: Path) -> Path | None:
    if not any(entry.path == name for entry in client.list_artifacts(run_id)):
        return None
    with environment_defaults({"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}):
        return Path(client.download_artifacts(run_id, name, str(folder)))
