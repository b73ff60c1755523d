"""Rows of a study run over seeds, each stage's result kept by content, so that nothing is computed twice.

A stage's result is filed under a key of the sections it sees, the digests of what it reads (for the first, the raw
data), and the code it runs. Rows that differ in their objective share dataset and graph; a row that was stopped goes on
where it was; a second run of the same study reads everything from disk.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gc
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from ramen.artifacts import drafts, open_artifact
from ramen.config import Config
from ramen.console import warn
from ramen.data.dataset import Dataset
from ramen.errors import ArtifactError, ConfigError, Interrupted, StateRemoved
from ramen.evaluation.metrics import ENCODER
from ramen.evaluation.per_document import from_evaluation
from ramen.evaluation.predictions import ENCODER_PREDICTIONS
from ramen.evaluation.quantiles import MISSED_DEPTHS
from ramen.evaluation.uncertainty import PerDocument, standard_error
from ramen.files import checked, read_json, reading, write_json
from ramen.peers import PEERS, Task
from ramen.signals import on_interrupt
from ramen.stages import STAGES, record_cached, run_stage
from ramen.tracking import open_tracker
from ramen.workdir import stage_key

CHAIN = ("ingest", "build-graph", "warmup", "prune-retrain", "evaluate")
"""Stages of a row: nothing is published."""
TRAINING = ("warmup", "prune-retrain")
"""Stages whose time is reported as a row's cost."""
RECEIPT = "metrics.json"
"""Written last into the folder of a result: its metrics, and the seconds that it took."""
PEER_CODE = (
    "data/dataset.py",
    "data/filters.py",
    "data/sparse.py",
    "encoder",
    "evaluation",
    "peers",
    "retrieval.py",
    "training/setup.py",
)
"""Code that a peer's result depends on."""


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
    config = config.model_copy(update={"scoring": config.scoring.model_copy(update={"peers": []})})  # rows of their own
    made: dict[str, Path] = {}
    seconds = 0.0
    for name in CHAIN:
        try:
            folder, metrics, took = _stage(name, config, made, cache)
        except StateRemoved:
            (made["warm_model"].parent / RECEIPT).unlink()  # not finished any more: it is computed again
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


def run_peer(name: str, config: Config, cache: Path, seconds: float = 0.0) -> Outcome:
    """Train and evaluate a peer on the row's dataset, or take its result from the cache.

    Args:
        name: a key of `ramen.peers.PEERS`.
        config: the row's configuration; a result is kept under the sections that the peer reads.
        cache: folder of results, shared by all rows and studies.
        seconds: time limit, for a peer that takes one.

    Raises:
        ConfigError: such a peer is given no time.
    """
    from ramen.peers.evaluation import evaluate_peer

    peer = PEERS[name]
    if peer.timed and seconds <= 0:
        raise ConfigError(f"peer {name}: trains for a given time; name a row of the study as `time_of`")
    dataset = open_artifact(prepare(config, cache), "dataset")
    sections = config.sections(peer.sections)
    limit = round(seconds, 1) if peer.timed else 0.0
    stage = dataclasses.replace(STAGES["evaluate"], reads=("dataset",), sections=peer.sections, code=PEER_CODE)
    version = stage.cache_version(config)
    key = stage_key(f"peer-{name}", sections, {"dataset": dataset.digest, "seconds": limit}, version)
    folder = cache / f"peer-{name}-{key}"
    if kept := _kept(folder, ("evaluation",)):
        with open_tracker("peer", {"ramen.cached": "true"}) as track:
            track.headline(kept["metrics"])
        return Outcome(kept["metrics"], kept["seconds"], folder / "evaluation", dataset.path)

    def stop() -> None:
        raise Interrupted(f"peer {name}: interrupted; nothing was changed")

    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"evaluation": folder / "evaluation"}
    with (
        tempfile.TemporaryDirectory() as work,
        open_tracker("peer") as track,
        on_interrupt(stop),
        drafts(outputs, sections=sections, inputs={"dataset": dataset}, work=Path(work)) as made,
    ):
        problem = Dataset.read(dataset.path, anchors=False)
        task = Task(problem, config.encoder, config.training, config.scoring, Path(work), limit)
        metrics, took = evaluate_peer(name, task, made["evaluation"])
        track.headline(metrics)
    gc.collect()  # a trained model contains reference cycles
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
    write_json(folder / RECEIPT, {"metrics": metrics, "seconds": took})
    return Outcome(metrics, took, folder / "evaluation", dataset.path)


