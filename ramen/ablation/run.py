"""Run a study: check its rows, then train and evaluate every row under every seed."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ramen.ablation.cache import CachedResult, run_cached_stage
from ramen.ablation.study import Row, Study
from ramen.artifacts import create_drafts, open_artifact
from ramen.config import Config, to_yaml
from ramen.data.dataset import Dataset
from ramen.errors import ConfigError, Interrupted, RamenError, StateRemoved, suggest_name
from ramen.peers import PEERS, Task
from ramen.signals import on_interrupt
from ramen.stages import STAGES, preflight
from ramen.tracking import open_tracker, start_pipeline_run
from ramen.workdir import stage_key

CHAIN = ("ingest", "build-graph", "warmup", "prune-retrain", "evaluate")
"""Stages of a row; nothing is published."""
TRAINING = ("warmup", "prune-retrain")
"""Stages whose time is a row's training time."""
EXPERIMENT = "ramen-ablate"
"""MLflow experiment of all studies, unless the environment names another."""
PEER_CODE = (
    "data/dataset.py",
    "data/filters.py",
    "data/sparse.py",
    "encoder",
    "evaluation",
    "peers",
    "retrieval.py",
    "sampling.py",
    "training/heldout.py",
)
"""Code that a peer's result depends on."""


@dataclass(frozen=True)
class Outcome:
    """Result of a row under one seed.

    Attributes:
        metrics: in percent.
        seconds: training time.
        evaluation, dataset: folders of the artifacts.
    """

    metrics: dict[str, float]
    seconds: float
    evaluation: Path
    dataset: Path


def check_rows(study: Study, config_of: Callable[[Row], Config], cache: Path) -> None:
    """Check what every row needs, before anything is computed.

    Args:
        config_of: returns the configuration of a row.
        cache: folder of results.

    Raises:
        RamenError: a row cannot run.
    """
    for row in study.rows:
        config = config_of(row)
        where = f"study {study.name}: row {row.name!r}"
        if row.peer and row.peer not in PEERS:
            raise ConfigError(f"{where}: peer: {suggest_name(row.peer, PEERS)}")
        if row.peer and PEERS[row.peer].timed and not row.time_of:
            raise ConfigError(
                f"{where}: peer {row.peer} trains for a given time; set `time_of` to the name of a row above"
            )
        try:
            preflight(() if row.peer else CHAIN, dict(config), [cache])
        except RamenError as error:
            raise type(error)(f"{where}: {error}") from None


def run_study(
    study: Study,
    seeds: Sequence[int],
    config_of: Callable[[Row, int], Config],
    cache: Path,
    announce: Callable[[str], None],
) -> Iterator[dict[str, list[Outcome]]]:
    """Run all rows under each seed, each as a run in MLflow.

    The loop is by seed, so that an interrupted study still compares all rows.

    Args:
        seeds: seeds of training.
        config_of: returns the configuration of a row under a seed.
        cache: folder of results, shared by all rows and studies.
        announce: called with a line of text before each run.

    Yields:
        After each seed: row -> outcomes of the seeds so far.
    """
    outcomes: dict[str, list[Outcome]] = {row.name: [] for row in study.rows}
    for seed in seeds:
        for row in study.rows:
            config = config_of(row, seed)
            announce(f"{study.name}: {row.name}, seed {seed}")
            tags = {"ramen.study": study.name, "ramen.row": row.name, "ramen.seed": str(seed)}
            with start_pipeline_run(f"{row.name} seed {seed}", to_yaml(config), tags, config.sections()):
                if row.peer:
                    seconds = outcomes[row.time_of][-1].seconds if row.time_of else 0.0
                    outcomes[row.name].append(run_peer(row.peer, config, cache, seconds))
                else:
                    outcomes[row.name].append(run_row(config, cache))
        yield outcomes


def run_row(config: Config, cache: Path) -> Outcome:
    """Run the stages of a row, or take their results from the cache.

    Args:
        config: the row's configuration.
        cache: folder of results, shared by all rows and studies.
    """
    # peers are rows of a study, not part of a row's evaluation
    config = config.model_copy(update={"scoring": config.scoring.model_copy(update={"peers": []})})
    results: dict[str, CachedResult] = {}
    artifacts: dict[str, Path] = {}
    for name in CHAIN:
        try:
            results[name] = run_cached_stage(name, config, artifacts, cache)
        except StateRemoved:  # the warm-up's training state is gone, so the warm-up runs again
            results["warmup"].invalidate()
            run_cached_stage("warmup", config, artifacts, cache)
            results[name] = run_cached_stage(name, config, artifacts, cache)
        artifacts |= {artifact: results[name].folder / artifact for artifact in STAGES[name].writes}
    seconds = sum((results[name].seconds for name in TRAINING), 0.0)
    return Outcome(results["evaluate"].metrics, seconds, artifacts["evaluation"], artifacts["dataset"])


def prepare_dataset(config: Config, cache: Path) -> Path:
    """Run the first stage only, or take its result from the cache; return the folder of the dataset."""
    return run_cached_stage("ingest", config, {}, cache).folder / "dataset"


def run_peer(name: str, config: Config, cache: Path, seconds: float = 0.0) -> Outcome:
    """Train and evaluate a peer on the row's dataset, or take its result from the cache.

    Args:
        name: key of `ramen.peers.PEERS`.
        config: the row's configuration; the key of the result covers the sections that the peer reads.
        cache: folder of results, shared by all rows and studies.
        seconds: time limit, required by peers that have one.

    Raises:
        ConfigError: the peer requires a time limit and has none.
    """
    from ramen.peers.evaluation import evaluate_peer

    peer = PEERS[name]
    if peer.timed and seconds <= 0:
        raise ConfigError(f"peer {name}: trains for a given time; set `time_of` to the name of another row")
    dataset = open_artifact(prepare_dataset(config, cache), "dataset")
    sections = config.sections(peer.sections)
    limit = round(seconds, 1) if peer.timed else 0.0
    stage = dataclasses.replace(STAGES["evaluate"], reads=("dataset",), sections=peer.sections, code=PEER_CODE)
    version = stage.cache_version(config)
    key = stage_key(f"peer-{name}", sections, {"dataset": dataset.digest, "seconds": limit}, version)
    folder = cache / f"peer-{name}-{key}"
    if result := CachedResult.find(folder, ("evaluation",)):
        with open_tracker("peer", {"ramen.cached": "true"}) as track:
            track.headline(result.metrics)
        return Outcome(result.metrics, result.seconds, folder / "evaluation", dataset.path)

    def interrupt() -> None:
        raise Interrupted(f"peer {name}: interrupted; nothing was changed")

    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"evaluation": folder / "evaluation"}
    with (
        tempfile.TemporaryDirectory() as work,
        open_tracker("peer") as track,
        on_interrupt(interrupt),
        create_drafts(outputs, sections=sections, inputs={"dataset": dataset}, work=Path(work)) as written,
    ):
        task = Task(
            Dataset.read(dataset.path, anchors=False),
            config.encoder,
            config.training,
            config.scoring,
            Path(work),
            limit,
        )
        metrics, training_seconds = evaluate_peer(name, task, written["evaluation"])
        track.headline(metrics)
    gc.collect()  # a trained model contains reference cycles
    result = CachedResult.save(folder, metrics, training_seconds)
    return Outcome(result.metrics, training_seconds, folder / "evaluation", dataset.path)
