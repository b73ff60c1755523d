"""The body of every component: track the run, run the stage, and write KFP's metrics and report."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from components.resources import MLFLOW_SECRET, NAMESPACE_ENV
from components.trainjob import node_count, run_job
from ramen.artifacts import open_artifact
from ramen.config import DataConfig, parse_section
from ramen.console import warn
from ramen.data import sources
from ramen.dvc_pointers import push_outputs
from ramen.errors import Interrupted, RamenError, error_lines
from ramen.files import describe_io_error, write_json
from ramen.stages import STAGES, run_stage
from ramen.tracking import TRACKING_ENV, open_tracker, tracking_is_off

EXIT_LINE = "exit code {}"
"""Last line of a failed step, because KFP's local runner does not report the exit code."""
REPORTS = {"ingest": "validation/index.html", "evaluate": "report.html"}
"""Stage -> page of its first artifact, which the KFP UI shows."""


def run_step(
    stage: str, sections: Mapping[str, Any], artifacts: Mapping[str, Any], scalars: Any, report: Any = None
) -> None:
    """Run a stage in a pod or a local KFP task.

    Args:
        stage: name in the stage table.
        sections: section name -> values.
        artifacts: artifact name -> KFP artifact, inputs and outputs.
        scalars: KFP `Metrics` artifact that receives the metrics.
        report: KFP `HTML` artifact, for the stages in `REPORTS`.

    Raises:
        SystemExit: after an error of input, configuration or disk, printed as lines; with the error's exit code.
    """
    table = STAGES[stage]
    paths = {name: Path(artifact.path) for name, artifact in artifacts.items()}
    try:
        if "data" in sections:
            sources.fetch_if_missing(cast(DataConfig, parse_section("data", sections["data"])))
        _disable_tracking_without_store()
        with open_tracker(stage) as track:
            run = run_job if table.parallel and node_count() > 1 else run_stage
            metrics = run(
                stage,
                sections=sections,
                inputs={name: paths[name] for name in table.reads},
                outputs={name: paths[name] for name in table.writes},
                track=track,
            )
            push_outputs({name: paths[name] for name in table.writes}, track)
    except (RamenError, Interrupted, OSError) as error:
        known = RamenError(describe_io_error(error)) if isinstance(error, OSError) else error
        if not str(known):
            raise
        lines = [*error_lines(str(known)), EXIT_LINE.format(known.exit_code)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        raise SystemExit(known.exit_code) from None
    metrics = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    for name, value in metrics.items():
        scalars.log_metric(name, value)
    # the local runner treats a cached task as a miss unless every output has a file at its path
    write_json(Path(scalars.path), metrics)
    for name in table.writes:
        artifacts[name].metadata["digest"] = open_artifact(paths[name], name).digest
    if report is not None:
        Path(report.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths[table.writes[0]] / REPORTS[stage], report.path)


def _disable_tracking_without_store() -> None:
    """Turn tracking off in a pod without MLflow's address: a local database would be lost with the pod."""
    if os.environ.get(NAMESPACE_ENV) and not os.environ.get("MLFLOW_TRACKING_URI") and not tracking_is_off():
        os.environ[TRACKING_ENV] = "off"
        warn(
            f"this pod has no MLFLOW_TRACKING_URI (secret {MLFLOW_SECRET}), so tracking is off; publish-index fails "
            "unless index.model is empty"
        )