def _kept(folder: Path, artifacts: Iterable[str]) -> dict[str, Any]:
    """The receipt of a finished result; empty if there is none.

    A damaged result is moved aside, since a user may have edited it, and is computed again.
    """
    receipt = folder / RECEIPT
    if not receipt.exists():
        return {}
    try:
        for artifact in artifacts:
            open_artifact(folder / artifact, artifact)
        form = {"metrics": dict[str, float], "seconds": float}
        kept = read_json(receipt, dict[str, Any])
        return {key: checked(kept.get(key), each, f"{receipt}: {key}") for key, each in form.items()}
    except ArtifactError as error:
        aside = folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}")
        folder.rename(aside)
        warn(f"{error} (it is computed again; the damaged result is in {aside})")
        return {}


def _stage(name: str, config: Config, made: Mapping[str, Path], cache: Path) -> tuple[Path, dict[str, float], float]:
    """One stage: where its artifacts lie, its metrics, and the seconds it took when it was computed."""
    stage = STAGES[name]
    sections = config.sections(stage.sections)
    inputs = {artifact: made[artifact] for artifact in stage.reads}
    digests = {artifact: open_artifact(path, artifact).digest for artifact, path in inputs.items()}
    folder = cache / f"{name}-{stage_key(name, sections, digests, stage.cache_version(config))}"
    if kept := _kept(folder, stage.writes):
        record_cached(name, kept["metrics"], {artifact: folder / artifact for artifact in stage.writes})
        return folder, kept["metrics"], kept["seconds"]
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {artifact: folder / artifact for artifact in stage.writes}
    with _timed(folder / "seconds.json") as spent, open_tracker(name) as track:
        metrics = run_stage(name, sections=sections, inputs=inputs, outputs=outputs, track=track)
    took = spent()
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
    write_json(folder / RECEIPT, {"metrics": metrics, "seconds": took})
    return folder, metrics, took


@contextmanager
def _timed(file: Path) -> Iterator[Callable[[], float]]:
    """Seconds since the stage began, those before it was stopped on request included; they stand in `file` meanwhile.

    What an attempt did that was killed outright, or failed, is not known, and not counted.
    """
    before = 0.0
    with suppress(ArtifactError):  # missing, or damaged: the time of earlier attempts is then not known
        before = max(0.0, read_json(file, FiniteFloat))
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
        gain_error: metric -> standard error of the gain over the test documents, clustered by group, of those that
            `by_document` knows. A deviation over seeds does not see that other documents would have been drawn.
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
    """Standard errors of the gains averaged over seeds; nothing of other data, or of fewer than two groups."""
    if any(ours.dataset != theirs.dataset for ours, theirs in zip(outcomes, against, strict=True)):
        return {}
    pairs = [
        (_per_document(ours.dataset, ours.evaluation), _per_document(theirs.dataset, theirs.evaluation))
        for ours, theirs in zip(outcomes, against, strict=True)
    ]
    found = {}
    for prefix in pairs[0][0]:
        first = pairs[0][0][prefix]
        for key in first.values:
            gains = [ours[prefix].values[key] - theirs[prefix].values[key] for ours, theirs in pairs]
            error = standard_error(np.mean(gains, axis=0), first.groups, first.weights_of(key))
            if error is not None:
                found[f"{prefix}{key}"] = error
    return found


@functools.lru_cache(
    maxsize=16
)  # the table is written again after every seed, and a base is compared with several rows
def _per_document(dataset: Path, evaluation: Path) -> dict[str, PerDocument]:
    """What each test document adds to a row's metrics, by the prefix of their keys ("" and `encoder/`)."""
    problem = Dataset.read(dataset, anchors=False)
    whole = from_evaluation(problem, evaluation)
    alone = (evaluation / ENCODER_PREDICTIONS).is_file()
    return {"": whole, ENCODER: from_evaluation(problem, evaluation, ENCODER_PREDICTIONS) if alone else whole}


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
    file = outcome.evaluation / "quantiles.csv"
    with reading(file), file.open(encoding="utf-8", newline="") as stream:
        return {row["bin"]: row for row in csv.DictReader(stream)}
