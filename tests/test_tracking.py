"""Runs as MLflow holds them, whichever front started the stage."""

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
from ramen.provenance import pipeline_key, provenance
from ramen.tracking import NullTracker, Tracker, list_pipeline_runs, open_tracker, start_pipeline_run


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def run_of(tracker: Tracker) -> Any:
    return client().get_run(tracker.run_id)


def parent_of(run: Any) -> str | None:
    return run.data.tags.get("mlflow.parentRunId")


@pytest.mark.usefixtures("store")
def test_a_stage_alone_is_a_run_of_its_own() -> None:
    with open_tracker("warmup") as track:
        track.params({"training.lr": 1e-4, "objective.lambdas": {"a.label": 0.5}, "data.path": "x" * 900})
        track.log({"loss": 0.5}, step=1)
        track.log({"loss": 0.25}, step=2)
    run = run_of(track)
    assert run.info.status == "FINISHED" and parent_of(run) is None
    assert run.data.tags["ramen.stage"] == "warmup" and run.data.tags["ramen.version"]
    assert run.data.params["training.lr"] == "0.0001" and len(run.data.params["data.path"]) == 500
    history = client().get_metric_history(track.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]


@pytest.mark.usefixtures("store")
def test_stages_of_ramen_run_are_children_of_its_run(tmp_path: Path) -> None:
    with start_pipeline_run("ramen", "data: {}\n", {"ramen.arm": "ramen"}) as parent:
        assert os.environ["RAMEN_PARENT_RUN"] == parent
        with open_tracker("evaluate") as track:
            track.params({"scoring.quantiles": 5})
            track.headline({"p_at_1": 40.0})
            with track.child("round-1", {"ramen.round": "1"}) as child:
                child.log({"x": 1.0})
    assert "RAMEN_PARENT_RUN" not in os.environ
    whole, stage, nested = client().get_run(parent), run_of(track), run_of(child)
    assert parent_of(stage) == parent and parent_of(nested) == track.run_id
    assert nested.data.tags["ramen.round"] == "1" and nested.info.status == "FINISHED"
    assert whole.data.metrics == {"p_at_1": 40.0} == stage.data.metrics, "pipelines compare row by row"
    assert whole.data.params == {"scoring.quantiles": "5"} and whole.data.tags["ramen.arm"] == "ramen"
    assert Path(client().download_artifacts(parent, "config.yaml", str(tmp_path))).read_text() == "data: {}\n"


@pytest.mark.usefixtures("store")
def test_curves_of_all_stages_are_one_piece_on_the_pipelines_run() -> None:
    with start_pipeline_run("ramen", "data: {}\n") as parent:
        for stage, steps in (("warmup", (10, 20)), ("prune-retrain", (30, 40))):
            with open_tracker(stage) as track:
                for step in steps:
                    track.curve({"train/loss": 1.0 / step, "heldout/p_at_1": float(step)}, step)
                track.log({"val_p_at_1": 40.0})
    for key in ("train/loss", "heldout/p_at_1"):
        assert [point.step for point in client().get_metric_history(parent, key)] == [10, 20, 30, 40]
        assert [point.step for point in client().get_metric_history(track.run_id, key)] == [30, 40]
    assert set(client().get_run(parent).data.metrics) == {"train/loss", "heldout/p_at_1"}


@pytest.mark.usefixtures("store")
def test_pods_of_one_kubeflow_run_share_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "run-7")
    trackers = []
    for stage in ("ingest", "warmup"):
        with open_tracker(stage) as track:
            trackers.append(track)
    first, second = (parent_of(run_of(track)) for track in trackers)
    assert first is not None and first == second
    whole = client().get_run(first)
    assert whole.data.tags["ramen.pipeline_key"] == "kfp:run-7" and whole.info.status == "FINISHED"
    monkeypatch.setenv("KFP_RUN_ID", "run-8")
    with open_tracker("ingest") as other:
        pass
    assert parent_of(run_of(other)) not in (None, first)


