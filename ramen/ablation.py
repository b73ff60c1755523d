"""Rows of a study run over seeds, each stage's result kept by content, so that nothing is computed twice.

A stage's result is filed under a key of the sections it sees, the digests of what it reads (for the first, the raw
data), and the code it runs. Rows that differ in their objective share dataset and graph; a row that was stopped goes on
where it was; a second run of the same study reads everything from disk.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramen.artifacts import open_artifact, write_json
from ramen.config import Config
from ramen.data.dataset import Problem
from ramen.errors import ArtifactError, Interrupted, StateRemoved
from ramen.evaluation.metrics import ENCODER, by_document, inverse_propensity
from ramen.evaluation.predictions import ENCODER_PREDICTIONS, PREDICTIONS, read_labels
from ramen.evaluation.quantiles import MISSED_DEPTHS, head_torso_tail
from ramen.stages import STAGES, record_cached, run_stage
from ramen.tracking import open_tracker

CHAIN = ("ingest", "build-graph", "warmup", "prune-retrain", "evaluate")
"""Stages of a row: nothing is published."""
TRAINING = ("warmup", "prune-retrain")
"""Stages whose time is reported as a row's cost."""


@dataclass(frozen=True)
class Outcome:
    """One row under one seed: metrics in percent, seconds of training, and where evaluation and dataset lie."""

    metrics: dict[str, float]
    seconds: float
    evaluation: Path
    dataset: Path


def run_row(config: Config, cache: Path) -> Outcome:
    """Run the stages of a row, or take their results from the cache.

    Args:
        config: the row's configuration.
        cache: folder of results, shared by all rows and studies.
    """
    made: dict[str, Path] = {}
    seconds = 0.0
    for name in CHAIN:
        try:
            folder, metrics, took = _stage(name, config, made, cache)
        except StateRemoved:
            shutil.rmtree(made["warm_model"].parent)
            _stage("warmup", config, made, cache)
            folder, metrics, took = _stage(name, config, made, cache)
        made |= {artifact: folder / artifact for artifact in STAGES[name].writes}
        if name in TRAINING:
            seconds += took
        if name == "evaluate":
            return Outcome(metrics, seconds, folder / "evaluation", made["dataset"])
    raise AssertionError("the chain ends with evaluate")


def prepare(config: Config, cache: Path) -> Path:
    """Run the first stage alone: the dataset, which tells the anchor sets."""
    return _stage("ingest", config, {}, cache)[0] / "dataset"


def _stage(name: str, config: Config, made: Mapping[str, Path], cache: Path) -> tuple[Path, dict[str, float], float]:
    """One stage: where its artifacts lie, its metrics, and the seconds it took when it was computed."""
    stage = STAGES[name]
    sections = config.sections(stage.sections)
    inputs = {artifact: made[artifact] for artifact in stage.reads}
    digests = {artifact: open_artifact(path, artifact).digest for artifact, path in inputs.items()}
    text = json.dumps([name, stage.cache_version(config), sections, digests], sort_keys=True)
    folder = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    receipt = folder / "metrics.json"
    if receipt.is_file():
        try:
            for artifact in stage.writes:
                open_artifact(folder / artifact, artifact)
            kept = json.loads(receipt.read_text(encoding="utf-8"))
            record_cached(name, kept["metrics"], {artifact: folder / artifact for artifact in stage.writes})
            return folder, kept["metrics"], kept["seconds"]
        except ArtifactError:
            shutil.rmtree(folder)  # damaged: computed again
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {artifact: folder / artifact for artifact in stage.writes}
    with _timed(folder / "seconds.json") as spent, open_tracker(name) as track:
        metrics = run_stage(name, sections=sections, inputs=inputs, outputs=outputs, track=track)
    took = spent()
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
    write_json(receipt, {"metrics": metrics, "seconds": took})
    return folder, metrics, took


