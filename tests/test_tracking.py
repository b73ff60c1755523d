"""MLflow runs of stages and pipelines, regardless of how they were started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ramen.cli import cli
from ramen.errors import Interrupted, RamenError
from ramen.provenance import pipeline_key, provenance_tags
from ramen.tracking import NullTracker, Tracker, list_pipeline_runs, open_tracker, start_pipeline_run


def new_client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def read_run(tracker: Tracker) -> Any:
    return new_client().get_run(tracker.run_id)


def parent_id(run: Any) -> str | None:
    return run.data.tags.get("mlflow.parentRunId")


@pytest.mark.usefixtures("store")
def test_single_stage_has_no_parent_run() -> None:
    with open_tracker("warmup") as track:
        track.params({"training.lr": 1e-4, "objective.lambdas": {"a.label": 0.5}, "data.path": "x" * 900})
        track.log({"loss": 0.5}, step=1)
        track.log({"loss": 0.25}, step=2)
    run = read_run(track)
    assert run.info.status == "FINISHED" and parent_id(run) is None
    assert run.data.tags["ramen.stage"] == "warmup" and run.data.tags["ramen.version"]
    assert run.data.params["training.lr"] == "0.0001" and len(run.data.params["data.path"]) == 500
    history = new_client().get_metric_history(track.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]


@pytest.mark.usefixtures("store")
def test_stages_of_ramen_run_are_children_of_the_pipeline_run(tmp_path: Path) -> None:
    with start_pipeline_run("ramen", "data: {}\n", {"ramen.arm": "ramen"}) as parent:
        assert os.environ["RAMEN_PARENT_RUN"] == parent
        with open_tracker("evaluate") as track:
            track.params({"scoring.quantiles": 5})
            track.headline({"p_at_1": 40.0})
            with track.child("round-1", {"ramen.round": "1"}) as child:
                child.log({"x": 1.0})
    assert "RAMEN_PARENT_RUN" not in os.environ
    pipeline, stage, nested = new_client().get_run(parent), read_run(track), read_run(child)
    assert parent_id(stage) == parent and parent_id(nested) == track.run_id
    assert nested.data.tags["ramen.round"] == "1" and nested.info.status == "FINISHED"
    assert pipeline.data.metrics == {"p_at_1": 40.0} == stage.data.metrics, "compare reads these"
    assert pipeline.data.params == {"scoring.quantiles": "5"} and pipeline.data.tags["ramen.arm"] == "ramen"
    assert Path(new_client().download_artifacts(parent, "config.yaml", str(tmp_path))).read_text() == "data: {}\n"


@pytest.mark.usefixtures("store")
def test_pipeline_run_has_the_curves_of_all_stages() -> None:
    with start_pipeline_run("ramen", "data: {}\n") as parent:
        for stage, steps in (("warmup", (10, 20)), ("prune-retrain", (30, 40))):
            with open_tracker(stage) as track:
                for step in steps:
                    track.curve({"train/loss": 1.0 / step, "heldout/p_at_1": float(step)}, step)
                track.log({"val_p_at_1": 40.0})
    for key in ("train/loss", "heldout/p_at_1"):
        assert [point.step for point in new_client().get_metric_history(parent, key)] == [10, 20, 30, 40]
        assert [point.step for point in new_client().get_metric_history(track.run_id, key)] == [30, 40]
    assert set(new_client().get_run(parent).data.metrics) == {"train/loss", "heldout/p_at_1"}


@pytest.mark.usefixtures("store")
def test_pods_of_a_kubeflow_run_share_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "run-7")
    trackers = []
    for stage in ("ingest", "warmup"):
        with open_tracker(stage) as track:
            trackers.append(track)
    first, second = (parent_id(read_run(track)) for track in trackers)
    assert first is not None and first == second
    pipeline = new_client().get_run(first)
    assert pipeline.data.tags["ramen.pipeline_key"] == "kfp:run-7" and pipeline.info.status == "FINISHED"
    monkeypatch.setenv("KFP_RUN_ID", "run-8")
    with open_tracker("ingest") as other:
        pass
    assert parent_id(read_run(other)) not in (None, first)


@pytest.mark.usefixtures("store")
def test_shared_parent_has_the_status_of_its_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process runs as long as a Kubeflow run, so otherwise the parent would stay RUNNING."""
    monkeypatch.setenv("KFP_RUN_ID", "run-9")
    with pytest.raises(RamenError), open_tracker("warmup"):
        raise RamenError("no room on the device")
    (pipeline,) = list_pipeline_runs()
    assert (pipeline.status, pipeline.tags["ramen.error"]) == ("FAILED", "no room on the device")
    with open_tracker("warmup"):
        (pipeline,) = list_pipeline_runs()
        assert pipeline.status == "RUNNING", "the pod is retried"
    (pipeline,) = list_pipeline_runs()
    assert pipeline.status == "FINISHED" and "ramen.error" not in pipeline.tags


