"""The pipeline on Kubeflow's local runner: end to end, with its cache, and its terminal output."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import psutil
import pytest
from small_pipeline import SMALL

from pipelines.console import Console
from pipelines.local import _link, run_local
from ramen.artifacts import open_artifact
from ramen.config import Config, resolve
from ramen.errors import DataError, Interrupted, RamenError
from ramen.stages import STAGES
from ramen.tracking import start_pipeline_run


def make_config(folder: Path, *more: str) -> Config:
    return resolve(preset="demo", sets=[f"data.path={folder}", *SMALL, *more])


def computed_stages(text: str) -> list[str]:
    """Return the stages that the console reports as computed."""
    return [line.split("] ")[1].split(":")[0] for line in text.splitlines() if ": done in " in line]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_pipeline_runs_is_tracked_and_cached(
    xc_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    out, pairs = tmp_path / "out", xc_folder / "trn_X_Y.txt"
    pairs.write_text("\n".join(["" if row == 8 else line for row, line in enumerate(pairs.read_text().split("\n"))]))
    with start_pipeline_run("ramen", "") as parent:
        made = run_local(make_config(xc_folder), out, arm="ramen")
    printed = capsys.readouterr().err
    assert computed_stages(printed) == list(STAGES)
    assert f"  warning: {pairs}: 1 documents have no label (first: row 8)\n" in printed
    for name, path in made.items():
        assert path == out / "ramen" / name and path.is_symlink()
        open_artifact(path, name)
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("ramen").experiment_id])
    children = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent}
    assert set(children) == set(STAGES)
    assert {run.info.status for run in runs} == {"FINISHED"}
    files = [path for path in (out / ".kfp").rglob("*") if path.is_file()]
    assert files and {path.stat().st_mode & 0o777 for path in files} == {out.stat().st_mode & 0o666}
    rounds = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == children["prune-retrain"].info.run_id]
    assert [run.info.run_name for run in rounds] == ["round-1"]
    parent_run = client.get_run(parent)
    assert parent_run.data.metrics["p_at_1"] == children["evaluate"].data.metrics["p_at_1"]
    assert parent_run.data.params["training.epochs"] == "2" and parent_run.data.params["walk.hops"] == "20"
    logged = {file.path for file in client.list_artifacts(children["evaluate"].info.run_id)}
    assert "report.html" in logged

    with start_pipeline_run("again", "", sections={"walk": {"hops": 20}}) as again:
        run_local(make_config(xc_folder, "index.ef_search=16"), out, arm="ramen")
    printed = capsys.readouterr().err
    runs = client.search_runs([client.get_experiment_by_name("ramen").experiment_id])
    stages = {r.info.run_name: r.data for r in runs if r.data.tags.get("mlflow.parentRunId") == again}
    ids = {r.info.run_name: r.info.run_id for r in runs if r.data.tags.get("mlflow.parentRunId") == again}
    assert set(stages) == set(STAGES), "cached stages are recorded as children, too"
    assert stages["warmup"].tags["ramen.cached"] == "true" and "ramen.cached" not in stages["publish-index"].tags
    assert stages["evaluate"].metrics["p_at_1"] == children["evaluate"].data.metrics["p_at_1"]
    assert client.get_run(again).data.params["walk.hops"] == "20"
    assert client.get_run(again).data.metrics == children["evaluate"].data.metrics, "`ramen compare` shows them"
    for run_id in (children["evaluate"].info.run_id, ids["evaluate"]):
        stored = {file.path for file in client.list_artifacts(run_id)}
        assert stored == {"report.html", "metrics.json", "per_document.parquet", "figures"}
    assert [file.path for file in client.list_artifacts(ids["ingest"], "validation")]
    for name in ("ingest", "warmup", "evaluate"):
        assert stages[name].params == children[name].data.params
    assert computed_stages(printed) == ["publish-index"], "it has side effects; the others come from the cache"
    assert printed.count("from the cache") == 5

    broken = xc_folder / "raw_data" / "label.raw.txt"
    broken.unlink()
    with pytest.raises(RamenError, match=r"ingest: .*label\.raw\.txt") as caught:
        run_local(make_config(xc_folder), out, arm="ramen")
    printed = capsys.readouterr().err
    assert "Traceback" not in str(caught.value) + printed and "exit code" not in printed
    assert caught.value.exit_code == DataError.exit_code, "the exit code of the stage"
    open_artifact(made["model"], "model")


@pytest.mark.slow
def test_sigterm_ends_the_running_stage_with_a_checkpoint(
    xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this process receives the signal, as from a service manager; the stage is a grandchild."""
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    print_line = Console._print

    def print_and_stop(console: Console, line: str) -> None:
        print_line(console, line)
        if "warmup epoch 2 " in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Console, "_print", print_and_stop)
    before = set(psutil.Process().children(recursive=True))  # servers of other tests
    long_training = make_config(xc_folder, "training.epochs=9999", "training.warmup_epochs=9999")
    with pytest.raises(Interrupted, match=r"warmup: .*a checkpoint was written"):
        run_local(long_training, tmp_path / "out", arm="ramen")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert any((tmp_path / "ramen-work").glob("warmup-*/*"))


