"""Training with several processes: the results of one process, written once."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ramen.artifacts import open_artifact
from ramen.config import EncoderConfig, TrainingConfig
from ramen.errors import ConfigError, Interrupted, RamenError
from ramen.graph.metadata import read_graphs
from ramen.training.distributed import Processes
from ramen.training.launch import launch_processes

from training_recipe import Sections, TrainOnce, changed, history, train, weights

pytestmark = pytest.mark.slow
WITHOUT_DROPOUT = changed(encoder={"dropout": 0.0})
"""Dropout depends on which process encodes a text, so curves are equal only without it."""


def list_edges(graph: Path) -> dict[str, list[int]]:
    return {
        f"{name}/{side}": edges.indices.tolist()
        for name, sides in read_graphs(graph).items()
        for side, edges in sides.items()
    }


EVERYTHING = {
    "base": {"name": "dexa", "refresh_from": 1, "refresh_every": 2},
    "bandit": {"enabled": True, "period": 3},
    "classifier": {"epochs": 3},
    "guidance": {"enabled": True, "epochs": 2},
}


@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["default", "everything"])
def test_two_processes_give_the_losses_and_graphs_of_one(
    tiny_artifacts: dict[str, Path], tmp_path: Path, more: dict[str, dict[str, object]]
) -> None:
    more = {"encoder": {"dropout": 0.0}, "pruning": {"rule": "threshold", "threshold": 0.6}, **more}
    metrics_1 = train(tiny_artifacts, tmp_path / "one", changed(training={"epochs": 6}, **more))
    metrics_2 = train(tiny_artifacts, tmp_path / "two", changed(training={"epochs": 6, "processes": 2}, **more))
    history_1, history_2 = (history(tmp_path / name / "model") for name in ("one", "two"))
    assert len(history_1) == len(history_2) == 6
    for record_1, record_2 in zip(history_1, history_2, strict=True):
        assert record_2["loss"] == pytest.approx(record_1["loss"], abs=1e-4)
        assert record_2["terms"] == pytest.approx(record_1["terms"], abs=1e-4)
    assert list_edges(tmp_path / "one" / "pruned_graph") == list_edges(tmp_path / "two" / "pruned_graph")
    assert 0 < metrics_1["edges_kept/links.document"] < 100 and metrics_1.keys() == metrics_2.keys()
    weights_2 = weights(tmp_path / "two" / "model")
    for name, value in weights(tmp_path / "one" / "model").items():
        np.testing.assert_allclose(weights_2[name], value, atol=2e-3, err_msg=name)


def warmup_command(artifacts: dict[str, Path], out: Path, sections: Sections) -> list[str]:
    """Arguments of `python -m` that run the warm-up and write `out / "warm_model"`."""
    (out / "params.yaml").write_text(yaml.safe_dump(sections))
    command = ["ramen", "warmup", "--params", str(out / "params.yaml"), "--warm-model", str(out / "warm_model")]
    command += ["--metrics", str(out / "metrics.json")]
    return command + [word for name in ("dataset", "graph") for word in (f"--{name}", str(artifacts[name]))]


def make_environment() -> dict[str, str]:
    return {**os.environ, "RAMEN_TRACKING": "off", "OMP_NUM_THREADS": "1"}


def test_stage_runs_under_torchrun_and_writes_once(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m"]
    done = subprocess.run(
        torchrun + warmup_command(tiny_artifacts, tmp_path, WITHOUT_DROPOUT), capture_output=True, text=True,
        cwd=tmp_path, timeout=240, env=make_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warm_model: ") == 1
    losses, expected = (
        [record["loss"] for record in history(folder / "warm_model")]
        for folder in (tmp_path, train_once(WITHOUT_DROPOUT))
    )
    assert losses == pytest.approx(expected, abs=1e-4)
    assert json.loads((tmp_path / "metrics.json").read_text())["epoch/loss"] == pytest.approx(losses[-1])
    assert open_artifact(tmp_path / "warm_model", "warm_model").manifest["counts"]["epochs"] == 2


def test_failed_worker_process_is_reported(tiny_artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr("ramen.training.distributed.TIMEOUT", datetime.timedelta(seconds=3))
    inputs = {name: open_artifact(tiny_artifacts[name], name) for name in ("dataset", "graph")}
    with (
        pytest.raises(RamenError, match="training process 1 exited with code 1"),
        launch_processes("warmup", inputs, {"encoder": EncoderConfig()}, TrainingConfig(processes=2)),
    ):
        raise AssertionError("unreachable: the worker process never joins")
    assert "WORLD_SIZE" not in os.environ


def test_more_processes_than_cores_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with (
        pytest.raises(ConfigError, match=r"training.processes = 1000: this machine has \d+ \w+; set at most \d+"),
        launch_processes("warmup", {}, {}, TrainingConfig(processes=1000)),
    ):
        pass


def test_shares_are_a_partition_with_equal_numbers_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 1001)
    shares = Processes(0, 4).shares(lengths)
    assert sorted(np.concatenate(shares).tolist()) == list(range(1001))
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= 60


def test_interruption_of_one_process_stops_all_with_a_checkpoint(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    sections = changed(training={"epochs": 400, "warmup_epochs": 400, "processes": 2})
    command = [sys.executable, "-m", *warmup_command(tiny_artifacts, tmp_path, sections)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=make_environment())
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warmup epoch 3 "):
            break
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code == 130 and "checkpoint was written" in log, log
    assert list((tmp_path / "ramen-work").glob("warmup-*/checkpoints/*/weights.safetensors"))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_caching_changes_losses_and_weights_only_by_rounding(train_once: TrainOnce, dropout: float) -> None:
    encoder = {"tokens_per_chunk": 64, "dropout": dropout}
    expected = train_once(changed(encoder=encoder)) / "model"
    model = train_once(changed(encoder=encoder, training={"gradient_caching": True})) / "model"
    losses, expected_losses = ([record["loss"] for record in history(folder)] for folder in (model, expected))
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    expected_weights = weights(expected)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value, expected_weights[name], atol=1e-3, err_msg=name)


def test_number_of_threads_is_restored_after_training() -> None:
    before = torch.get_num_threads()
    with launch_processes("warmup", {}, {}, TrainingConfig(processes=1, threads=before + 1)):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
