"""Nothing is lost: kills, stops in long work, damaged and foreign checkpoints, failing disks, memory, bad numbers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ramen.artifacts import open_artifact
from ramen.errors import ArtifactError, Interrupted, RamenError
from ramen.stages import run_stage
from ramen.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from ramen.training.heldout import HeldOutLoss
from ramen.training.trainer import Trainer

from training_recipe import SECTIONS, changed, train

HELPERS = Path(__file__).parents[1] / "helpers"
EVERY_STEP = {"checkpoint_minutes": 1e-5}


def warm(artifacts: dict[str, Path], out: Path, sections: dict[str, dict[str, Any]] = SECTIONS) -> None:
    inputs = {name: artifacts[name] for name in ("dataset", "graph")}
    run_stage("warmup", sections=sections, inputs=inputs, outputs={"warm_model": out / "warm_model"})


def checkpoints(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "ramen-work").glob("warmup-*/checkpoints/0*"))


@pytest.fixture
def interrupted(tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Artifacts of a warm-up that was stopped in its second epoch, with two checkpoints left."""
    plain = Trainer.train_step

    def stop_at_five(self: Trainer, step: Any) -> dict[str, float]:
        if self.state.global_step == 5:
            self.interrupted = True
        return plain(self, step)

    monkeypatch.setattr(Trainer, "train_step", stop_at_five)
    with pytest.raises(Interrupted):
        warm(tiny_artifacts, tmp_path, changed(training=EVERY_STEP))
    monkeypatch.undo()
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "ramen-work"))
    assert len(checkpoints(tmp_path)) == 2
    return tiny_artifacts


EVERYTHING = {
    "base": {"name": "dexa", "refresh_from": 1, "refresh_every": 2},
    "bandit": {"enabled": True, "period": 3},
    "classifier": {"epochs": 60},
}


@pytest.mark.parametrize(("seed", "more"), [(1, {}), (2, EVERYTHING)], ids=["plain", "everything"])
def test_killed_at_random_again_and_again_it_ends_bit_identical(
    tiny_artifacts: dict[str, Path], tmp_path: Path, seed: int, more: dict[str, dict[str, Any]]
) -> None:
    sections = changed(training={"epochs": 36, "warmup_epochs": 16, **EVERY_STEP}, pruning={"every": 3}, **more)
    train(tiny_artifacts, tmp_path / "whole", sections)
    out = tmp_path / "killed"
    out.mkdir()
    (tmp_path / "sections.json").write_text(json.dumps(sections))
    command = [sys.executable, str(HELPERS / "killed_training.py"), str(tmp_path / "sections.json")]
    command += [str(tiny_artifacts["dataset"]), str(tiny_artifacts["graph"]), str(out), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAMEN_WORK": str(tmp_path / "killed-work")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(last) >= 10, "too few kills to prove anything"
    assert any(line.startswith("warmup") for line in last) and any(
        "retrain" in line or "pruned" in line for line in last
    )
    for name in ("warm_model", "model", "pruned_graph"):
        assert open_artifact(out / name, name).digest == open_artifact(tmp_path / "whole" / name, name).digest
    # at most what a kill left between the renaming of an output and the clearing away: a folder, its lock, or both
    assert len({path.name.removesuffix(".lock") for path in (tmp_path / "killed-work").iterdir()}) <= 1


@pytest.mark.parametrize(
    ("call", "more"),
    [*((call, {}) for call in range(1, 7)), *((call, {"bandit": {"enabled": True, "period": 3}}) for call in (2, 5))],
    ids=[*(f"call {call}" for call in range(1, 7)), "bandit 2", "bandit 5"],
)
def test_a_stop_while_encoding_loses_nothing(
    tiny_artifacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    more: dict[str, dict[str, Any]],
) -> None:
    """Validation after an epoch and pruning between epochs stop at their next block and are done again; what a bandit
    is judged by, in the middle of a step, goes on to the step's end."""
    sections = changed(**more)
    train(tiny_artifacts, tmp_path / "whole", sections)
    calls = 0
    patched, name = (HeldOutLoss, "__call__") if more else (Trainer, "embed")
    plain = getattr(patched, name)

    def interrupt(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    monkeypatch.setattr(patched, name, interrupt)
    inputs = {
        **{name: tiny_artifacts[name] for name in ("dataset", "graph")},
        "warm_model": tmp_path / "whole/warm_model",
    }
    outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    with pytest.raises(Interrupted):
        run_stage("prune-retrain", sections=sections, inputs=inputs, outputs=outputs)
    run_stage("prune-retrain", sections=sections, inputs=inputs, outputs=outputs)
    for name, path in outputs.items():
        assert open_artifact(path, name).digest == open_artifact(tmp_path / "whole" / name, name).digest


def test_a_damaged_checkpoint_is_passed_over_and_two_are_refused(
    interrupted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = changed(training=EVERY_STEP)
    newer = checkpoints(tmp_path)[-1]
    with (newer / "weights.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff")
    work = os.environ["RAMEN_WORK"]
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", work, str(copy)], check=True)
    warm(interrupted, tmp_path, sections)
    said = capsys.readouterr().err
    assert "weights.safetensors: differs from its checksum" in said and "resumed at epoch 2, step 1" in said
    (tmp_path / "warm_model").rename(tmp_path / "resumed")
    warm(interrupted, tmp_path / "fresh", sections)
    digests = [open_artifact(p, "warm_model").digest for p in (tmp_path / "resumed", tmp_path / "fresh" / "warm_model")]
    assert digests[0] == digests[1]
    subprocess.run(["cp", "-r", f"{copy}/.", work], check=True)
    (checkpoints(tmp_path)[0] / "optimizer.safetensors").unlink()
    with pytest.raises(
        ArtifactError, match=r"differs from its checksum, nor is there an older one; .*rm -r "
    ) as caught:
        warm(interrupted, tmp_path, sections)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("training", {"lr": 1e-3}, r"training\.lr was 0\.003, is 0\.001"),
        ("objective", {"lambda_label": 0.7}, r"objective\.lambda_label was 0\.1, is 0\.7"),
    ],
)
def test_a_changed_knob_under_a_checkpoint_is_refused(
    interrupted: dict[str, Path], tmp_path: Path, section: str, values: dict[str, float], said: str
) -> None:
    sections = changed(training=EVERY_STEP)
    sections[section] = {**sections[section], **values}
    with pytest.raises(
        ArtifactError, match=rf"{said}; undo the change to resume it, or delete it to start over: rm -r (\S+)$"
    ) as caught:
        warm(interrupted, tmp_path, sections)
    subprocess.run(str(caught.value).rpartition("start over: ")[2].split(), check=True)
    warm(interrupted, tmp_path, sections)


def test_changed_data_under_a_checkpoint_are_refused_unless_written_elsewhere(
    interrupted: dict[str, Path], tmp_path: Path
) -> None:
    texts = interrupted["graph"] / "manifest.json"
    manifest = json.loads(texts.read_text())
    manifest["counts"] = {"another": 1}
    texts.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="but the input graph has changed; undo"):
        warm(interrupted, tmp_path, changed(training=EVERY_STEP))
    warm(interrupted, tmp_path / "elsewhere", changed(training=EVERY_STEP))


