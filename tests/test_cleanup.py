"""`ramen gc`: what goes, what stays, and that runs go on from what is left."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipelines.local import run_local
from ramen.ablation.run import run_row
from ramen.artifacts import DRAFT_MARKER, Artifact, drafts, open_artifact
from ramen.cli import cli
from ramen.config import Config, resolve
from ramen.errors import ArtifactError, RamenError, StateRemoved
from ramen.files import write_json
from ramen.stages import STAGES, run_stage

STATE = "training_state.safetensors"
SMALL = (
    "data.source=xc", "walk.hops=20", "encoder.name=tiny", "encoder.precision=fp32", "encoder.max_length=16",
    "training.batch_size=16", "training.epochs=2", "training.warmup_epochs=1", "training.threads=1", "pruning.every=1",
    "index.kind=flat", "index.model=",
)  # fmt: skip


def settings(source: Path, *more: str) -> Config:
    return resolve(preset="demo", sets=[f"data.path={source}", *SMALL, *more])


def gc(*words: str) -> str:
    done = CliRunner().invoke(cli, ["gc", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def write_run(run: Path, stages: list[str], seed: int) -> None:
    """Finished artifacts as the local runner leaves them, each with a file that depends on the seed."""
    made: dict[str, Artifact] = {}
    for name in stages:
        stage = STAGES[name]
        places = {artifact: run / name / artifact for artifact in stage.writes}
        inputs = {key: made[key] for key in stage.reads if key in made}
        with drafts(places, sections={}, inputs=inputs, work=run / "work") as written:
            for draft in written.values():
                (draft.path / "file").write_text(f"{name} {seed}")
                if name == "warmup":
                    (draft.path / STATE).write_text("x" * 1000)
        (run / name / "scalars").write_text("{}")
        made |= {key: open_artifact(place, key) for key, place in places.items()}


def link(out: Path, run: Path) -> None:
    """Link a run's artifacts as the latest results."""
    for place in run.glob("*/*/manifest.json"):
        name = out / "ramen" / place.parent.name
        name.parent.mkdir(parents=True, exist_ok=True)
        name.unlink(missing_ok=True)
        name.symlink_to(os.path.relpath(place.parent, name.parent))


