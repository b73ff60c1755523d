"""What every component does: open the run's tracker, run the stage, file scalars and the HTML report."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.trainjob import nodes, run_job
from ramen.artifacts import open_artifact, write_json
from ramen.errors import RamenError
from ramen.stages import STAGES, run_stage
from ramen.tracking import open_tracker
from ramen.versioning import push_outputs

EXIT_LINE = "exit code {}"
"""Last words of a failed step: KFP's local runner keeps the exit code to itself."""
REPORTS = {"ingest": "validation/index.html", "evaluate": "report.html"}
"""Stage -> page of its first artifact that the KFP UI shows."""


def run_step(
    stage: str, sections: Mapping[str, Any], artifacts: Mapping[str, Any], scalars: Any, report: Any = None
) -> None:
    """Run a stage inside a pod or a local KFP task.

    Args:
        stage: name in the stage table.
        sections: section name -> values.
        artifacts: artifact name -> KFP artifact, read and written ones alike.
        scalars: KFP `Metrics` artifact.
        report: KFP `HTML` artifact, for the stages in `REPORTS`.

    Raises:
        SystemExit: a user's mistake, printed as one line; the exit code is the error's.
    """
    table = STAGES[stage]
    paths = {name: Path(artifact.path) for name, artifact in artifacts.items()}
    try:
        with open_tracker(stage) as track:
            run = run_job if table.parallel and nodes() > 1 else run_stage
            metrics = run(
                stage,
                sections=sections,
                inputs={name: paths[name] for name in table.reads},
                outputs={name: paths[name] for name in table.writes},
                track=track,
            )
            push_outputs({name: paths[name] for name in table.writes}, track)
    except RamenError as error:
        said = [*(f"error: {line}" for line in str(error).splitlines()), EXIT_LINE.format(error.exit_code)]
        print("\n".join(said), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    for name, value in metrics.items():
        if math.isfinite(value):
            scalars.log_metric(name, float(value))
    # a file at every output's path: the local runner takes a cached task whose output has none for a miss
    write_json(Path(scalars.path), metrics)
    for name in table.writes:
        artifacts[name].metadata["digest"] = open_artifact(paths[name], name).digest
    if report is not None:
        Path(report.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(paths[table.writes[0]] / REPORTS[stage], report.path)
