"""Several processes train as one: the same curve, the same graphs, and one of them writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ramen.artifacts import open_artifact
from ramen.config import EncoderConfig, TrainingConfig
from ramen.errors import ConfigError, RamenError
from ramen.graph.metadata import read_graphs
from ramen.training.distributed import Processes
from ramen.training.launch import launch_processes

from training_recipe import changed, history, train, weights


def graph_edges(path: Path) -> dict[str, list[int]]:
    return {
        f"{name}/{side}": graph.indices.tolist()
        for name, sides in read_graphs(path).items()
        for side, graph in sides.items()
    }


EVERYTHING = {
    "base": {"name": "dexa", "refresh_from": 1, "refresh_every": 2},
    "bandit": {"enabled": True, "period": 3},
    "classifier": {"epochs": 3},
    "guidance": {"enabled": True, "epochs": 2},
}


@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["plain", "everything"])
def test_two_processes_give_the_curve_and_the_graphs_of_one(
    tiny_artifacts: dict[str, Path], tmp_path: Path, more: dict[str, dict[str, object]]
) -> None:
    # dropout depends on which process encodes a text, so only without it are the curves one
    rest = {"encoder": {"dropout": 0.0}, "pruning": {"rule": "threshold", "threshold": 0.6}, **more}
    one = train(tiny_artifacts, tmp_path / "one", changed(training={"epochs": 6}, **rest))
    two = train(tiny_artifacts, tmp_path / "two", changed(training={"epochs": 6, "processes": 2}, **rest))
    a, b = (history(tmp_path / name / "model") for name in ("one", "two"))
    assert len(a) == len(b) == 6
    for x, y in zip(a, b, strict=True):
        assert y["loss"] == pytest.approx(x["loss"], abs=1e-4)
        assert y["terms"] == pytest.approx(x["terms"], abs=1e-4)
    assert graph_edges(tmp_path / "one" / "pruned_graph") == graph_edges(tmp_path / "two" / "pruned_graph")
    assert 0 < one["edges_kept/links.document"] < 100 and one.keys() == two.keys()
    theirs = weights(tmp_path / "two" / "model")
    for name, value in weights(tmp_path / "one" / "model").items():
        np.testing.assert_allclose(theirs[name], value, atol=2e-3, err_msg=name)


def torchrun(artifacts: dict[str, Path], out: Path, params: Path, stage: str = "warmup") -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "ramen", stage]
    command += [
        "--params",
        str(params),
        "--metrics",
        str(out / "metrics.json"),
        "--warm-model",
        str(out / "warm_model"),
    ]
    return command + [word for name in ("dataset", "graph") for word in (f"--{name}", str(artifacts[name]))]


def test_torchrun_runs_the_command_line_and_writes_once(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    sections = changed(encoder={"dropout": 0.0})
    train(tiny_artifacts, tmp_path / "one", sections)
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump(sections))
    done = subprocess.run(
        torchrun(tiny_artifacts, tmp_path, params), capture_output=True, text=True, cwd=tmp_path, timeout=240,
        env={**os.environ, "RAMEN_TRACKING": "off", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warm_model: ") == 1
    a, b = history(tmp_path / "one" / "warm_model"), history(tmp_path / "warm_model")
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], abs=1e-4)
    assert json.loads((tmp_path / "metrics.json").read_text())["epoch/loss"] == pytest.approx(b[-1]["loss"])
    assert open_artifact(tmp_path / "warm_model", "warm_model").manifest["counts"]["epochs"] == 2


def test_a_process_that_dies_ends_the_stage_with_its_words(
    tiny_artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    inputs = {name: open_artifact(tiny_artifacts[name], name) for name in ("dataset", "graph")}
    monkeypatch.setattr("ramen.training.distributed.TIMEOUT", __import__("datetime").timedelta(seconds=3))
    with (
        pytest.raises(RamenError, match="training process 1 ended with code 1"),
        launch_processes("warmup", inputs, {"encoder": EncoderConfig()}, TrainingConfig(processes=2)),
    ):
        raise AssertionError("the other process never came")
    assert "WORLD_SIZE" not in os.environ


def test_more_processes_than_cores_are_refused_before_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("ramen.training.launch._start", start)
    with (
        pytest.raises(ConfigError, match=r"training.processes = 1000: this machine has \d+ \w+; \d+ at most"),
        launch_processes("warmup", {}, {}, TrainingConfig(processes=1000)),
    ):
        pass


def test_shares_are_a_partition_with_even_tokens() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 1001)
    shares = Processes(0, 4).shares(lengths)
    assert sorted(np.concatenate(shares).tolist()) == list(range(1001))
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= 60


def test_a_stop_of_one_process_stops_all_with_a_checkpoint(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    long = changed(training={"epochs": 400, "warmup_epochs": 400, "processes": 2})
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump(long))
    command = [sys.executable, "-m", "ramen", "warmup", "--params", str(params), "--warm-model", str(tmp_path / "w")]
    command += [word for name in ("dataset", "graph") for word in (f"--{name}", str(tiny_artifacts[name]))]
    environment = {**os.environ, "RAMEN_TRACKING": "off", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("warmup epoch 3 "):
            break
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130 and "checkpoint was written" in said, said
    assert time.monotonic() - started < 60
    assert list((tmp_path / "ramen-work").glob("warmup-*/checkpoints/*/weights.safetensors"))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradient_caching_changes_nothing_but_memory(
    tiny_artifacts: dict[str, Path], tmp_path: Path, rate: float
) -> None:
    small = {"tokens_per_chunk": 64, "dropout": rate}
    train(tiny_artifacts, tmp_path / "plain", changed(encoder=small))
    train(tiny_artifacts, tmp_path / "cached", changed(encoder=small, training={"gradient_caching": True}))
    a, b = (history(tmp_path / name / "model") for name in ("plain", "cached"))
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], abs=1e-5)
    cached = weights(tmp_path / "cached" / "model")
    for name, value in weights(tmp_path / "plain" / "model").items():
        np.testing.assert_allclose(cached[name], value, atol=1e-3, err_msg=name)


def test_threads_of_a_training_end_with_it() -> None:
    before = torch.get_num_threads()
    with launch_processes("warmup", {}, {}, TrainingConfig(processes=1, threads=before + 1)):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
