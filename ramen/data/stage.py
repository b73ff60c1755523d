"""Stage `ingest`: read a source, validate the data, write the dataset."""

from __future__ import annotations

import json
from dataclasses import asdict

from ramen import config
from ramen.artifacts import Draft
from ramen.console import report, warn
from ramen.data import sources
from ramen.data.filters import apply_filter_rule
from ramen.data.statistics import compute_statistics, count_items, summary_metrics
from ramen.data.subset import hide_labels
from ramen.data.validation import validate
from ramen.errors import DataError
from ramen.files import write_text
from ramen.tracking import Tracker


def ingest(*, dataset: Draft, data: config.DataConfig, track: Tracker) -> dict[str, float]:
    """Read `data.source`, validate, and write texts, matrices and the validation report.

    The report is `validation/index.html` inside the dataset. The tracker gets a copy even if the validation fails.

    Returns:
        Flat counts; see `statistics.summary_metrics`.

    Raises:
        DataError: the raw data is missing or broken; one line per defect.
    """
    loaded = sources.read(data)
    if data.unseen_labels:
        loaded = hide_labels(loaded, data.unseen_labels, seed=data.seed)
    track.dataset("raw", sources.fingerprint(data), data.path)
    folder = dataset.path / "validation"
    validation = validate(loaded, folder)
    track.tags({"validation": "failed" if validation.critical else "warnings" if validation.warnings else "passed"})
    if validation.critical:
        track.artifact(folder, "validation")  # `run_stage` only stores the report of a finished stage
        raise DataError(*validation.critical)
    for warning in validation.warnings:
        warn(warning)
    if not loaded.anchor_sets:
        warn(f"{data.path}: no anchor sets, so there are no graphs to train with")
    loaded, filtered = apply_filter_rule(loaded, data.filter_self)
    report(f"filtered pairs: {filtered}")
    filter_counts = asdict(filtered)
    facts = compute_statistics(loaded) | {"filtered_pairs": filter_counts}
    write_text(folder / "statistics.json", json.dumps(facts, indent=1, sort_keys=True) + "\n")
    loaded.write(dataset.path)
    dataset.counts.update(count_items(loaded) | {"filtered_pairs": filter_counts})
    metrics = {f"filtered/{key}": float(value) for key, value in filter_counts.items() if key != "identity"}
    return summary_metrics(loaded) | metrics
