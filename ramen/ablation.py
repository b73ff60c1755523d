"""Rows of a study run over seeds, each stage's result kept by content, so that nothing is computed twice.

A stage's result is filed under a key of the sections it sees, the digests of what it reads, and the code it runs. Rows
that differ in their objective share dataset and graph; a row that was stopped goes on where it was; a second run of the
same study reads everything from disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramen.artifacts import open_artifact, write_json
from ramen.config import Config
from ramen.errors import ArtifactError
from ramen.stages import STAGES, run_stage
from ramen.tracking import open_tracker, record_cached

CHAIN = ("ingest", "build-graph", "warmup", "prune-retrain", "evaluate")
"""Stages of a row: nothing is published."""
TRAINING = ("warmup", "prune-retrain")
"""Stages whose time is reported as a row's cost."""


@dataclass(frozen=True)
class Outcome:
    """One row under one seed: metrics in percent, seconds of training, and where the evaluation lies."""

    metrics: dict[str, float]
    seconds: float
    evaluation: Path


def run_row(config: Config, cache: Path) -> Outcome:
    """Run the stages of a row, or take their results from the cache.

    Args:
        config: the row's configuration.
        cache: folder of results, shared by all rows and studies.
    """
    made: dict[str, Path] = {}
    seconds = 0.0
    for name in CHAIN:
        folder, metrics, took = _stage(name, config, made, cache)
        made |= {artifact: folder / artifact for artifact in STAGES[name].writes}
        if name in TRAINING:
            seconds += took
        if name == "evaluate":
            return Outcome(metrics, seconds, folder / "evaluation")
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
    text = json.dumps([name, stage.code_version(), sections, digests], sort_keys=True)
    folder = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    receipt = folder / "metrics.json"
    if receipt.is_file():
        try:
            for artifact in stage.writes:
                open_artifact(folder / artifact, artifact)
            kept = json.loads(receipt.read_text(encoding="utf-8"))
            record_cached(name, kept["metrics"])
            return folder, kept["metrics"], kept["seconds"]
        except ArtifactError:
            shutil.rmtree(folder)  # damaged: computed again
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {artifact: folder / artifact for artifact in stage.writes}
    start = time.monotonic()
    with open_tracker(name) as track:
        metrics = run_stage(name, sections=sections, inputs=inputs, outputs=outputs, track=track)
    took = time.monotonic() - start
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
    write_json(receipt, {"metrics": metrics, "seconds": took})
    return folder, metrics, took


@dataclass(frozen=True)
class Summary:
    """A row over its seeds.

    Attributes:
        mean, deviation: metric -> over seeds; deviation is the sample's, 0 for one seed.
        gain, gain_deviation: metric -> difference to the row it is compared with, seed by seed; empty without one.
        seconds: mean training time.
    """

    mean: dict[str, float]
    deviation: dict[str, float]
    gain: dict[str, float]
    gain_deviation: dict[str, float]
    seconds: float


def summarise(outcomes: Sequence[Outcome], against: Sequence[Outcome] | None, keys: Sequence[str]) -> Summary:
    """Mean and deviation of the metrics `keys`; gains are paired by seed, which takes out what the seeds share."""

    def table(rows: Sequence[Outcome]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return np.array([[outcome.metrics.get(key, math.nan) for key in keys] for outcome in rows])

    def pair(values: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[dict[str, float], dict[str, float]]:
        spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(keys))
        return (
            dict(zip(keys, values.mean(0).tolist(), strict=True)),
            dict(zip(keys, spread.tolist(), strict=True)),
        )

    mean, deviation = pair(table(outcomes))
    gain, gain_deviation = pair(table(outcomes) - table(against)) if against else ({}, {})
    seconds = float(np.mean([outcome.seconds for outcome in outcomes]))
    return Summary(mean, deviation, gain, gain_deviation, seconds)
