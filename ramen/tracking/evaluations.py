"""What MLflow holds of the evaluations of pipeline runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramen.tracking.journal import environment_defaults
from ramen.tracking.runs import Store

QUIET = {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of one pipeline run.

    Attributes:
        dataset: digest of the dataset artifact, as the store keeps it (36 characters); None = not recorded.
        file: a local copy of the file asked for; None = the evaluation stored none.
    """

    dataset: str | None
    file: Path | None


def fetch_evaluations(run_ids: Iterable[str], name: str, folder: Path) -> dict[str, Evaluated]:
    """Read the dataset and download a file of the last `evaluate` stage of some pipeline runs.

    Args:
        run_ids: parent runs of pipelines.
        name: of the file, as given to `Tracker.artifact`.
        folder: where the copies go.

    Returns:
        Run id -> its evaluation; runs that did not evaluate are left out.

    Raises:
        RamenError: the store cannot be reached.
    """
    store = Store.connect()
    found = {}
    for run_id in run_ids:
        query = f"tags.`mlflow.parentRunId` = '{run_id}' and tags.`ramen.stage` = 'evaluate'"
        stages = store.client.search_runs(
            [store.experiment_id], query, order_by=["attributes.start_time DESC"], max_results=1
        )
        if stages:
            place = folder / run_id
            place.mkdir()
            found[run_id] = Evaluated(_dataset(stages[0]), _download(store.client, stages[0].info.run_id, name, place))
    return found


def _dataset(run: Any) -> str | None:
    digests = [used.dataset.digest for used in run.inputs.dataset_inputs if used.dataset.name == "dataset"]
    return digests[0] if digests else None


def _download(client: Any, run_id: str, name: str, folder: Path) -> Path | None:
    if not any(entry.path == name for entry in client.list_artifacts(run_id)):
        return None
    with environment_defaults(QUIET):
        return Path(client.download_artifacts(run_id, name, str(folder)))
