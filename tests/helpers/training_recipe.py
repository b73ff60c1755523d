"""A small configuration for both training stages, and functions that read their outputs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ramen.stages import run_stage
from ramen.tracking import NullTracker

SECTIONS: dict[str, dict[str, Any]] = {
    "encoder": {
        "name": "tiny",
        "precision": "fp32",
        "max_length": 16,
        "dropout": -1,
    },  # dropout, so that tests of resuming cover its random state
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


def changed(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {**SECTIONS.get(name, {}), **sections.get(name, {})} for name in {**SECTIONS, **sections}}


def train(
    artifacts: dict[str, Path], out: Path, sections: dict[str, dict[str, Any]] = SECTIONS, again: bool = True
) -> dict[str, float]:
    """Run both stages and return the metrics of the second; `again=False` skips a stage whose output exists."""
    inputs = {name: artifacts[name] for name in ("dataset", "graph")}
    if again or not (out / "warm_model").exists():
        run_stage("warmup", sections=sections, inputs=inputs, outputs={"warm_model": out / "warm_model"})
    if not again and (out / "pruned_graph").exists() and (out / "model").exists():
        return {}
    return run_stage(
        "prune-retrain",
        sections=sections,
        inputs={**inputs, "warm_model": out / "warm_model"},
        outputs={"model": out / "model", "pruned_graph": out / "pruned_graph"},
    )


def weights(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)


def history(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "history.json").read_text())


class StopAt(NullTracker):
    """Sends SIGTERM to the process at the n-th logged point of a curve, like a pre-empted node."""

    def __init__(self, left: int) -> None:
        self.left = left

    def curve(self, metrics: Any, step: int) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