def test_stages_of_a_dvc_repro_share_a_pipeline_key(tmp_path: Path) -> None:
    """A program named dvc starts Python twice through a shell, like `dvc repro`."""
    code = "from ramen.provenance import pipeline_key; print(pipeline_key())"
    dvc = tmp_path / "dvc"
    dvc.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"for _ in range(2): subprocess.run(['sh', '-c', sys.executable + ' -c {code!r}; true'], check=True)\n".replace(
            repr(code), '"' + code + '"'
        )
    )
    dvc.chmod(0o755)
    environment = {**os.environ, "DVC_STAGE": "warmup"}
    runs = [
        subprocess.run([sys.executable, str(dvc)], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    keys = [run.split() for run in runs]
    assert keys[0][0] == keys[0][1] and keys[0][0].startswith("dvc:") and keys[0][0] != keys[1][0]


def test_single_stage_has_no_pipeline_key() -> None:
    assert pipeline_key() is None


@pytest.mark.usefixtures("store")
def test_run_of_the_kubeflow_plugin_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = new_client().create_experiment("somebody else's")
    given = new_client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with open_tracker("warmup") as track:
        assert track.run_id == given and "MLFLOW_RUN_ID" not in os.environ, "child processes must not resume the run"
        track.log({"loss": 1.0})
        with track.child("round-1") as child:
            pass
    assert new_client().get_run(given).data.metrics == {"loss": 1.0}
    assert read_run(child).info.experiment_id == experiment and parent_id(read_run(child)) == given
    assert new_client().get_experiment_by_name("ramen") is None, "no other experiment is created"


@pytest.mark.usefixtures("store")
def test_pipelines_of_the_kubeflow_plugin_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "the plugin's")
    experiment = new_client().create_experiment("the plugin's")
    parent = new_client().create_run(experiment).info.run_id
    for number in range(2):
        given = new_client().create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id
        monkeypatch.setenv("MLFLOW_RUN_ID", given)
        monkeypatch.setenv("KFP_RUN_ID", "run-7")
        with open_tracker("evaluate") as track:
            track.headline({"p_at_1": 40.0 + number})
    (listed,) = list_pipeline_runs()
    assert listed.run_id == parent and listed.metrics == {"p_at_1": 41.0}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("error", "status"),
    [(RamenError("line one", "line two"), "FAILED"), (Interrupted("stopped"), "KILLED"), (ValueError(), "FAILED")],
)
def test_run_has_the_status_of_its_stage(error: Exception, status: str) -> None:
    with pytest.raises(type(error)), open_tracker("ingest") as track:
        raise error
    run = read_run(track)
    assert run.info.status == status
    if status == "FAILED":
        assert run.data.tags["ramen.error"] == ("line one" if str(error) else "ValueError")


@pytest.mark.usefixtures("store")
def test_values_that_are_not_finite_become_tags() -> None:
    with open_tracker("warmup") as track:
        track.log({"good": 1.0, "train/bad": float("nan"), "worse": float("inf")})
    run = read_run(track)
    assert run.data.metrics == {"good": 1.0}
    assert run.data.tags["ramen.not_finite.train.bad"] == "nan"


@pytest.mark.usefixtures("store")
def test_input_artifacts_files_and_folders_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "page.html").write_text("x")
    with open_tracker("evaluate") as track:
        track.dataset("graph", "f" * 64, "artifacts/graph")
        track.artifact(tmp_path / "report", "report")
        track.artifact(tmp_path / "report" / "page.html")
    (used,) = read_run(track).inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("graph", "f" * 36)
    stored = {file.path for folder in ("", "report") for file in new_client().list_artifacts(track.run_id, folder)}
    assert {"report/page.html", "page.html"} <= stored


