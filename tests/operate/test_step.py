"""What a step does in its pod beside its stage: fetch, track, and end with a line."""

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
    """As much of KFP's `Metrics` as a step uses."""

    def log_metric(self, name: str, value: float) -> None:
        pass


def ingest(folder: Path, *sets: str) -> Path:
    """Run the step `ingest`; gives the dataset's place."""
    sections = resolve(preset="demo", sets=list(sets)).sections(STAGES["ingest"].sections)
    dataset = SimpleNamespace(path=str(folder / "dataset"), metadata={})
    run_step("ingest", sections, {"dataset": dataset}, Scalars(path=str(folder / "scalars")))
    return folder / "dataset"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and the variables of a pod whose namespace has no MLflow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_NAMESPACE", "lab")
    monkeypatch.setenv("KFP_RUN_ID", "run-7")
    for name in ("MLFLOW_TRACKING_URI", "RAMEN_TRACKING"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return tmp_path


def test_pod_without_mlflow_tracks_nothing_and_says_so(
    pod: Path, tiny_xc_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ingest(pod, "data.source=xc", f"data.path={tiny_xc_folder}")
    assert open_artifact(made, "dataset") and not (pod / "mlflow.db").exists()
    assert "no MLFLOW_TRACKING_URI in this pod (secret ramen-mlflow): nothing is tracked" in capsys.readouterr().err
    assert os.environ["RAMEN_TRACKING"] == "off", "publish-index then refuses to register"


def test_demo_data_are_fetched_where_they_are_missing(
    pod: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots: list[Path] = []

    def fetch(path: Path) -> int:
        snapshots.append(path)
        raise SystemExit("apt was asked")

    monkeypatch.setattr(debian, "fetch", fetch)
    with pytest.raises(SystemExit, match="apt was asked"):
        ingest(pod, "data.path=data/debian.jsonl.gz")
    assert snapshots == [Path("data/debian.jsonl.gz")]


def test_unwritable_volume_is_one_line(
    pod: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (pod / "mnt").write_text("no folder")
    monkeypatch.setenv("RAMEN_WORK", str(pod / "mnt" / "work"))
    with pytest.raises(SystemExit) as ended:
        ingest(pod, "data.source=xc", f"data.path={tiny_xc_folder}")
    said = capsys.readouterr().err.splitlines()
    assert (
        ended.value.code == 4
        and said[-2].startswith(f"error: {pod / 'mnt' / 'work'}")
        and "cannot be written" in said[-2]
    )
    assert said[-2].endswith("set RAMEN_WORK to another directory") and said[-1] == "exit code 4"
