"""DVC pointers: artifacts pushed without git to an S3-compatible server and adopted by another repository."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from components.ingest.component import ingest
from ramen.cli import cli
from ramen.config import DataConfig
from ramen.dvc_pointers import Pointer, adopt, push
from ramen.errors import RamenError
from ramen.tracking import start_pipeline_run


class Output:
    """Stands in for a KFP output artifact: a path and metadata."""

    def __init__(self, path: Path) -> None:
        self.path, self.metadata = str(path), {}  # type: ignore[var-annotated]

    def log_metric(self, name: str, value: float) -> None: ...


def run_dvc(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def hash_files(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "laptop"
    folder.mkdir()
    assert run_dvc("init", "--no-scm", "-q", cwd=folder).returncode == 0
    return folder


@pytest.mark.slow
def test_dataset_pushed_by_a_pod_can_be_pulled_into_a_repository(
    store: Path, s3: str, tmp_path: Path, tiny_xc_folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = tmp_path / "pod"
    monkeypatch.setenv("RAMEN_DVC_REMOTE", f"{s3}/dvc")
    made = Output(pod / "dataset")
    with start_pipeline_run("cluster", "{}") as run:
        ingest.python_func(
            data=DataConfig(source="xc", path=str(tiny_xc_folder)).model_dump(), version="1", dataset=made,
            scalars=Output(pod / "scalars"), report=Output(pod / "report"),
        )  # fmt: skip
    assert not list(pod.rglob("*.dvc")) and not list(tmp_path.glob(".dvc")), "no DVC files remain in the pod"

    monkeypatch.chdir(repository)
    done = CliRunner().invoke(cli, ["dvc-adopt", run[:8]])
    assert done.exit_code == 0, done.output
    pointer = repository / "adopted" / run[:8] / "dataset.dvc"
    assert str(pointer.relative_to(repository)) in done.output
    assert "a-secret" not in (repository / ".dvc" / "config").read_text() + pointer.read_text()
    pulled = run_dvc("pull", "-R", "adopted", cwd=repository)
    assert pulled.returncode == 0, pulled.stderr
    assert hash_files(pointer.with_suffix("")) == hash_files(Path(made.path))
    assert "/dataset" in (pointer.parent / ".gitignore").read_text()
    assert run_dvc("status", cwd=repository).stdout.strip().endswith("up to date.")

    again = CliRunner().invoke(cli, ["dvc-adopt", "cluster"])
    assert again.exit_code == 0, again.output
    assert (repository / ".dvc" / "config").read_text().count(" url = ") == 1, "the remote is added once"


@pytest.mark.slow
def test_failed_push_is_a_warning_and_keeps_the_artifact(
    store: Path, tmp_path: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("RAMEN_DVC_REMOTE", str(blocked / "dvc"))
    with start_pipeline_run("cluster", "{}") as run:
        ingest.python_func(
            data=DataConfig(source="xc", path=str(tiny_xc_folder)).model_dump(), version="1",
            dataset=Output(tmp_path / "pod" / "dataset"), scalars=Output(tmp_path / "pod" / "scalars"),
            report=Output(tmp_path / "pod" / "report"),
        )  # fmt: skip
    assert (tmp_path / "pod" / "dataset" / "manifest.json").is_file()
    assert "dataset cannot be pushed" in capsys.readouterr().err
    done = CliRunner().invoke(cli, ["dvc-adopt", run[:8]])
    assert done.exit_code == 1 and "pushed no data; set RAMEN_DVC_REMOTE" in done.output


def test_wrong_access_keys_are_one_error_line(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "a").write_text("edges")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(RamenError, match=r"DVC remote s3://graphs/x: graph cannot be pushed \(.+\)") as caught:
        push(tmp_path / "graph", "graph", f"{s3}/x")
    assert "\n" not in str(caught.value)


def test_unexpected_error_in_a_push_is_one_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    (tmp_path / "graph").mkdir()
    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    with pytest.raises(RamenError, match=r"graph cannot be pushed \(.*uid not found"):
        push(tmp_path / "graph", "graph", str(tmp_path / "remote"))


def test_pushing_the_same_artifact_twice_gives_the_same_pointer(tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "edges.npz").write_bytes(b"x" * 100)
    first, second = (push(tmp_path / "graph", "graph", str(tmp_path / "remote")) for _ in range(2))
    assert first == second and (first.size, first.files) == (100, 1)
    assert Pointer.from_yaml(first.to_yaml()) == first


def test_adopt_reuses_an_existing_remote_and_does_not_overwrite_another_version(
    repository: Path, tmp_path: Path
) -> None:
    assert run_dvc("remote", "add", "lab", str(tmp_path / "remote"), cwd=repository).returncode == 0
    pointer = Pointer("graph", "0" * 32 + ".dir", 10, 1, str(tmp_path / "remote"))
    (path,) = adopt([pointer], repository / "graphs")
    assert yaml.safe_load(path.read_text())["outs"][0]["remote"] == "lab"
    assert adopt([pointer], repository / "graphs") == [path]
    with pytest.raises(RamenError, match=r"graph\.dvc: contains another version"):
        adopt([Pointer("graph", "1" * 32 + ".dir", 10, 1, str(tmp_path / "remote"))], repository / "graphs")
    with pytest.raises(RamenError, match="not in a DVC repository"):
        adopt([pointer], tmp_path / "elsewhere")
    with pytest.raises(RamenError, match="not a DVC pointer"):
        Pointer.from_yaml("outs: []")
