"""run_stage with a stage of its own: what it refuses, what it leaves behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ramen.artifacts import open_artifact
from ramen.errors import ArtifactError, ConfigError, DataError, Defect, Interrupted
from ramen.stages import STAGES, Stage, run_stage

SEEN: dict[str, Any] = {}


def write(*, dataset: Any, data: Any, track: Any) -> dict[str, float]:
    (dataset.path / "file").write_text(f"seed {data.seed}")
    SEEN["data"] = data
    return {"rows": 1.0}


def fail(*, dataset: Any, data: Any, track: Any) -> dict[str, float]:
    (dataset.path / "file").write_text("half")
    dataset.work.mkdir(parents=True, exist_ok=True)
    (dataset.work / "checkpoint").write_text("step 3")
    SEEN["work"] = dataset.work
    raise DataError(Defect("f", "broken"))


def full(*, dataset: Any, data: Any, track: Any) -> dict[str, float]:
    raise OSError(errno.ENOSPC, "No space left on device")  # of a write: it names no file


def stopped(*, dataset: Any, data: Any, track: Any) -> dict[str, float]:
    (dataset.path / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("still running")


def read(*, dataset: Any, graph: Any, walk: Any, track: Any) -> dict[str, float]:
    (graph.path / "copy").write_text((dataset.path / "file").read_text())
    return {}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("planted_stages")
    for function in (write, fail, full, read, stopped):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "planted_stages", module)
    for name, function, reads, writes, sections in (
        ("write", "write", (), ("dataset",), ("data",)),
        ("fail", "fail", (), ("dataset",), ("data",)),
        ("full", "full", (), ("dataset",), ("data",)),
        ("stopped", "stopped", (), ("dataset",), ("data",)),
        ("read", "read", ("dataset",), ("graph",), ("walk",)),
    ):
        stage = Stage(name, "planted", reads, writes, sections, (), f"planted_stages:{function}")
        monkeypatch.setitem(STAGES, name, stage)
    monkeypatch.chdir(tmp_path)


def test_outputs_appear_under_their_default_names() -> None:
    assert run_stage("write", sections={"data": {"seed": 4.0}, "walk": {}}) == {"rows": 1.0}
    artifact = open_artifact("artifacts/dataset", "dataset")
    assert artifact.manifest["sections"]["data"]["seed"] == 4
    run_stage("read", sections={})
    assert Path("artifacts/graph/copy").read_text() == "seed 4"


def test_a_stage_sees_only_its_own_sections() -> None:
    run_stage("write", sections={"data": {}})
    with pytest.raises(ConfigError, match="data.sed: unknown; did you mean seed?"):
        run_stage("write", sections={"data": {"sed": 1}})
    run_stage("write", sections={"walk": {"unknown": 1}})


def test_a_failure_keeps_the_old_output_and_the_checkpoint() -> None:
    run_stage("write", sections={"data": {"seed": 1}})
    before = open_artifact("artifacts/dataset", "dataset").digest
    with pytest.raises(DataError):
        run_stage("fail", sections={})
    assert open_artifact("artifacts/dataset", "dataset").digest == before
    assert [path.name for path in Path("artifacts").iterdir()] == ["dataset"]
    assert (SEEN["work"] / "checkpoint").is_file()


def test_a_full_disk_is_told_with_the_output_it_stood_in_the_way_of() -> None:
    said = r"^artifacts/dataset: No space left on device \(stage full\); no output was changed$"
    with pytest.raises(ArtifactError, match=said):
        run_stage("full", sections={})


@pytest.mark.parametrize(
    "where", ["ramen.artifacts._write_manifest", "ramen.artifacts._replace", "ramen.workdir.write_json"]
)
def test_disk_that_is_full_outside_of_the_stage_is_reported_with_the_output(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ramen.stages.claim" if where == "ramen.workdir.write_json" else where, fail)
    with pytest.raises(ArtifactError, match="^artifacts/dataset: No space left on device"):
        run_stage("write", sections={})
    assert not Path("artifacts").exists()


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"inputs": 3}', b"\xff", b'{"sections": {"data": 3}}'])
def test_damaged_task_of_another_run_does_not_block_this_one(garbage: bytes, tmp_path: Path) -> None:
    for name in ("write-other", "write-checkpointed"):
        (tmp_path / "ramen-work" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "ramen-work" / name / "task.json").write_bytes(garbage)
    (tmp_path / "ramen-work" / "write-checkpointed" / "checkpoints" / "1").mkdir()
    (tmp_path / "ramen-work" / "write-folder" / "task.json").mkdir(parents=True)
    assert run_stage("write", sections={}) == {"rows": 1.0}


def test_a_stop_leaves_nothing_behind() -> None:
    with pytest.raises(Interrupted):
        run_stage("stopped", sections={})
    assert not Path("artifacts").exists()


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ArtifactError, match="artifacts/dataset: no manifest.json"):
        run_stage("read", sections={})
    assert not Path("artifacts/graph").exists()


def test_a_second_process_at_the_same_task_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    from ramen.workdir import lock_workdir, work_directory

    task = {"stage": "write", "sections": {}, "inputs": {}, "code": "x"}
    work = work_directory(task)
    script = "import sys, time; from pathlib import Path; from ramen.workdir import lock_workdir\n"
    script += "with lock_workdir(Path(sys.argv[1]), {'stage': 'write'}): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(work)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ArtifactError, match=f"process {other.pid} on .* is at the very same task"),
            lock_workdir(work, task),
        ):
            pass
        other.kill()
    with lock_workdir(work, task):  # a killed process holds nothing
        pass
