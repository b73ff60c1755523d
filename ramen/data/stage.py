"""Stage `ingest`: read a source, validate the problem, write the dataset."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ramen import config
from ramen.artifacts import Draft
from ramen.console import warn
from ramen.data import sources
from ramen.data.filters import apply_rule
from ramen.data.statistics import counts, headline, statistics
from ramen.data.subset import hide_labels
from ramen.data.validation import validate
from ramen.errors import DataError
from ramen.files import write_text
from ramen.tracking import Tracker


def ingest(*, dataset: Draft, data: config.DataConfig, track: Tracker) -> dict[str, float]:
    """Read `data.source`, validate, and write texts, matrices and the validation report.

    The report is `validation/index.html` inside the dataset; the tracker gets it too, also when the data are broken.

    Returns:
        Flat counts; see `statistics.headline`.

    Raises:
        DataError: the raw data are missing or broken; one line per defect.
    """
    problem = sources.read(data)
    if data.unseen_labels:
        problem = hide_labels(problem, data.unseen_labels, seed=data.seed)
    track.dataset("raw", sources.fingerprint(data), data.path)
    folder = dataset.path / "validation"
    report = validate(problem, folder)
    track.tags({"validation": "failed" if report.critical else "warnings" if report.warnings else "passed"})
    if report.critical:
        track.artifact(folder, "validation")  # `run_stage` stores that of a finished stage
        raise DataError(*report.critical)
    for warning in report.warnings:
        warn(warning)
    if not problem.anchor_sets:
        warn(f"{data.path}: no anchor sets, so there are no graphs to train with")
    problem, filtered = apply_rule(problem, data.filter_self)
    print(f"filtered pairs: {filtered}", file=sys.stderr, flush=True)
    facts = statistics(problem) | {"filtered_pairs": asdict(filtered)}
    write_text(folder / "statistics.json", json.dumps(facts, indent=1, sort_keys=True) + "\n")
    problem.write(dataset.path)
    dataset.counts.update(counts(problem) | {"filtered_pairs": asdict(filtered)})
    found = {key: float(value) for key, value in asdict(filtered).items() if key != "identity"}
    return headline(problem) | {f"filtered/{key}": value for key, value in found.items()}
