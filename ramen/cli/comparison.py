"""Gains between pipeline runs, and the parameters in which runs differ."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ramen.cli import tables

if TYPE_CHECKING:
    from ramen.evaluation.uncertainty import PerDocument
    from ramen.tracking import Evaluated, PipelineRun

DIGEST = 36
"""Characters of a digest that the tracking store keeps."""


@dataclass(frozen=True)
class Comparison:
    """The gain of one run over another.

    Attributes:
        run, over: ids.
        points: metric -> gain; empty if the runs were not evaluated on the same dataset.
        errors: metric -> standard error of the gain; empty if either run stored no per-document results.
        note: why there is no gain or no error; empty otherwise.
    """

    run: str
    over: str
    points: dict[str, float]
    errors: dict[str, float]
    note: str = ""


def pairs(chosen: Sequence[PipelineRun], first: int) -> list[tuple[PipelineRun, PipelineRun]]:
    """Return (run, reference) pairs to compare.

    Args:
        chosen: the runs listed.
        first: how many of `chosen` the first name on the command line matches, newest first. If others follow, they are
            compared with the newest of these; otherwise the newest run is compared with the one before it. Runs without
            metrics are passed over.
    """
    named, others = ([run for run in runs if run.metrics] for runs in (chosen[:first], chosen[first:]))
    if first < len(chosen):
        return [(run, named[0]) for run in others] if named else []
    return [(named[0], named[1])] if len(named) > 1 else []


def compare_runs(wanted: Sequence[tuple[PipelineRun, PipelineRun]]) -> list[Comparison]:
    """Return the gain of each run over its reference.

    Raises:
        RamenError: the tracking store cannot be reached.
    """
    from ramen.evaluation.uncertainty import PER_DOCUMENT, PerDocument
    from ramen.tracking import fetch_evaluations

    with tempfile.TemporaryDirectory() as scratch:
        ids = dict.fromkeys(run.run_id for pair in wanted for run in pair)
        found = fetch_evaluations(ids, PER_DOCUMENT, Path(scratch))
        documents = {run_id: PerDocument.read(each.file) for run_id, each in found.items() if each.file}
    datasets = {run_id: _dataset(each, documents.get(run_id)) for run_id, each in found.items()}
    return [_compare(run, over, datasets, documents) for run, over in wanted]


def _dataset(evaluated: Evaluated, documents: PerDocument | None) -> str | None:
    """Digest of the dataset that a run was evaluated on; the inputs of a cached stage are not always recorded."""
    if evaluated.dataset is None and documents is not None:
        return str(documents.notes["dataset"])[:DIGEST]
    return evaluated.dataset


def _compare(
    run: PipelineRun,
    over: PipelineRun,
    datasets: Mapping[str, str | None],
    documents: Mapping[str, PerDocument],
) -> Comparison:
    from ramen.evaluation.uncertainty import gains

    ids = run.run_id, over.run_id
    for each in (run, over):
        if datasets.get(each.run_id) is None:
            return Comparison(*ids, {}, {}, f"no gain: the dataset that {label(each)} was evaluated on is unknown")
    if datasets[run.run_id] != datasets[over.run_id]:
        return Comparison(*ids, {}, {}, f"no gain: {label(run)} and {label(over)} were evaluated on different datasets")
    missing = [label(each) for each in (run, over) if each.run_id not in documents]
    if missing:
        points = {
            key: run.metrics[key] - over.metrics[key]
            for key in run.metrics
            if key in over.metrics and _comparable(key, run, over)
        }
        return Comparison(
            *ids, points, {}, f"no standard errors: {' and '.join(missing)} stored no per-document results"
        )
    found = gains(documents[run.run_id], documents[over.run_id])
    errors = {key: gain.error for key, gain in found.items() if gain.error is not None}
    note = "" if errors else "no standard errors: the test documents are fewer than two groups"
    return Comparison(*ids, {key: gain.points for key, gain in found.items()}, errors, note)


def _comparable(key: str, run: PipelineRun, over: PipelineRun) -> bool:
    """Whether a metric is one of accuracy, computed with the same propensities in both runs."""
    if "_at_" not in key or key.startswith(("gain/", "gain_se/")):
        return False
    names = ("scoring.propensity_a", "scoring.propensity_b")
    same = all(run.params.get(name) == over.params.get(name) for name in names)
    return same or not key.rpartition("/")[2].startswith("ps")


def label(run: PipelineRun) -> str:
    """Name and short id of a run."""
    return f"{run.name} {run.run_id[:8]}"


def rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Rows `gain, run, over, ...` and `s.e.` under the columns of `ramen compare`."""
    out = []
    for each in (each for each in comparisons if each.points):
        points, errors = ([found.get(key) for key in tables.COLUMNS.values()] for found in (each.points, each.errors))
        out.append(["gain", each.run[:8], f"over {each.over[:8]}", "", *tables.gain_cells(points, errors)])
        if each.errors:
            out.append(["s.e.", "", "", "", *tables.error_cells(errors)])
    return out


def differing_parameters(runs: Sequence[PipelineRun]) -> list[list[str]]:
    """Rows `name, value of each run` of the parameters in which the runs differ, by name."""
    names = sorted({name for run in runs for name in run.params})
    values = [[name, *(run.params.get(name, "-") for run in runs)] for name in names]
    return [row for row in values if len(set(row[1:])) > 1]