@contextmanager
def _timed(file: Path) -> Iterator[Callable[[], float]]:
    """Seconds since the stage began, those before it was stopped on request included; they stand in `file` meanwhile.

    What an attempt did that was killed outright, or failed, is not known, and not counted.
    """
    before = float(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else 0.0
    start = time.monotonic()

    def spent() -> float:
        return before + time.monotonic() - start

    try:
        yield spent
    except Interrupted:
        write_json(file, spent())
        raise
    file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Summary:
    """A row over its seeds.

    Attributes:
        mean, deviation: metric -> over seeds; deviation is the sample's, NaN for one seed.
        gain, gain_deviation: metric -> difference to the row it is compared with, seed by seed; empty without one.
        gain_error: metric -> standard error of the gain over the test documents, of those that `by_document` knows. A
            deviation over seeds does not see that other documents would have been drawn.
        missed: bin of labels -> depth -> difference of the missed share (R-ICLR table 8; less is better).
        seconds: mean training time.
    """

    mean: dict[str, float]
    deviation: dict[str, float]
    gain: dict[str, float]
    gain_deviation: dict[str, float]
    gain_error: dict[str, float]
    missed: dict[str, dict[int, float]]
    seconds: float


def summarise(outcomes: Sequence[Outcome], against: Sequence[Outcome] | None, keys: Sequence[str]) -> Summary:
    """Mean and deviation of the metrics `keys`; gains are paired by seed, which takes out what the seeds share.

    A row that ranks by its encoder alone is its own `encoder/` row.
    """

    def value(metrics: Mapping[str, float], key: str) -> float:
        more = any(name.startswith(ENCODER) for name in metrics)  # than an encoder: then what is not there is unknown
        return metrics.get(key if more else key.removeprefix(ENCODER), math.nan)

    def table(rows: Sequence[Outcome]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[value(outcome.metrics, key) for key in keys] for outcome in rows])

    def pair(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[dict[str, float], dict[str, float]]:
        spread = values.std(0, ddof=1) if len(values) > 1 else np.full(len(keys), math.nan)
        return (
            dict(zip(keys, values.mean(0).tolist(), strict=True)),
            dict(zip(keys, spread.tolist(), strict=True)),
        )

    mean, deviation = pair(table(outcomes))
    gain, gain_deviation = pair(table(outcomes) - table(against)) if against else ({}, {})
    seconds = float(np.mean([outcome.seconds for outcome in outcomes]))
    error = _error(outcomes, against) if against else {}
    missed = _missed(outcomes, against) if against else {}
    return Summary(mean, deviation, gain, gain_deviation, error, missed, seconds)


def _error(outcomes: Sequence[Outcome], against: Sequence[Outcome]) -> dict[str, float]:
    """Standard error over the test documents of the mean difference; nothing of other data, or of a single document."""
    if any(ours.dataset != theirs.dataset for ours, theirs in zip(outcomes, against, strict=True)):
        return {}
    pairs = [
        (_by_document(ours.dataset, ours.evaluation), _by_document(theirs.dataset, theirs.evaluation))
        for ours, theirs in zip(outcomes, against, strict=True)
    ]
    if any(len(values) < 2 for values in pairs[0][0].values()):
        return {}
    return {
        key: float(np.mean([ours[key] - theirs[key] for ours, theirs in pairs], axis=0).std(ddof=1))
        / math.sqrt(len(pairs[0][0][key]))
        for key in pairs[0][0]
    }


@functools.lru_cache(maxsize=64)  # the table is written anew after every seed, and a base stands beside several rows
def _by_document(dataset: Path, evaluation: Path) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """What each test document adds to a row's metrics, `encoder/` ones too, read from its predictions."""
    problem = Problem.read(dataset)
    propensity = json.loads((evaluation / "propensity.json").read_text(encoding="utf-8"))
    inv_p = inverse_propensity(problem.y_train, propensity["a"], propensity["b"])
    frequency = np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64)
    thirds = head_torso_tail(frequency)

    def measured(name: str) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        return by_document(read_labels(evaluation / name, problem), problem.y_test, inv_p, thirds)

    whole = measured(PREDICTIONS)
    alone = measured(ENCODER_PREDICTIONS) if (evaluation / ENCODER_PREDICTIONS).is_file() else whole
    return whole | {f"{ENCODER}{key}": values for key, values in alone.items()}


def _missed(outcomes: Sequence[Outcome], against: Sequence[Outcome]) -> dict[str, dict[int, float]]:
    """Differences of `label_fn_at_k` by bin, mean over seeds, and their sum over the bins as "complete"."""
    sums: dict[str, dict[int, float]] = {}
    for ours, theirs in zip(map(_bins, outcomes), map(_bins, against), strict=True):
        for name in (name for name in ours if name in theirs):
            for k in MISSED_DEPTHS:
                column = f"label_fn_at_{k}"
                if ours[name].get(column) and theirs[name].get(column):
                    difference = (float(ours[name][column]) - float(theirs[name][column])) / len(outcomes)
                    for place in (f"{name} ({ours[name]['labels']} labels)", "complete"):
                        sums.setdefault(place, {}).setdefault(k, 0.0)
                        sums[place][k] += difference
    return dict(sorted(sums.items(), key=lambda item: item[0] == "complete"))


def _bins(outcome: Outcome) -> dict[str, dict[str, str]]:
    with (outcome.evaluation / "quantiles.csv").open(encoding="utf-8", newline="") as stream:
        return {row["bin"]: row for row in csv.DictReader(stream)}