def test_stop_between_two_stages_starts_no_further_stage() -> None:
    console = Console(io.StringIO())
    console.record("Executing task 'ingest'")
    console.stop()
    console.record("Task 'ingest' finished with status SUCCESS")
    with pytest.raises(KeyboardInterrupt):
        console.record("Executing task 'build-graph'")


def test_console_prints_stages_and_their_lines_but_not_the_lines_of_the_runner() -> None:
    stream, time = io.StringIO(), iter([1.0, 3.5])
    console = Console(stream, clock=lambda: next(time))
    console.write(
        "10:00:00.000 - INFO - Executing task \x1b[96m'warmup'\x1b[0m\n10:00:00.001 - INFO - Streamed logs:\n\n"
        '    [KFP Executor 2026-01-01 10:00:00,000 INFO]: Got executor_input:\n    {\n        "inputs": {\n    }\n'
        "    warmup epoch 1 loss 0.5\n        error: x.txt:3: bad\n"
        "10:00:02.000 - INFO - Task \x1b[96m'warmup'\x1b[0m finished with status \x1b[92mSUCCESS\x1b[0m\n"
        "10:00:02.000 - INFO - Task \x1b[96m'warmup'\x1b[0m outputs:\n    model: Model( name='model' )\n"
    )
    console.record("Task evaluate cache hit (key=0123); skipping execution.")
    assert stream.getvalue().splitlines() == [
        "[3/6] warmup", "  warmup epoch 1 loss 0.5", "[3/6] warmup: done in 2.5 s", "[5/6] evaluate: from the cache",
    ]  # fmt: skip
    assert console.failure() == "warmup: x.txt:3: bad"


def test_failure_without_an_error_line_shows_the_last_lines() -> None:
    console = Console(io.StringIO())
    console.write("10:00:00.000 - INFO - Executing task 'ingest'\n10:00:00.001 - INFO - Streamed logs:\n\n")
    console.write("    one\n    two\n    three\n    ValueError: four\n")
    assert console.failure() == "ingest: two\ningest: three\ningest: ValueError: four"


def test_link_replaces_an_older_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    path = _link(tmp_path / "out" / "model", tmp_path / "a")
    assert path.resolve() == tmp_path / "a"
    assert _link(tmp_path / "out" / "model", tmp_path / "b").resolve() == tmp_path / "b"


@pytest.mark.parametrize("folder", [True, False])
def test_file_in_place_of_a_link_is_kept_and_refused_before_anything_runs(folder: bool, tmp_path: Path) -> None:
    existing = tmp_path / "out" / "ramen" / "graph"
    existing.parent.mkdir(parents=True)
    existing.mkdir() if folder else existing.write_text("mine")
    with pytest.raises(
        RamenError, match="ramen/graph: is not a link, but the run places a link to its graph there; move it away"
    ):
        run_local(make_config(tmp_path), tmp_path / "out", arm="ramen")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ramen"] and existing.exists()
