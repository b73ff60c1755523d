"""`run_stage` with stages planted by the tests: errors, and what remains on disk after them."""

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
from ramen.processes import environment
from ramen.stages import STAGES, Stage, run_stage
from ramen.workdir import lock_workdir, stage_key, work_directory

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
    raise OSError(errno.ENOSPC, "No space left on device")  # without a path, as raised by a write


def stopped(*, dataset: Any, data: Any, track: Any) -> dict[str, float]:
    (dataset.path / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("still running")


def read(*, dataset: Any, graph: Any, walk: Any, track: Any) -> dict[str, float]:
    (graph.path / "copy").write_text((dataset.path / "file").read_text())
    return {}


@pytest.fixture(autouse=True)
def planted_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_default_output_paths_are_used() -> None:
    assert run_stage("write", sections={"data": {"seed": 4.0}, "walk": {}}) == {"rows": 1.0}
    artifact = open_artifact("artifacts/dataset", "dataset")
    assert artifact.manifest["sections"]["data"]["seed"] == 4
    run_stage("read", sections={})
    assert Path("artifacts/graph/copy").read_text() == "seed 4"


def test_only_sections_of_the_stage_are_validated() -> None:
    run_stage("write", sections={"data": {}})
    with pytest.raises(ConfigError, match="data.sed: unknown; did you mean seed?"):
        run_stage("write", sections={"data": {"sed": 1}})
    run_stage("write", sections={"walk": {"unknown": 1}})


def test_failed_stage_keeps_the_old_output_and_the_checkpoint() -> None:
    run_stage("write", sections={"data": {"seed": 1}})
    before = open_artifact("artifacts/dataset", "dataset").digest
    with pytest.raises(DataError):
        run_stage("fail", sections={})
    assert open_artifact("artifacts/dataset", "dataset").digest == before
    assert [path.name for path in Path("artifacts").iterdir()] == ["dataset"]
    assert (SEEN["work"] / "checkpoint").is_file()


def test_full_disk_is_reported_with_the_output() -> None:
    message = r"^artifacts/dataset: No space left on device \(stage full\); no output was changed$"
    with pytest.raises(ArtifactError, match=message):
        run_stage("full", sections={})


@pytest.mark.parametrize(
    "where", ["ramen.artifacts._write_manifest", "ramen.artifacts._replace", "ramen.stages.record_task"]
)
def test_full_disk_outside_of_the_stage_function_is_reported_with_the_output(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, fail)
    with pytest.raises(ArtifactError, match="^artifacts/dataset: No space left on device"):
        run_stage("write", sections={})
    assert not Path("artifacts").exists()


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"inputs": 3}', b"\xff", b'{"sections": {"data": 3}}'])
def test_damaged_task_of_another_run_does_not_block_a_stage(garbage: bytes, tmp_path: Path) -> None:
    for name in ("write-other", "write-checkpointed"):
        (tmp_path / "ramen-work" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "ramen-work" / name / "task.json").write_bytes(garbage)
    (tmp_path / "ramen-work" / "write-checkpointed" / "checkpoints" / "1").mkdir()
    (tmp_path / "ramen-work" / "write-folder" / "task.json").mkdir(parents=True)
    assert run_stage("write", sections={}) == {"rows": 1.0}


def test_interrupted_stage_leaves_no_files() -> None:
    with pytest.raises(Interrupted):
        run_stage("stopped", sections={})
    assert not Path("artifacts").exists()


def test_missing_input_is_reported() -> None:
    with pytest.raises(ArtifactError, match="artifacts/dataset: no manifest.json"):
        run_stage("read", sections={})
    assert not Path("artifacts/graph").exists()


def test_second_process_with_the_same_task_is_refused_and_names_the_first(tmp_path: Path) -> None:
    task = {"stage": "write", "sections": {}, "inputs": {}, "code": "x"}
    work = work_directory(task)
    script = "import sys, time; from pathlib import Path; from ramen.workdir import lock_workdir\n"
    script += "with lock_workdir(Path(sys.argv[1]), {'stage': 'write'}): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, str(work)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ArtifactError, match=f"process {other.pid} on .* runs the same task"),
            lock_workdir(work, task),
        ):
            pass
        other.kill()
    with lock_workdir(work, task):  # the lock of a killed process is released
        pass


def test_stage_key_depends_on_each_part() -> None:
    parts: list[Any] = ["warmup", {"training": {"lr": 0.1}}, {"dataset": "a"}, "1"]
    changes: list[Any] = ["evaluate", {"training": {"lr": 0.2}}, {"dataset": "b"}, "2"]
    keys = {stage_key(*parts)} | {stage_key(*parts[:i], change, *parts[i + 1 :]) for i, change in enumerate(changes)}
    assert len(keys) == 5


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMEN_A", "before")
    monkeypatch.delenv("RAMEN_B", raising=False)
    with pytest.raises(KeyError), environment({"RAMEN_A": "a", "RAMEN_B": "b"}):
        assert (os.environ["RAMEN_A"], os.environ.pop("RAMEN_B")) == ("a", "b")
        raise KeyError
    assert os.environ["RAMEN_A"] == "before" and "RAMEN_B" not in os.environ
