"""A small configuration of both training stages, and functions that read their results."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ramen.artifacts import open_artifact
from ramen.errors import Interrupted
from ramen.stages import run_stage
from ramen.tracking import NullTracker
from ramen.training.step_sampler import Step
from ramen.training.trainer import Trainer

Sections = dict[str, dict[str, Any]]
TrainOnce = Callable[..., Path]
"""The fixture `train_once`: sections -> folder with the outputs of both stages."""

SECTIONS: Sections = {
    "encoder": {"name": "tiny", "precision": "fp32", "max_length": 16, "dropout": -1},  # resuming repeats its draws
    "objective": {},
    "training": {
        "batch_size": 16,
        "epochs": 4,
        "warmup_epochs": 2,
        "lr": 3e-3,
        "lr_warmup_steps": 2,
        "validation_fraction": 0.1,
        "threads": 1,
    },
    "pruning": {"every": 1, "patience": 0},
}
OUTPUTS = {"warmup": ("warm_model",), "prune-retrain": ("model", "pruned_graph")}


def changed(**sections: dict[str, Any]) -> Sections:
    """Return `SECTIONS` with some knobs changed or added."""
    return {name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {**SECTIONS, **sections}}


def run_warmup(artifacts: dict[str, Path], out: Path, sections: Sections = SECTIONS, **options: Any) -> dict[str, Any]:
    """Run the stage `warmup` on the artifacts `dataset` and `graph`, and write `out / "warm_model"`."""
    inputs = {name: artifacts[name] for name in ("dataset", "graph")}
    return run_stage("warmup", sections=sections, inputs=inputs, outputs={"warm_model": out / "warm_model"}, **options)


def run_retraining(
    artifacts: dict[str, Path], warm_model: Path, out: Path, sections: Sections = SECTIONS, **options: Any
) -> dict[str, Any]:
    """Run the stage `prune-retrain`, and write `model` and `pruned_graph` to `out`."""
    inputs = {name: artifacts[name] for name in ("dataset", "graph")} | {"warm_model": warm_model}
    outputs = {name: out / name for name in OUTPUTS["prune-retrain"]}
    return run_stage("prune-retrain", sections=sections, inputs=inputs, outputs=outputs, **options)


def train(
    artifacts: dict[str, Path], out: Path, sections: Sections = SECTIONS, skip_finished: bool = False
) -> dict[str, float]:
    """Run both stages; `skip_finished` skips a stage whose outputs exist."""
    if not (skip_finished and (out / "warm_model").exists()):
        run_warmup(artifacts, out, sections)
    if skip_finished and all((out / name).exists() for name in OUTPUTS["prune-retrain"]):
        return {}
    return run_retraining(artifacts, out / "warm_model", out, sections)


def weights(model: Path) -> dict[str, np.ndarray]:
    return load_file(model / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def assert_same_artifacts(folder: Path, expected: Path, *names: str) -> None:
    """Check that artifacts of two folders have the same digest; by default those of `prune-retrain`."""
    for name in names or OUTPUTS["prune-retrain"]:
        assert open_artifact(folder / name, name).digest == open_artifact(expected / name, name).digest, name


def history(model: Path) -> list[dict[str, Any]]:
    return json.loads((model / "history.json").read_text())


class InterruptAtPoint(NullTracker):
    """Sends SIGTERM to this process at the n-th point of a curve, as a pre-empted node does."""

    def __init__(self, points: int) -> None:
        self.remaining = points

    def curve(self, metrics: Any, step: int) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupt_before_steps(patch: pytest.MonkeyPatch, numbers: Iterable[int]) -> None:
    """Request an interruption before some training steps of this process, counted from 1 over all calls."""
    numbers, train_step, count = set(numbers), Trainer.train_step, 0

    def interrupt(trainer: Trainer, step: Step) -> dict[str, float]:
        nonlocal count
        count += 1
        if count in numbers:
            trainer.interrupted = True
        return train_step(trainer, step)

    patch.setattr(Trainer, "train_step", interrupt)


def run_until_done(run: Callable[[], object]) -> int:
    """Repeat a run until it is not interrupted; return the number of interruptions."""
    for interruptions in range(10):
        try:
            run()
        except Interrupted:
            continue
        return interruptions
    raise AssertionError("the run was interrupted ten times")
