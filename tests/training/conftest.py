"""The artifacts `dataset` and `graph` of the tiny dataset, and the planted problem of a benchmark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from on_disk import graphs_of

from ramen.artifacts import create_drafts
from ramen.data.dataset import Dataset
from ramen.graph.metadata import write_graphs


@pytest.fixture
def tiny_artifacts(tiny_dataset: Dataset, tmp_path: Path) -> dict[str, Path]:
    """Paths of `dataset` and `graph` (original edges, no random walks)."""
    paths = {name: tmp_path / name for name in ("dataset", "graph")}
    with create_drafts(paths, sections={}, inputs={}, work=tmp_path / "work") as written:
        tiny_dataset.write(written["dataset"].path)
        write_graphs(written["graph"].path, graphs_of(tiny_dataset))
    return paths


@pytest.fixture(scope="session")
def planting() -> ModuleType:
    """The module `benchmarks/bandit.py`, which generates the planted problem."""
    path = Path(__file__).parents[2] / "benchmarks/bandit.py"
    spec = importlib.util.spec_from_file_location("planted_bandit", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
