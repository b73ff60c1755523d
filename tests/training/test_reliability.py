"""Training survives kills and interruptions, and reports damaged files, full disks, lack of memory and bad numbers."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ramen.errors import ArtifactError, Interrupted, RamenError
from ramen.files import sha256
from ramen.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from ramen.training.heldout import HeldOutLoss
from ramen.training.trainer import Trainer

from training_recipe import (
    TrainOnce,
    assert_same_artifacts,
    changed,
    interrupt_before_steps,
    run_retraining,
    run_warmup,
)

pytestmark = pytest.mark.slow
HELPERS = Path(__file__).parents[1] / "helpers"
EVERY_STEP = {"checkpoint_minutes": 1e-5}
SAVE_EVERY_STEP = changed(training=EVERY_STEP)


def list_checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "ramen-work").glob("warmup-*/checkpoints/0*"))


@pytest.fixture
def interrupted(tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Artifacts (of this test only) of a warm-up that was interrupted in its second epoch and left two checkpoints."""
    artifacts = {name: shutil.copytree(path, tmp_path / name) for name, path in tiny_artifacts.items()}
    with monkeypatch.context() as patch:
        interrupt_before_steps(patch, [6])
        with pytest.raises(Interrupted):
            run_warmup(artifacts, tmp_path, SAVE_EVERY_STEP)
    assert len(list_checkpoints(tmp_path)) == 2
    return artifacts


EVERYTHING = {
    "base": {"name": "dexa", "refresh_from": 1, "refresh_every": 2},
    "bandit": {"enabled": True, "period": 3},
    "classifier": {"epochs": 60},
}


