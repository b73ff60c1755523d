"""Steps in a pod: fetching demo data, tracking without a server, and error lines."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.step import run_step
from ramen.artifacts import open_artifact
from ramen.config import resolve
from ramen.data.sources import debian
from ramen.stages import STAGES


class Scalars(SimpleNamespace):
    """The part of KFP's `Metrics` that a step uses."""

    def log_metric(self, name: str, value: float) -> None:
        pass


def run_ingest(folder: Path, *sets: str) -> Path:
    """Run the step `ingest` and return the path of the dataset."""
    sections = resolve(preset="demo", sets=list(sets)).sections(STAGES["ingest"].sections)
    dataset = SimpleNamespace(path=str(folder / "dataset"), metadata={})
    run_step("ingest", sections, {"dataset": dataset}, Scalars(path=str(folder / "scalars")))
    return folder / "dataset"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory and environment of a pod in a namespace without MLflow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_NAMESPACE", "lab")
    monkeypatch.setenv("KFP_RUN_ID", "run-7")
    for name in ("MLFLOW_TRACKING_URI", "RAMEN_TRACKING"):
        monkeypatch.setenv(name, "")  # so that the old value is restored
        monkeypatch.delenv(name)
    return tmp_path


def test_pod_without_mlflow_turns_tracking_off_with_a_warning(
    pod: Path, tiny_xc_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = run_ingest(pod, "data.source=xc", f"data.path={tiny_xc_folder}")
    assert open_artifact(dataset, "dataset") and not (pod / "mlflow.db").exists()
    assert "this pod has no MLFLOW_TRACKING_URI (secret ramen-mlflow), so tracking is off" in capsys.readouterr().err
    assert os.environ["RAMEN_TRACKING"] == "off", "so that publish-index refuses to register"


def test_step_fetches_missing_demo_data(pod: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots: list[Path] = []

    def fetch(path: Path) -> int:
        snapshots.append(path)
        raise SystemExit("apt was called")

    monkeypatch.setattr(debian, "fetch", fetch)
    with pytest.raises(SystemExit, match="apt was called"):
        run_ingest(pod, "data.path=data/debian.jsonl.gz")
    assert snapshots == [Path("data/debian.jsonl.gz")]


def test_unwritable_volume_is_reported_in_one_line(
    pod: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (pod / "mnt").write_text("no folder")
    monkeypatch.setenv("RAMEN_WORK", str(pod / "mnt" / "work"))
    with pytest.raises(SystemExit) as ended:
        run_ingest(pod, "data.source=xc", f"data.path={tiny_xc_folder}")
    *_, error, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 4 and last == "exit code 4"
    assert error.startswith(f"error: {pod / 'mnt' / 'work'}") and "cannot be written" in error
    assert error.endswith("set RAMEN_WORK to another directory")