def age(root: Path) -> None:
    """Make everything under a folder look minutes old."""
    for place in root.rglob("*"):
        os.utime(place, (time.time() - 1000,) * 2, follow_symlinks=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three runs: replaced, interrupted after the warm-up, and latest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    runs = Path("artifacts/.kfp")
    write_run(runs / "ramen-1", list(STAGES), 1)
    write_run(runs / "ramen-2", ["ingest", "build-graph", "warmup"], 2)
    write_run(runs / "ramen-3", list(STAGES), 3)
    link(Path("artifacts"), runs / "ramen-3")
    age(runs)
    return tmp_path


def files(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_gc_deletes_replaced_results_and_training_state_only(here: Path) -> None:
    said = gc()
    assert [path.name for path in sorted(Path("artifacts/.kfp").iterdir())] == ["ramen-2", "ramen-3"]
    assert Path(f"artifacts/.kfp/ramen-2/warmup/warm_model/{STATE}").is_file(), "its prune-retrain has not finished"
    assert not Path(f"artifacts/ramen/warm_model/{STATE}").exists()
    for name in Path("artifacts/ramen").iterdir():
        open_artifact(name, name.name)
    assert said.count("replaced by a later run") == len(STAGES)
    assert f"1,000  artifacts/.kfp/ramen-3/warmup/warm_model/{STATE}: training state; prune-retrain has" in said
    assert gc().split() == ["0", "bytes", "deleted"]


def test_dry_run_prints_the_same_and_deletes_nothing(here: Path) -> None:
    before = files(here)
    planned = gc("--dry-run")
    assert files(here) == before
    assert gc() == planned.replace("would be deleted", "deleted")


def test_gc_keeps_what_a_checkpoint_needs(here: Path) -> None:
    """An interrupted prune-retrain of other settings reads a warm model whose state is otherwise not needed."""
    for run in ("ramen-1", "ramen-3"):
        digest = open_artifact(f"artifacts/.kfp/{run}/warmup/warm_model", "warm_model").digest
        write_json(here / "ramen-work" / f"prune-retrain-{run}" / "task.json", {"inputs": {"warm_model": digest}})
    gc()
    assert Path(f"artifacts/ramen/warm_model/{STATE}").is_file()
    assert [path.name for path in Path("artifacts/.kfp/ramen-1").iterdir()] == ["warmup"]


def test_gc_keeps_what_ramen_did_not_write(here: Path) -> None:
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
    age(file.parent)
    gc("--unfinished")
    assert file.read_text() == "mine"
    assert [path.name for path in Path("artifacts/.kfp/ramen-1").iterdir()] == ["evaluate"]


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", '{"files": 3}'])
def test_gc_keeps_results_whose_manifest_is_damaged(garbage: str, here: Path) -> None:
    file = Path("artifacts/.kfp/ramen-1/evaluate/evaluation/manifest.json")
    file.write_text(garbage)
    age(file.parent.parent)
    gc()
    assert file.read_text() == garbage and (file.parent / "file").is_file()


def test_gc_is_refused_when_the_task_of_a_checkpoint_is_damaged(here: Path) -> None:
    work = here / "ramen-work" / "prune-retrain-1"
    (work / "checkpoints" / "1").mkdir(parents=True)
    (work / "task.json").write_text("{")
    before = files(here)
    done = CliRunner().invoke(cli, ["gc"])
    assert done.exit_code == 4 and f"error: {work}/task.json: damaged" in done.output and files(here) == before
    (work / "checkpoints" / "1").rmdir()
    (work / "checkpoints").rmdir()
    gc()


def test_gc_deletes_no_result_when_no_link_names_the_latest(here: Path) -> None:
    for place in Path("artifacts/ramen").iterdir():
        place.unlink()
    assert "replaced" not in gc() and Path("artifacts/.kfp/ramen-1/evaluate/evaluation").is_dir()


def test_gc_deletes_unfinished_runs_and_old_drafts_when_asked(here: Path) -> None:
    left = Path("artifacts/.kfp/ramen-3/evaluate/.evaluation.12345678.tmp")
    left.mkdir()
    (left / "file").write_text("half")
    (left / DRAFT_MARKER).touch()
    young = Path("artifacts/.kfp/ramen-3/ingest/.dataset.12345678.tmp")
    young.mkdir()
    os.utime(left, (time.time() - 1000,) * 2)
    said = gc("--unfinished")
    assert not left.exists() and young.is_dir() and "4  " in said and "draft of a process that was killed" in said
    assert [path.name for path in Path("artifacts/.kfp").iterdir()] == ["ramen-3"]


def test_gc_is_refused_while_a_run_is_in_progress(here: Path) -> None:
    draft = Path("artifacts/.kfp/ramen-2/prune-retrain/.model.12345678.tmp")
    draft.mkdir(parents=True)
    (draft / DRAFT_MARKER).touch()
    for place in (draft, draft.parent):
        os.utime(place, (time.time() - 1000,) * 2)
    handle = os.open(draft, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = files(here)
    done = CliRunner().invoke(cli, ["gc", "--unfinished"])
    os.close(handle)
    assert done.exit_code == 1 and "ramen-2: a run is in progress" in done.output and files(here) == before
    gc()


def test_gc_keeps_runs_that_are_links_and_folders_of_other_names(here: Path) -> None:
    runs, elsewhere = Path("artifacts/.kfp"), Path("elsewhere")
    (runs / "ramen-1").rename(elsewhere)
    (runs / "ramen-1").symlink_to(elsewhere.absolute())
    (runs / "ramen-0").write_text("a file of the user")
    write_run(runs / "ramen-4", list(STAGES), 4)
    mine = runs / "ramen-4/ingest/mine"
    mine.mkdir()
    (mine / DRAFT_MARKER).touch()
    (mine / "notes").write_text("kept")
    age(runs)
    before = set(files(elsewhere))
    gc()
    assert set(files(elsewhere)) == before and (mine / "notes").exists() and (runs / "ramen-0").exists()


def test_gc_ends_although_a_link_leads_to_itself_or_an_entry_to_a_device(here: Path) -> None:
    runs = Path("artifacts/.kfp")
    Path("artifacts/ramen/loop").symlink_to("loop")
    (runs / "cache").mkdir()
    (runs / "cache/zero.json").symlink_to("/dev/zero")
    os.mkfifo(runs / "cache/pipe.json")
    manifest = runs / "ramen-1/ingest/dataset/manifest.json"
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    age(runs)
    gc()
    assert not (runs / "ramen-1/warmup").exists() and manifest.parent.exists()


def test_gc_without_results_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["gc"])
    assert done.exit_code == 1 and done.output.startswith("error: artifacts: no results of `ramen run`")


def test_prune_retrain_without_training_state_is_refused_in_one_line(here: Path) -> None:
    gc()
    inputs = {name: Path("artifacts/ramen") / name for name in ("dataset", "graph", "warm_model")}
    with pytest.raises(StateRemoved, match=r"warm_model: the training state was removed by `ramen gc`; run `ramen wa"):
        run_stage("prune-retrain", sections={}, inputs=inputs)


def test_study_warms_up_again_only_when_it_must(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    cache = Path("ablations/cache")
    first = run_row(settings(tiny_source), cache)
    (warm,) = cache.glob("warmup-*/warm_model")
    digest = open_artifact(warm, "warm_model").digest
    assert str(warm / STATE) in gc() and not (warm / STATE).exists()
    before = files(cache)
    assert run_row(settings(tiny_source), cache) == first and files(cache) == before, "all from the cache"
    other = run_row(settings(tiny_source, "pruning.quantile=0.9"), cache)
    assert other.evaluation != first.evaluation and (warm / STATE).is_file()
    assert open_artifact(warm, "warm_model", complete=True).digest == digest


@pytest.mark.timeout(900)
def test_run_after_gc_comes_from_the_cache_or_warms_up_again(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    out = Path("artifacts")
    run_local(settings(tiny_source), out, arm="ramen")
    state = (out / "ramen/warm_model" / STATE).resolve()
    gc()
    assert not state.exists()
    capsys.readouterr()
    run_local(settings(tiny_source), out, arm="ramen")
    assert capsys.readouterr().err.count("from the cache") == 5
    run_local(settings(tiny_source, "pruning.quantile=0.9"), out, arm="ramen")
    said = capsys.readouterr().err
    assert "warning: `ramen gc` removed the training state that prune-retrain needs: warmup runs again" in said
    assert "warmup: done in" in said and "prune-retrain: done in" in said
    assert (out / "ramen/warm_model" / STATE).is_file()
    age(out)  # the first attempt left a run that did not finish
    gc()
    run_local(settings(tiny_source, "pruning.quantile=0.9"), out, arm="ramen")
    assert capsys.readouterr().err.count("from the cache") == 5


@pytest.mark.timeout(900)
def test_run_after_a_damaged_result_names_the_file_and_the_next_run_repairs_it(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    out = Path("artifacts")
    run_local(settings(tiny_source), out, arm="ramen")
    damaged = (out / "ramen/dataset/labels/test.npz").resolve()
    damaged.write_bytes(b"damaged")
    with pytest.raises(RamenError, match="run the same command again, which computes ingest again") as caught:
        run_local(settings(tiny_source), out, arm="ramen")
    assert str(damaged) in str(caught.value) and caught.value.exit_code == ArtifactError.exit_code
    run_local(settings(tiny_source), out, arm="ramen")
    assert open_artifact(out / "ramen/dataset", "dataset").path.resolve() != damaged.parents[1]
