"""`ramen gc`: what is deleted, what is kept, and that later runs can resume."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_pipeline import SMALL

from pipelines.local import run_local
from ramen.ablation.run import run_row
from ramen.artifacts import DRAFT_MARKER, Artifact, create_drafts, open_artifact
from ramen.cli import cli
from ramen.config import Config, resolve
from ramen.errors import ArtifactError, RamenError, StateRemoved
from ramen.files import write_json
from ramen.stages import STAGES, run_stage

STATE = "training_state.safetensors"


def make_config(source: Path, *more: str) -> Config:
    return resolve(preset="demo", sets=[f"data.path={source}", "index.model=", *SMALL, *more])


def gc(*words: str) -> str:
    """Run `ramen gc` and return its output."""
    done = CliRunner().invoke(cli, ["gc", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def write_run(run: Path, stages: list[str], seed: int) -> None:
    """Write finished artifacts in the layout of the local runner, each with a file that depends on the seed."""
    made: dict[str, Artifact] = {}
    for name in stages:
        stage = STAGES[name]
        places = {artifact: run / name / artifact for artifact in stage.writes}
        inputs = {key: made[key] for key in stage.reads if key in made}
        with create_drafts(places, sections={}, inputs=inputs, work=run / "work") as written:
            for draft in written.values():
                (draft.path / "file").write_text(f"{name} {seed}")
                if name == "warmup":
                    (draft.path / STATE).write_text("x" * 1000)
        (run / name / "scalars").write_text("{}")
        made |= {key: open_artifact(place, key) for key, place in places.items()}


def link_artifacts(out: Path, run: Path) -> None:
    """Link a run's artifacts as the latest results."""
    for place in run.glob("*/*/manifest.json"):
        name = out / "ramen" / place.parent.name
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        name.symlink_to(os.path.relpath(place.parent, name.parent))