def test_a_foreign_checkpoint_is_refused(interrupted: dict[str, Path], tmp_path: Path) -> None:
    for folder in checkpoints(tmp_path):
        task = json.loads((folder / "task.json").read_text())
        task["sections"]["training"]["seed"] = 9
        (folder / "task.json").write_text(json.dumps(task))
        sums = json.loads((folder / "sums.json").read_text())
        from ramen.files import sha256

        (folder / "sums.json").write_text(json.dumps({**sums, "task.json": sha256(folder / "task.json")}))
    with pytest.raises(ArtifactError, match=r"checkpoint of another run: training\.seed was 9, is 0; start afresh"):
        warm(interrupted, tmp_path, changed(training=EVERY_STEP))


def full_disk(limit: int) -> None:
    """No file may grow beyond `limit` bytes: the kernel itself refuses, as it does on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_a_full_disk_keeps_the_checkpoint_before(interrupted: dict[str, Path], tmp_path: Path) -> None:
    before = {path: (path / "sums.json").read_bytes() for path in checkpoints(tmp_path)}
    (tmp_path / "params.json").write_text(json.dumps(changed(training=EVERY_STEP)))
    command = [sys.executable, "-m", "ramen", "warmup", "--params", str(tmp_path / "params.json")]
    command += ["--warm-model", str(tmp_path / "warm_model"), "--metrics", str(tmp_path / "m.json")]
    command += [word for name in ("dataset", "graph") for word in (f"--{name}", str(interrupted[name]))]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, preexec_fn=lambda: full_disk(200_000),
        env={**os.environ, "RAMEN_TRACKING": "off", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == ArtifactError.exit_code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "a checkpoint cannot be written" in lines[0] and "Traceback" not in done.stderr
    assert {path: (path / "sums.json").read_bytes() for path in checkpoints(tmp_path)} == before
    assert not (tmp_path / "warm_model").exists()
    warm(interrupted, tmp_path, changed(training=EVERY_STEP))


def test_out_of_memory_says_what_to_turn(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("ramen.training.gradient_cache.StepEncoder.forward", explode)
    with pytest.raises(RamenError, match=r"out of memory at step 0 \(16 documents, .*training\.gradient_caching=true"):
        warm(tiny_artifacts, tmp_path)


def test_a_loss_that_is_not_finite_names_documents_and_weights(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.training.step_loss.weighted_sum", lambda terms, weights: terms["task"] * torch.inf)
    with pytest.raises(
        RamenError, match=r"(loss is|gradient is not) .*at step 0 \(documents (train|label)-\d+, .*\.label=3"
    ):
        warm(tiny_artifacts, tmp_path, changed(objective={"lambda_label": 3.0}))


@pytest.mark.parametrize(
    "device", ["cpu", "meta"]
)  # meta stands for a GPU: fused AdamW refuses a count of steps elsewhere
def test_all_that_the_optimiser_kept_comes_back_to_the_device_of_its_parameters(device: str) -> None:
    trained = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
    trained(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    there = torch.nn.Linear(3, 2, device=device)
    resumed = torch.optim.AdamW(there.parameters())
    load_optimizer_tensors(there, resumed, optimizer_tensors(trained, optimizer))
    kept = [value for parameter in there.parameters() for value in resumed.state[parameter].values()]
    assert len(kept) == 6 and {value.device.type for value in kept} == {device}