@pytest.mark.parametrize(("seed", "more"), [(1, {}), (2, EVERYTHING)], ids=["default", "everything"])
def test_training_killed_at_random_times_is_bit_identical(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, seed: int, more: dict[str, dict[str, Any]]
) -> None:
    sections = changed(training={"epochs": 24, "warmup_epochs": 10, **EVERY_STEP}, pruning={"every": 3}, **more)
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    (tmp_path / "sections.json").write_text(json.dumps(sections))
    command = [sys.executable, str(HELPERS / "killed_training.py"), str(tmp_path / "sections.json")]
    command += [str(tiny_artifacts["dataset"]), str(tiny_artifacts["graph"]), str(out), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAMEN_WORK": str(work)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    last_lines = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(last_lines) >= 10, "too few kills to show anything"
    assert any(line.startswith("warmup") for line in last_lines)
    assert any("retrain" in line or "pruned" in line for line in last_lines)
    assert_same_artifacts(out, train_once(sections), "warm_model", "model", "pruned_graph")
    # a kill between renaming an output and clearing its work directory leaves the directory, its lock, or both
    assert len({path.name.removesuffix(".lock") for path in work.iterdir()}) <= 1


def raise_sigterm_at_call(patch: pytest.MonkeyPatch, owner: type, method: str, number: int) -> None:
    """Send SIGTERM to this process at the n-th call of a method."""
    original, calls = getattr(owner, method), 0

    def count_call(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    patch.setattr(owner, method, count_call)


@pytest.mark.parametrize("call", range(1, 7))
def test_interruption_while_embedding_repeats_the_embedding(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Validation and pruning stop at their next block of texts and are repeated after resuming."""
    expected = train_once()
    raise_sigterm_at_call(monkeypatch, Trainer, "embed", call)
    with pytest.raises(Interrupted):
        run_retraining(tiny_artifacts, expected / "warm_model", tmp_path)
    run_retraining(tiny_artifacts, expected / "warm_model", tmp_path)
    assert_same_artifacts(tmp_path, expected)


@pytest.mark.parametrize("call", [1, 3])
def test_interruption_during_the_feedback_of_the_bandit_ends_after_the_step(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    sections = changed(bandit={"enabled": True, "period": 3})
    expected = train_once(sections)
    raise_sigterm_at_call(monkeypatch, HeldOutLoss, "__call__", call)
    with pytest.raises(Interrupted):
        run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, sections)
    run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, sections)
    assert_same_artifacts(tmp_path, expected)


def test_damaged_checkpoint_is_skipped_and_two_are_refused(
    interrupted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = list_checkpoints(tmp_path)
    with (newer / "weights.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff")
    shutil.copytree(tmp_path / "ramen-work", tmp_path / "copy")
    run_warmup(interrupted, tmp_path / "resumed", SAVE_EVERY_STEP)
    log = capsys.readouterr().err
    assert "weights.safetensors: differs from its checksum" in log and "resumed at epoch 2, step 1" in log
    run_warmup(interrupted, tmp_path / "fresh", SAVE_EVERY_STEP)
    assert_same_artifacts(tmp_path / "resumed", tmp_path / "fresh", "warm_model")
    shutil.copytree(tmp_path / "copy", tmp_path / "ramen-work", dirs_exist_ok=True)
    (older / "optimizer.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"differs from its checksum, and there is no older one; .*rm -r ") as error:
        run_warmup(interrupted, tmp_path, SAVE_EVERY_STEP)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "knob", "message"),
    [
        ("training", {"lr": 1e-3}, r"training\.lr was 0\.003, is 0\.001"),
        ("objective", {"lambda_label": 0.7}, r"objective\.lambda_label was 0\.1, is 0\.7"),
    ],
)
def test_checkpoint_of_other_knobs_is_refused(
    interrupted: dict[str, Path], tmp_path: Path, section: str, knob: dict[str, float], message: str
) -> None:
    sections = SAVE_EVERY_STEP | {section: SAVE_EVERY_STEP[section] | knob}
    expected = rf"{message}; undo the change to resume it, or delete it to start over: rm -r (\S+)$"
    with pytest.raises(ArtifactError, match=expected) as error:
        run_warmup(interrupted, tmp_path, sections)
    subprocess.run(str(error.value).rpartition("start over: ")[2].split(), check=True)
    run_warmup(interrupted, tmp_path, sections)


def test_checkpoint_of_other_data_is_refused_unless_the_output_differs(
    interrupted: dict[str, Path], tmp_path: Path
) -> None:
    file = interrupted["graph"] / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["counts"] = {"another": 1}
    file.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="but the input graph has changed; undo"):
        run_warmup(interrupted, tmp_path, SAVE_EVERY_STEP)
    run_warmup(interrupted, tmp_path / "elsewhere", SAVE_EVERY_STEP)


def test_checkpoint_of_another_run_is_refused(interrupted: dict[str, Path], tmp_path: Path) -> None:
    for folder in list_checkpoints(tmp_path):
        task, sums = (json.loads((folder / name).read_text()) for name in ("task.json", "sums.json"))
        task["sections"]["training"]["seed"] = 9
        (folder / "task.json").write_text(json.dumps(task))
        (folder / "sums.json").write_text(json.dumps(sums | {"task.json": sha256(folder / "task.json")}))
    with pytest.raises(ArtifactError, match=r"belongs to another run: training\.seed was 9, is 0; delete it to start"):
        run_warmup(interrupted, tmp_path, SAVE_EVERY_STEP)


def limit_file_size(limit: int) -> None:
    """Make the kernel refuse files of more than `limit` bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def test_full_disk_leaves_earlier_checkpoints_intact(interrupted: dict[str, Path], tmp_path: Path) -> None:
    before = {path: (path / "sums.json").read_bytes() for path in list_checkpoints(tmp_path)}
    (tmp_path / "params.json").write_text(json.dumps(SAVE_EVERY_STEP))
    command = [sys.executable, "-m", "ramen", "warmup", "--params", str(tmp_path / "params.json")]
    command += ["--warm-model", str(tmp_path / "warm_model"), "--metrics", str(tmp_path / "m.json")]
    command += [word for name in ("dataset", "graph") for word in (f"--{name}", str(interrupted[name]))]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, preexec_fn=lambda: limit_file_size(200_000),
        env={**os.environ, "RAMEN_TRACKING": "off", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == ArtifactError.exit_code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "cannot write a checkpoint" in lines[0] and "Traceback" not in done.stderr
    assert {path: (path / "sums.json").read_bytes() for path in list_checkpoints(tmp_path)} == before
    assert not (tmp_path / "warm_model").exists()
    run_warmup(interrupted, tmp_path, SAVE_EVERY_STEP)


def test_out_of_memory_names_settings_to_change(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("ramen.training.gradient_cache.StepEncoder.forward", run_out_of_memory)
    with pytest.raises(RamenError, match=r"out of memory at step 0 \(16 documents, .*training\.gradient_caching=true"):
        run_warmup(tiny_artifacts, tmp_path)


def test_infinite_loss_names_step_documents_and_weights(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.training.step_loss.StepLoss.weighted_sum", lambda _, terms: terms["task"] * torch.inf)
    message = r"loss is (inf|nan) at step 0 \(documents (train|label)-\d+, .*\.label=3.*; lower training\.lr"
    with pytest.raises(RamenError, match=message):
        run_warmup(tiny_artifacts, tmp_path, changed(objective={"lambda_label": 3.0}))


# "meta" stands for a GPU: fused AdamW refuses a step count on another device
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_optimiser_state_is_restored_on_the_device_of_its_parameters(device: str) -> None:
    trained = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
    trained(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    resumed = torch.nn.Linear(3, 2, device=device)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters())
    load_optimizer_tensors(resumed, resumed_optimizer, optimizer_tensors(trained, optimizer))
    tensors = [value for parameter in resumed.parameters() for value in resumed_optimizer.state[parameter].values()]
    assert len(tensors) == 6 and {value.device.type for value in tensors} == {device}
