"""dvc.yaml agrees with the stage table, and dvc runs it on a small dataset."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_pipeline import SMALL

from ramen.config import SECTIONS, knobs, parse, resolve, to_yaml
from ramen.stages import PACKAGE, STAGES
from ramen.tracking import flat_params

ROOT = Path(__file__).resolve().parents[2]
DVC_YAML = ROOT / "dvc.yaml"


def test_dvc_yaml_has_the_stages_of_the_table() -> None:
    stages = yaml.safe_load(DVC_YAML.read_text())["stages"]
    assert list(stages) == list(STAGES)
    for name, stage in STAGES.items():
        dvc_stage = stages[name]
        assert dvc_stage["cmd"] == f"ramen {name}"
        outs = [f"artifacts/{artifact}" for artifact in stage.writes]
        assert dvc_stage["outs"] == ([{out: {"cache": False}} for out in outs] if stage.side_effects else outs)
        assert dvc_stage["params"] == list(stage.sections)
        artifacts = {dep.removeprefix("artifacts/") for dep in dvc_stage["deps"] if dep.startswith("artifacts/")}
        assert artifacts == set(stage.reads)
        code = {dep.removeprefix("ramen/") for dep in dvc_stage["deps"] if dep.startswith("ramen/")}
        assert code == {*stage.code, "artifacts.py", "config", "files.py", "stages.py", "yamlfile.py"}
    assert "${data.path}" in stages["ingest"]["deps"]


def test_params_yaml_is_complete_and_valid() -> None:
    tree = yaml.safe_load((ROOT / "params.yaml").read_text())
    expected = {f"{name}.{path}" for name, section in SECTIONS.items() for path, _ in knobs(section)}
    assert set(flat_params(tree)) == expected
    parse(tree)


@pytest.fixture
def project(tmp_path: Path, xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC project with our dvc.yaml, a copy of the package as its code, and a small dataset."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copytree(PACKAGE, folder / "ramen", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.move(xc_folder, folder / "raw")
    shutil.copy(DVC_YAML, folder)
    shutil.copy(ROOT / ".dvcignore", folder)
    write_params(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "global"))
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dvc(folder, "init", "--no-scm", "-q")
    return folder


def write_params(folder: Path, *more: str) -> None:
    (folder / "params.yaml").write_text(
        to_yaml(resolve(preset="demo", sets=["data.path=raw", "index.model=", *SMALL, *more]))
    )


def dvc(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["dvc", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def repro(folder: Path) -> list[str]:
    """Run `dvc repro` and return the names of the stages that ran."""
    return re.findall(r"^Running stage '([\w-]+)'", dvc(folder, "repro"), re.MULTILINE)


@pytest.mark.slow
def test_repro_runs_only_the_changed_stages(project: Path) -> None:
    assert repro(project) == list(STAGES)
    bytecode = project / "ramen" / "index" / "__pycache__"
    bytecode.mkdir()
    (bytecode / "stage.pyc").write_bytes(b"")
    assert repro(project) == []
    write_params(project, "index.kind=hnsw")
    assert repro(project) == ["publish-index"]
    write_params(project)
    assert repro(project) == ["publish-index"], "it changes the registry, so DVC must not restore it from its run cache"
    shown = dvc(project, "metrics", "show", "--json")
    assert '"p_at_1"' in shown and '"ann_recall' in shown


@pytest.fixture
def experiment(tmp_path: Path, xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DVC project in a git repository, with only the first stage."""
    folder = tmp_path / "my project"
    folder.mkdir()
    shutil.move(xc_folder, folder / "raw")
    write_params(folder)
    stage = {"cmd": "ramen ingest", "deps": ["raw"], "params": ["data"], "outs": ["artifacts/dataset"]}
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"ingest": stage}}))
    (folder / ".gitignore").write_text("/artifacts\n/metrics\n/mlflow.db*\n/mlruns\n/.ramen\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "global"))
    for name in ("MLFLOW_TRACKING_URI", "RAMEN_TRACKING", "RAMEN_SPOOL"):
        monkeypatch.delenv(name, raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "t")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "t@example.org")
    git = functools.partial(subprocess.run, cwd=folder, check=True, capture_output=True)
    git(["git", "init", "-q"])
    dvc(folder, "init", "-q")
    git(["git", "add", "-A"])
    git(["git", "commit", "-qm", "start"])
    return folder


@pytest.mark.slow
def test_temporary_experiment_is_tracked_in_the_store_of_its_project(experiment: Path) -> None:
    from urllib.parse import quote

    from mlflow import MlflowClient

    dvc(experiment, "exp", "run", "--temp", "--name", "try")
    assert (experiment / "mlflow.db").is_file(), "outside of the temporary workspace, which is deleted"
    client = MlflowClient(f"sqlite:///{quote(str(experiment / 'mlflow.db'))}")
    found = client.get_experiment_by_name("ramen")
    assert str(experiment / "mlruns") in found.artifact_location and ".dvc" not in found.artifact_location
    runs = {run.info.run_name: run for run in client.search_runs([found.experiment_id])}
    assert runs["ingest"].data.tags["dvc.exp"] == "try"
    assert list((experiment / "mlruns").rglob("validation/index.html"))


@pytest.mark.slow
def test_relative_store_in_a_temporary_experiment_is_refused(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    done = subprocess.run(["dvc", "exp", "run", "--temp"], cwd=experiment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: MLFLOW_TRACKING_URI = sqlite:///mine.db: lies in a temporary workspace" in done.stdout + done.stderr