@pytest.mark.usefixtures("store")
def test_every_run_has_the_git_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMEN_GIT_SHA", "abc123")
    with open_tracker("warmup") as track, track.child("round-1") as child:
        pass
    assert read_run(track).data.tags["mlflow.source.git.commit"] == "abc123"
    assert read_run(child).data.tags["mlflow.source.git.commit"] == "abc123"


@pytest.mark.usefixtures("store")
def test_list_pipeline_runs_returns_the_newest_first_without_stages() -> None:
    for name in ("base", "ramen"):
        with start_pipeline_run(name, ""), open_tracker("evaluate") as track:
            track.headline({"p_at_1": float(len(name))})
    found = list_pipeline_runs()
    assert [(run.name, run.status, run.metrics["p_at_1"]) for run in found] == [
        ("ramen", "FINISHED", 5.0), ("base", "FINISHED", 4.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("store")
def test_compare_shows_the_data_of_each_run() -> None:
    for path, most in (("data/LF-Things", 0), ("data/debian.jsonl.gz", 2000)):
        sections = {"data": {"path": path, "max_documents": most}}
        with start_pipeline_run("ramen", "", {}, sections), open_tracker("evaluate") as track:
            track.headline({"p_at_1": 41.5})
    lines = CliRunner().invoke(cli, ["compare"]).output.splitlines()
    assert "data" in lines[0] or "data" in lines[1]
    assert [("LF-Things" in line, "debian 2,000" in line) for line in lines if "41.50" in line] == [
        (False, True), (True, False),
    ]  # fmt: skip


@pytest.mark.parametrize("command", [["compare"], ["registry"], ["rollback"], ["promote", "1"], ["query", "mail"]])
def test_reading_commands_do_not_create_a_store(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1 and result.output.startswith(f"error: no tracking database at sqlite:///{tmp_path}")
    assert not list(tmp_path.iterdir())


def test_store_works_in_a_folder_with_a_space_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "my für runs"
    here.mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(here)
    with start_pipeline_run("ramen", ""), open_tracker("ingest"):
        pass
    result = CliRunner().invoke(cli, ["compare"])
    assert result.exit_code == 0 and "ramen" in result.output


@pytest.mark.usefixtures("store")
def test_compare_reports_a_store_without_pipelines() -> None:
    with open_tracker("ingest"):
        pass  # a single stage is not a pipeline
    result = CliRunner().invoke(cli, ["compare"])
    assert result.exit_code == 1 and "MLflow has no pipeline runs; start one with `ramen run`" in result.output


def test_ramen_tracking_off_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with start_pipeline_run("x", "") as parent, open_tracker("ingest") as track:
        assert parent is None and isinstance(track, NullTracker)
        with track.child("round-1") as child:
            child.log({"a": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_concurrent_processes_create_one_store(tmp_path: Path) -> None:
    code = "import mlflow\nfrom ramen.tracking.store import Store\ninput()\nprint(Store.connect().experiment_id)"
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new.db"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in processes]
    assert [stdout.strip() for stdout, _ in outputs] == ["1"] * 3, outputs


@pytest.mark.usefixtures("store")
def test_run_finishes_with_a_warning_when_files_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    (tmp_path / "file").write_text("in the way")
    mlflow.create_experiment("closed", str(tmp_path / "file" / "artifacts"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "closed")
    with start_pipeline_run("ramen", "a: 1") as run:
        pass
    assert mlflow.MlflowClient().get_run(run).info.status == "FINISHED"
    assert "1 writes are pending in" in capsys.readouterr().err


@pytest.mark.slow
def test_unreachable_store_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    mlflow.set_tracking_uri(None)
    with (
        pytest.raises(
            RamenError, match=r"MLflow store http://127.0.0.1:9: cannot be used .*RAMEN_TRACKING=off"
        ) as caught,
        open_tracker("ingest"),
    ):
        pass
    assert "\n" not in str(caught.value) and "Connection refused)" in str(caught.value)
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ, "the retry settings of connecting end with it"


def test_unreadable_dvc_file_is_skipped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.dvc").write_text("outs:\n- md5: 0123abcd\n  path: data\n")
    assert provenance_tags()["dvc.data"] == "0123abcd"
    Path("data.dvc").write_text("a: &a [*a]\n")
    assert "dvc.data" not in provenance_tags()
    assert capsys.readouterr().err.startswith("warning: data.dvc:1: not valid YAML (an alias contains itself")