@pytest.mark.usefixtures("store")
def test_a_shared_parent_ends_as_its_last_stage_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process lives as long as a Kubeflow run: without this its run would be RUNNING for ever."""
    monkeypatch.setenv("KFP_RUN_ID", "run-9")
    with pytest.raises(RamenError), open_tracker("warmup"):
        raise RamenError("no room on the device")
    (whole,) = list_pipeline_runs()
    assert (whole.status, whole.tags["ramen.error"]) == ("FAILED", "no room on the device")
    with open_tracker("warmup"):
        (whole,) = list_pipeline_runs()
        assert whole.status == "RUNNING", "the pod is tried again"
    (whole,) = list_pipeline_runs()
    assert whole.status == "FINISHED" and "ramen.error" not in whole.tags


def test_stages_of_one_dvc_repro_share_a_key(tmp_path: Path) -> None:
    """A program called dvc starts two shells that start Python, as `dvc repro` does."""
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


def test_no_front_no_key() -> None:
    assert pipeline_key() is None


@pytest.mark.usefixtures("store")
def test_a_run_given_by_kubeflows_own_plugin_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = client().create_experiment("somebody else's")
    given = client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with open_tracker("warmup") as track:
        assert track.run_id == given and "MLFLOW_RUN_ID" not in os.environ, "no child process may take the run for its"
        track.log({"loss": 1.0})
        with track.child("round-1") as child:
            pass
    assert client().get_run(given).data.metrics == {"loss": 1.0}
    assert run_of(child).info.experiment_id == experiment and parent_of(run_of(child)) == given
    assert client().get_experiment_by_name("ramen") is None, "an experiment nobody asked for"


@pytest.mark.usefixtures("store")
def test_pipelines_of_kubeflows_own_plugin_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "the plugin's")
    experiment = client().create_experiment("the plugin's")
    parent = client().create_run(experiment).info.run_id
    for number in range(2):
        given = client().create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id
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
def test_a_run_ends_as_its_stage_ended(error: Exception, status: str) -> None:
    with pytest.raises(type(error)), open_tracker("ingest") as track:
        raise error
    run = run_of(track)
    assert run.info.status == status
    if status == "FAILED":
        assert run.data.tags["ramen.error"] == ("line one" if str(error) else "ValueError")


@pytest.mark.usefixtures("store")
def test_values_that_are_not_finite_spoil_no_chart() -> None:
    with open_tracker("warmup") as track:
        track.log({"good": 1.0, "train/bad": float("nan"), "worse": float("inf")})
    run = run_of(track)
    assert run.data.metrics == {"good": 1.0}
    assert run.data.tags["ramen.not_finite.train.bad"] == "nan"


@pytest.mark.usefixtures("store")
def test_inputs_files_and_folders_are_stored(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "page.html").write_text("x")
    with open_tracker("evaluate") as track:
        track.dataset("graph", "f" * 64, "artifacts/graph")
        track.artifact(tmp_path / "report", "report")
        track.artifact(tmp_path / "report" / "page.html")
    (used,) = run_of(track).inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("graph", "f" * 36)
    stored = {file.path for folder in ("", "report") for file in client().list_artifacts(track.run_id, folder)}
    assert {"report/page.html", "page.html"} <= stored


@pytest.mark.usefixtures("store")
def test_the_commit_is_on_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMEN_GIT_SHA", "abc123")
    with open_tracker("warmup") as track, track.child("round-1") as child:
        pass
    assert run_of(track).data.tags["mlflow.source.git.commit"] == "abc123"
    assert run_of(child).data.tags["mlflow.source.git.commit"] == "abc123"


@pytest.mark.usefixtures("store")
def test_pipeline_runs_are_listed_newest_first_without_their_stages() -> None:
    for name in ("base", "ramen"):
        with start_pipeline_run(name, ""), open_tracker("evaluate") as track:
            track.headline({"p_at_1": float(len(name))})
    found = list_pipeline_runs()
    assert [(run.name, run.status, run.metrics["p_at_1"]) for run in found] == [
        ("ramen", "FINISHED", 5.0), ("base", "FINISHED", 4.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("store")
def test_compared_runs_say_what_data_they_saw() -> None:
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
def test_to_ask_a_store_that_is_not_there_makes_none(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    asked = CliRunner().invoke(cli, command)
    assert asked.exit_code == 1 and asked.output.startswith(f"error: no tracking database at sqlite:///{tmp_path}")
    assert not list(tmp_path.iterdir())


def test_a_folder_may_have_a_space_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "my für runs"
    here.mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(here)
    with start_pipeline_run("ramen", ""), open_tracker("ingest"):
        pass
    asked = CliRunner().invoke(cli, ["compare"])
    assert asked.exit_code == 0 and "ramen" in asked.output


@pytest.mark.usefixtures("store")
def test_a_store_without_pipelines_says_so() -> None:
    with open_tracker("ingest"):
        pass  # a stage alone is no pipeline
    asked = CliRunner().invoke(cli, ["compare"])
    assert asked.exit_code == 1 and "no pipeline runs in MLflow yet: `ramen run` makes them" in asked.output


def test_tracking_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with start_pipeline_run("x", "") as parent, open_tracker("ingest") as track:
        assert parent is None and isinstance(track, NullTracker)
        with track.child("round-1") as child:
            child.log({"a": 1.0})
    assert not list(tmp_path.iterdir())


def test_processes_that_start_at_once_share_a_new_store(tmp_path: Path) -> None:
    code = "import mlflow\nfrom ramen.tracking.runs import Store\ninput()\nprint(Store.connect().experiment_id)"
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new.db"}
    several = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    for each in several:
        assert each.stdin
        each.stdin.write("\n")
        each.stdin.flush()
    said = [each.communicate() for each in several]
    assert [out.strip() for out, _ in said] == ["1"] * 3, said


@pytest.mark.usefixtures("store")
def test_a_store_that_takes_no_file_now_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    (tmp_path / "file").write_text("in the way")
    mlflow.create_experiment("closed", str(tmp_path / "file" / "artifacts"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "closed")
    with start_pipeline_run("ramen", "a: 1") as run:
        pass
    assert mlflow.MlflowClient().get_run(run).info.status == "FINISHED"
    assert "1 writes are kept in" in capsys.readouterr().err


def test_a_store_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ, "a run under way is as patient as MLflow is"


def test_file_of_dvc_that_cannot_be_read_costs_its_tags_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.dvc").write_text("outs:\n- md5: 0123abcd\n  path: data\n")
    assert provenance()["dvc.data"] == "0123abcd"
    Path("data.dvc").write_text("a: &a [*a]\n")
    assert "dvc.data" not in provenance()
    assert capsys.readouterr().err.startswith("warning: data.dvc:1: not valid YAML (an alias contains itself")
