"""Fixtures for tests of indexes and publishing: an MLflow run, an encoder, and finished artifacts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ramen import config
from ramen.artifacts import Artifact, create_drafts, open_artifact
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import write_classifier, write_context
from ramen.tracking import NullTracker

METRICS = {"p_at_1": 40.0, "psp_at_5": 30.0, "tail/p_at_1": 10.0}


@dataclass
class RunTracker(NullTracker):
    """A tracker with the id of an MLflow run that keeps metrics in memory."""

    run_id: str | None = None
    logged: dict[str, float] = field(default_factory=dict)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logged.update(metrics)


@pytest.fixture
def track(store: Path) -> RunTracker:
    """A tracker whose run is in `store`."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("ramen")
    number = experiment.experiment_id if experiment else client.create_experiment("ramen", str(store.parent / "files"))
    return RunTracker(client.create_run(number).info.run_id)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random encoder, saved as training saves it."""
    from ramen.encoder.loading import load_encoder

    folder = tmp_path_factory.mktemp("encoder") / "model"
    load_encoder("tiny", config.EncoderConfig(name="tiny")).save(folder)
    return folder


@pytest.fixture
def artifacts(
    tiny_dataset: Dataset, encoder_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> dict[str, Artifact]:
    """Finished `dataset`, `model` and `evaluation`; the marker `labelled` adds label context and classifiers."""
    folders = {name: tmp_path / "artifacts" / name for name in ("dataset", "model", "evaluation")}
    with create_drafts(folders, sections={}, inputs={}, work=tmp_path / "work") as written:
        tiny_dataset.write(written["dataset"].path)
        shutil.copytree(encoder_folder, written["model"].path, dirs_exist_ok=True)
        if request.node.get_closest_marker("labelled"):
            rng = np.random.default_rng(0)
            write_context(written["model"].path, rng.standard_normal((30, 32)).astype(np.float32))
            weight = rng.standard_normal((30, 32)).astype(np.float32)
            write_classifier(written["model"].path, weight / np.linalg.norm(weight, axis=1, keepdims=True), 0.3)
        (written["evaluation"].path / "metrics.json").write_text(json.dumps(METRICS))
    return {name: open_artifact(path, name) for name, path in folders.items()}
