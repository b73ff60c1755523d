"""Comparison of pipeline runs: gains with standard errors, and the parameters that differ."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramen.evaluation.uncertainty import PerDocument
    from ramen.tracking import PipelineRun, RunEvaluation

DIGEST_LENGTH = 36
"""Characters of a dataset's digest that the tracking store keeps."""


@dataclass(frozen=True)
class Comparison:
    """The gain of one run over another.

    Attributes:
        run, over: run ids.
        points: metric -> gain; empty if the runs were not evaluated on the same dataset.
        errors: metric -> standard error of the gain; empty if either run stored no per-document results.
        note: why there is no gain or no standard error; empty otherwise.
    """

    run: str
    over: str
    points: dict[str, float]
    errors: dict[str, float]
    note: str = ""


def select_pairs(chosen: Sequence[PipelineRun], first: int) -> list[tuple[PipelineRun, PipelineRun]]:
    """Return the (run, reference) pairs to compare.

    Args:
        chosen: the listed runs.
        first: number of runs in `chosen` that match the first name on the command line, newest first. Further runs are
            compared with the newest of these; without further runs, the newest is compared with the one before it. Runs
            without metrics are ignored.
    """
    references, others = ([run for run in runs if run.metrics] for runs in (chosen[:first], chosen[first:]))
    if first < len(chosen):
        return [(run, references[0]) for run in others] if references else []
    return [(references[0], references[1])] if len(references) > 1 else []


def compare_runs(wanted: Sequence[tuple[PipelineRun, PipelineRun]]) -> list[Comparison]:
    """Return the gain of each run over its reference.

    Args:
        wanted: (run, reference) pairs.

    Raises:
        RamenError: the tracking store cannot be reached.
    """
    from ramen.evaluation.uncertainty import PER_DOCUMENT, PerDocument
    from ramen.tracking import fetch_evaluations

    with tempfile.TemporaryDirectory() as scratch:
        run_ids = dict.fromkeys(run.run_id for pair in wanted for run in pair)
        evaluations = fetch_evaluations(run_ids, PER_DOCUMENT, Path(scratch))
        documents = {
            run_id: PerDocument.read(evaluation.file) for run_id, evaluation in evaluations.items() if evaluation.file
        }
    datasets = {
        run_id: _dataset_digest(evaluation, documents.get(run_id)) for run_id, evaluation in evaluations.items()
    }
    return [_compare(run, over, datasets, documents) for run, over in wanted]


def _dataset_digest(evaluation: RunEvaluation, documents: PerDocument | None) -> str | None:
    """Return the digest of the run's dataset; cached stages do not always record their inputs."""
    if evaluation.dataset is None and documents is not None:
        return str(documents.notes["dataset"])[:DIGEST_LENGTH]
    return evaluation.dataset


def _compare(
    run: PipelineRun,
    over: PipelineRun,
    datasets: Mapping[str, str | None],
    documents: Mapping[str, PerDocument],
) -> Comparison:
    from ramen.evaluation.uncertainty import paired_gains

    ids = run.run_id, over.run_id
    for side in (run, over):
        if datasets.get(side.run_id) is None:
            return Comparison(*ids, {}, {}, f"no gain: the dataset that {run_label(side)} was evaluated on is unknown")
    if datasets[run.run_id] != datasets[over.run_id]:
        return Comparison(
            *ids, {}, {}, f"no gain: {run_label(run)} and {run_label(over)} were evaluated on different datasets"
        )
    missing = [run_label(side) for side in (run, over) if side.run_id not in documents]
    if missing:
        points = {
            key: run.metrics[key] - over.metrics[key]
            for key in run.metrics
            if key in over.metrics and _is_comparable(key, run, over)
        }
        note = f"no standard errors: {' and '.join(missing)} stored no per-document results"
        return Comparison(*ids, points, {}, note)
    gains = paired_gains(documents[run.run_id], documents[over.run_id])
    errors = {key: gain.error for key, gain in gains.items() if gain.error is not None}
    note = "" if errors else "no standard errors: the test documents form fewer than two groups"
    return Comparison(*ids, {key: gain.points for key, gain in gains.items()}, errors, note)


def _is_comparable(key: str, run: PipelineRun, over: PipelineRun) -> bool:
    """Return whether a metric measures accuracy and was computed with the same propensities in both runs."""
    if "_at_" not in key or key.startswith(("gain/", "gain_se/")):
        return False
    names = ("scoring.propensity_a", "scoring.propensity_b")
    same = all(run.params.get(name) == over.params.get(name) for name in names)
    return same or not key.rpartition("/")[2].startswith("ps")


def run_label(run: PipelineRun) -> str:
    """Return a run's name and short id."""
    return f"{run.name} {run.run_id[:8]}"


def differing_parameters(runs: Sequence[PipelineRun]) -> list[list[str]]:
    """Return rows `name, value of each run` of the parameters in which the runs differ, sorted by name."""
    names = sorted({name for run in runs for name in run.params})
    values = [[name, *(run.params.get(name, "-") for run in runs)] for name in names]
    return [row for row in values if len(set(row[1:])) > 1]
