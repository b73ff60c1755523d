"""Artifacts of the tiny problem, trainings that tests share, and the benchmark of the bandit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from on_disk import graphs_of

from ramen.artifacts import create_drafts
from ramen.data.dataset import Dataset
from ramen.graph.metadata import write_graphs

from training_recipe import SECTIONS, Sections, TrainOnce, train


@pytest.fixture(scope="session")
def tiny_artifacts(shared_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of `dataset` and `graph` (without a walk), shared by all tests of a session: do not modify them."""
    folder = tmp_path_factory.mktemp("artifacts")
    paths = {name: folder / name for name in ("dataset", "graph")}
    with create_drafts(paths, sections={}, inputs={}, work=folder / "work") as draft:
        shared_dataset.write(draft["dataset"].path)
        write_graphs(draft["graph"].path, graphs_of(shared_dataset))
    return paths


@pytest.fixture(scope="module")
def train_once(tiny_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TrainOnce:
    """Return a function that runs both stages with the given sections, or returns the folder of an earlier call.

    The folder, with `warm_model`, `model` and `pruned_graph`, is shared by the tests of a module: do not modify it.
    """
    folders: dict[str, Path] = {}

    def train_or_reuse(sections: Sections = SECTIONS) -> Path:
        key = json.dumps(sections, sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("trained")
            train(tiny_artifacts, folders[key], sections)
        return folders[key]

    return train_or_reuse


@pytest.fixture(scope="session")
def bandit_benchmark() -> ModuleType:
    """The benchmark of the bandit, which makes the planted data."""
    path = Path(__file__).parents[2] / "benchmarks/bandit.py"
    spec = importlib.util.spec_from_file_location("bandit_benchmark", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