def make_old(root: Path) -> None:
    """Make everything under a folder look minutes old."""
    for place in root.rglob("*"):
        os.utime(place, (time.time() - 1000,) * 2, follow_symlinks=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with three runs: replaced, interrupted after warm-up, and latest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    runs = Path("artifacts/.kfp")
    write_run(runs / "ramen-1", list(STAGES), 1)
    write_run(runs / "ramen-2", ["ingest", "build-graph", "warmup"], 2)
    write_run(runs / "ramen-3", list(STAGES), 3)
    link_artifacts(Path("artifacts"), runs / "ramen-3")
    make_old(runs)
    return tmp_path


def modification_times(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_gc_deletes_replaced_results_and_training_state_only(here: Path) -> None:
    output = gc()
    assert [path.name for path in sorted(Path("artifacts/.kfp").iterdir())] == ["ramen-2", "ramen-3"]
    assert Path(f"artifacts/.kfp/ramen-2/warmup/warm_model/{STATE}").is_file(), "its prune-retrain has not finished"
    assert not Path(f"artifacts/ramen/warm_model/{STATE}").exists()
    for name in Path("artifacts/ramen").iterdir():
        open_artifact(name, name.name)
    assert output.count("replaced by a later run") == len(STAGES)
    assert f"1,000  artifacts/.kfp/ramen-3/warmup/warm_model/{STATE}: training state; prune-retrain has" in output
    assert gc().split() == ["0", "bytes", "deleted"]


def test_dry_run_lists_the_same_and_deletes_nothing(here: Path) -> None:
    before = modification_times(here)
    planned = gc("--dry-run")
    assert modification_times(here) == before
    assert gc() == planned.replace("would be deleted", "deleted")


def test_gc_keeps_the_inputs_of_a_checkpoint(here: Path) -> None:
    """An interrupted prune-retrain with other settings reads a warm model whose state nothing else needs."""
    for run in ("ramen-1", "ramen-3"):
        digest = open_artifact(f"artifacts/.kfp/{run}/warmup/warm_model", "warm_model").digest
        write_json(here / "ramen-work" / f"prune-retrain-{run}" / "task.json", {"inputs": {"warm_model": digest}})
    gc()
    assert Path(f"artifacts/ramen/warm_model/{STATE}").is_file()
    assert [path.name for path in Path("artifacts/.kfp/ramen-1").iterdir()] == ["warmup"]


def test_gc_keeps_files_that_ramen_did_not_write(here: Path) -> None:
    Path("artifacts/.kfp/ramen-1/evaluate/notes.txt").write_text("mine")
    Path("artifacts/mine").mkdir()
    gc()
    assert (
        Path("artifacts/.kfp/ramen-1/evaluate/evaluation/manifest.json").is_file() and Path("artifacts/mine").is_dir()
    )


@pytest.mark.parametrize(
    "note", [".notes", "evaluation/notes.txt", "evaluation/.notes", ".evaluation.backup.tmp/notes"]
)
def test_gc_keeps_results_with_files_that_ramen_did_not_write(note: str, here: Path) -> None:
    file = Path("artifacts/.kfp/ramen-1/evaluate") / note
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    make_old(file.parent)
    gc("--unfinished")
    assert file.read_text() == "mine"
    assert [path.name for path in Path("artifacts/.kfp/ramen-1").iterdir()] == ["evaluate"]


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", '{"files": 3}'])
def test_gc_keeps_results_whose_manifest_is_damaged(garbage: str, here: Path) -> None:
    file = Path("artifacts/.kfp/ramen-1/evaluate/evaluation/manifest.json")
    file.write_text(garbage)
    make_old(file.parent.parent)
    gc()
    assert file.read_text() == garbage and (file.parent / "file").is_file()


def test_gc_is_refused_when_the_task_of_a_checkpoint_is_damaged(here: Path) -> None:
    work = here / "ramen-work" / "prune-retrain-1"
    (work / "checkpoints" / "1").mkdir(parents=True)
    (work / "task.json").write_text("{")
    before = modification_times(here)
    done = CliRunner().invoke(cli, ["gc"])
    assert (
        done.exit_code == 4
        and f"error: {work}/task.json: damaged" in done.output
        and modification_times(here) == before
    )
    (work / "checkpoints" / "1").rmdir()
    (work / "checkpoints").rmdir()
    gc()


def test_gc_deletes_no_result_without_links_to_the_latest(here: Path) -> None:
    for place in Path("artifacts/ramen").iterdir():
        place.unlink()
    assert "replaced" not in gc() and Path("artifacts/.kfp/ramen-1/evaluate/evaluation").is_dir()


def test_gc_unfinished_deletes_unfinished_runs_and_old_drafts(here: Path) -> None:
    abandoned = Path("artifacts/.kfp/ramen-3/evaluate/.evaluation.12345678.tmp")
    abandoned.mkdir()
    (abandoned / "file").write_text("half")
    (abandoned / DRAFT_MARKER).touch()
    young = Path("artifacts/.kfp/ramen-3/ingest/.dataset.12345678.tmp")
    young.mkdir()
    os.utime(abandoned, (time.time() - 1000,) * 2)
    output = gc("--unfinished")
    assert (
        not abandoned.exists() and young.is_dir() and "4  " in output and "draft of a process that was killed" in output
    )
    assert [path.name for path in Path("artifacts/.kfp").iterdir()] == ["ramen-3"]


def test_gc_is_refused_while_a_run_is_in_progress(here: Path) -> None:
    draft = Path("artifacts/.kfp/ramen-2/prune-retrain/.model.12345678.tmp")
    draft.mkdir(parents=True)
    (draft / DRAFT_MARKER).touch()
    for place in (draft, draft.parent):
        os.utime(place, (time.time() - 1000,) * 2)
    handle = os.open(draft, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = modification_times(here)
    done = CliRunner().invoke(cli, ["gc", "--unfinished"])
    os.close(handle)
    assert done.exit_code == 1 and "ramen-2: a run is in progress" in done.output and modification_times(here) == before
    gc()


def test_gc_keeps_linked_runs_and_foreign_files(here: Path) -> None:
    runs, elsewhere = Path("artifacts/.kfp"), Path("elsewhere")
    (runs / "ramen-1").rename(elsewhere)
    (runs / "ramen-1").symlink_to(elsewhere.absolute())
    (runs / "ramen-0").write_text("a file of the user")
    write_run(runs / "ramen-4", list(STAGES), 4)
    mine = runs / "ramen-4/ingest/mine"
    mine.mkdir()
    (mine / DRAFT_MARKER).touch()
    (mine / "notes").write_text("kept")
    make_old(runs)
    before = set(modification_times(elsewhere))
    gc()
    assert set(modification_times(elsewhere)) == before and (mine / "notes").exists() and (runs / "ramen-0").exists()


def test_gc_survives_link_loops_devices_and_pipes(here: Path) -> None:
    runs = Path("artifacts/.kfp")
    Path("artifacts/ramen/loop").symlink_to("loop")
    (runs / "cache").mkdir()
    (runs / "cache/zero.json").symlink_to("/dev/zero")
    os.mkfifo(runs / "cache/pipe.json")
    manifest = runs / "ramen-1/ingest/dataset/manifest.json"
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    make_old(runs)
    gc()
    assert not (runs / "ramen-1/warmup").exists() and manifest.parent.exists()


def test_gc_without_results_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["gc"])
    assert done.exit_code == 1 and done.output.startswith("error: artifacts: no results of `ramen run`")


def test_prune_retrain_without_training_state_is_refused(here: Path) -> None:
    gc()
    inputs = {name: Path("artifacts/ramen") / name for name in ("dataset", "graph", "warm_model")}
    with pytest.raises(StateRemoved, match=r"warm_model: the training state was removed by `ramen gc`; run `ramen wa"):
        run_stage("prune-retrain", sections={}, inputs=inputs)


@pytest.mark.slow
def test_study_repeats_warmup_only_if_the_training_state_is_needed(
    tiny_xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    cache = Path("ablations/cache")
    first = run_row(make_config(tiny_xc_folder), cache)
    (warm,) = cache.glob("warmup-*/warm_model")
    digest = open_artifact(warm, "warm_model").digest
    assert str(warm / STATE) in gc() and not (warm / STATE).exists()
    before = modification_times(cache)
    assert run_row(make_config(tiny_xc_folder), cache) == first and modification_times(cache) == before, (
        "all from the cache"
    )
    other = run_row(make_config(tiny_xc_folder, "pruning.quantile=0.9"), cache)
    assert other.evaluation != first.evaluation and (warm / STATE).is_file()
    assert open_artifact(warm, "warm_model", complete=True).digest == digest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_after_gc_uses_the_cache_or_repeats_warmup(
    tiny_xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    out = Path("artifacts")
    run_local(make_config(tiny_xc_folder), out, arm="ramen")
    state = (out / "ramen/warm_model" / STATE).resolve()
    gc()
    assert not state.exists()
    capsys.readouterr()
    run_local(make_config(tiny_xc_folder), out, arm="ramen")
    assert capsys.readouterr().err.count("from the cache") == 5
    run_local(make_config(tiny_xc_folder, "pruning.quantile=0.9"), out, arm="ramen")
    output = capsys.readouterr().err
    assert "warning: `ramen gc` removed the training state that prune-retrain needs: warmup runs again" in output
    assert "warmup: done in" in output and "prune-retrain: done in" in output
    assert (out / "ramen/warm_model" / STATE).is_file()
    make_old(out)  # the first attempt left an unfinished run
    gc()
    run_local(make_config(tiny_xc_folder, "pruning.quantile=0.9"), out, arm="ramen")
    assert capsys.readouterr().err.count("from the cache") == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_names_a_damaged_result_and_the_next_run_computes_it_again(
    tiny_xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    out = Path("artifacts")
    run_local(make_config(tiny_xc_folder), out, arm="ramen")
    damaged = (out / "ramen/dataset/labels/test.npz").resolve()
    damaged.write_bytes(b"damaged")
    with pytest.raises(RamenError, match="run the same command again, which computes ingest again") as caught:
        run_local(make_config(tiny_xc_folder), out, arm="ramen")
    assert str(damaged) in str(caught.value) and caught.value.exit_code == ArtifactError.exit_code
    run_local(make_config(tiny_xc_folder), out, arm="ramen")
    assert open_artifact(out / "ramen/dataset", "dataset").path.resolve() != damaged.parents[1]
