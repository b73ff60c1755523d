"""Learning rate and end of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramen.config import TrainingConfig, resolve
from ramen.errors import ConfigError, Interrupted
from ramen.tracking import NullTracker
from ramen.training.checkpoint import TrainingState
from ramen.training.schedule import Schedule, has_settled, linear_schedule
from ramen.training.step_sampler import Step
from ramen.training.trainer import Trainer

from training_recipe import (
    InterruptAtPoint,
    TrainOnce,
    assert_same_artifacts,
    changed,
    history,
    run_retraining,
    run_warmup,
    train,
)

CLOCK = "ramen.training.schedule.time"


def epochs_until_settled(gain: Callable[[int], float], noise: float = 0.0, seed: int = 0) -> int:
    """Return the epoch in which a training with held-out gain `gain(epoch)` ends, at most 200."""
    rng = np.random.default_rng(seed)
    history: list[dict[str, float]] = []
    for epoch in range(1, 200):
        history.append({"epoch": epoch, "val_gain": gain(epoch) + noise * rng.standard_normal()})
        if has_settled(history):
            return epoch
    return 200


def test_training_continues_while_held_out_gain_rises() -> None:
    assert epochs_until_settled(lambda epoch: 20 + epoch) == 200
    assert epochs_until_settled(lambda epoch: 20 + min(epoch, 30)) in range(31, 42)
    assert epochs_until_settled(lambda epoch: 20 + 10 * (1 - np.exp(-epoch / 8))) > 16, "86 % of the limit is reached"


def test_training_ends_soon_after_a_peak() -> None:
    assert epochs_until_settled(lambda epoch: 30 + epoch if epoch < 6 else 42 - epoch) <= 8


def test_training_ends_after_four_evaluations_at_the_earliest() -> None:
    assert [epochs_until_settled(lambda epoch, slope=slope: slope * epoch) for slope in (-1, 0, 0.4)] == [4, 4, 4]


def test_noise_of_a_few_hundred_documents_rarely_ends_a_rise() -> None:
    """One point per epoch with noise of 0.2 points, as with averaged weights on 500 documents."""
    ends = [epochs_until_settled(lambda epoch: 20 + min(epoch, 12), noise=0.2, seed=seed) for seed in range(200)]
    assert np.mean([end < 10 for end in ends]) < 0.1 and np.median(ends) <= 17


def test_epochs_without_evaluation_do_not_count() -> None:
    constant = [{"epoch": i, "val_gain": 20.0 if i % 2 else None} for i in range(1, 8)]
    assert not has_settled(constant[:6]), "three evaluations"
    assert has_settled(constant)
    rising = [{"epoch": i, "val_gain": float(i) if i % 3 == 0 else None} for i in range(1, 13)]
    assert not has_settled(rising), "one point per epoch"


def make_schedule(held_out: int = 500, steps_per_epoch: int = 20, **training: Any) -> Schedule:
    return Schedule(TrainingConfig(**training), steps_per_epoch, held_out)


def run_schedule(
    schedule: Schedule, gain: Callable[[int], float], closing_seconds: Callable[[], float] = lambda: 0.0
) -> tuple[TrainingState, list[float]]:
    """Simulate the training loop.

    Args:
        schedule: the schedule.
        gain: epoch -> held-out gain.
        closing_seconds: estimated duration of the work after training.

    Returns:
        The last state, and the learning rate of each step as a share of the peak.
    """
    state, rates = TrainingState(), []
    schedule.is_warmup = True
    while state.epoch < schedule.max_epochs:
        if schedule.is_warmup and (state.epoch >= schedule.warmup_epochs or state.ended):
            schedule.is_warmup = state.ended = False
        if state.ended:
            break
        for index in range(schedule.steps_per_epoch):
            if index and schedule.end_if_out_of_time(state, closing_seconds):
                break
            rates.append(schedule.rate(state.global_step))
            state.global_step += 1
        schedule.end_if_out_of_time(state, closing_seconds)
        state.epoch += 1
        state.history.append({"epoch": state.epoch, "val_gain": gain(state.epoch)})
        schedule.end_if_settled(state)
    return state, rates


def test_learning_rate_rises_and_stays_constant_with_auto() -> None:
    state, rates = run_schedule(make_schedule(lr_warmup_steps=50), lambda epoch: min(epoch, 10))
    assert rates[:50] == pytest.approx(np.arange(1, 51) / 50)
    assert set(rates[50:]) == {1.0}
    assert 11 <= state.epoch <= 14


@pytest.mark.parametrize("max_epochs", [2, 3, 5, 8, 40])
def test_max_epochs_ends_training(max_epochs: int) -> None:
    state, rates = run_schedule(make_schedule(max_epochs=max_epochs), lambda epoch: epoch)
    assert state.epoch == max_epochs and len(rates) == 20 * max_epochs


def test_fixed_number_of_epochs_has_a_linear_schedule() -> None:
    state, rates = run_schedule(make_schedule(epochs=6, lr_warmup_steps=20), lambda epoch: 0.0)
    assert state.epoch == 6 and not state.ended
    assert rates == [linear_schedule(20, 120)(step) for step in range(120)]


def test_linear_schedule_rises_then_falls_to_zero() -> None:
    share = linear_schedule(4, 12)
    assert [share(step) for step in range(13)] == pytest.approx([0.25, 0.5, 0.75, 1, *np.arange(8, -1, -1) / 8])
    assert linear_schedule(50, 10)(4) == 1 and linear_schedule(50, 10)(0) == 0.2, (
        "it rises in half of the steps at most"
    )


def test_phases_of_tiny_datasets_have_48_steps_with_auto() -> None:
    schedule = make_schedule(steps_per_epoch=1, max_epochs=200)
    assert schedule.warmup_epochs == 48 and schedule.at_least(4) == 48
    assert make_schedule(steps_per_epoch=1000).warmup_epochs == 4
    assert make_schedule(steps_per_epoch=1, epochs=8).warmup_epochs == 4, "a fixed number of epochs is not changed"


def test_training_lasts_eight_epochs_with_too_few_held_out_documents() -> None:
    state, _ = run_schedule(make_schedule(held_out=10), lambda epoch: 0.0)
    assert state.epoch == 8
    assert not make_schedule(held_out=10).can_decide and make_schedule(held_out=50).can_decide


@pytest.mark.parametrize("seconds_per_step", [0.05, 1.0, 7.0])
def test_training_ends_within_max_minutes_at_any_speed(
    monkeypatch: pytest.MonkeyPatch, seconds_per_step: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(f"{CLOCK}.monotonic", lambda: now[0])
    schedule = make_schedule(max_minutes=10, max_epochs=10_000)
    rate = schedule.rate

    def advance_clock(step: int) -> float:
        now[0] += seconds_per_step
        return rate(step)

    monkeypatch.setattr(schedule, "rate", advance_clock)
    state, _ = run_schedule(schedule, lambda epoch: epoch, lambda: 30.0)
    assert state.ended and 600 - 30 <= now[0] <= 600 - 30 + 1.01 * seconds_per_step


def test_warmup_takes_two_fifths_of_max_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(f"{CLOCK}.monotonic", lambda: now[0])
    schedule = make_schedule(max_minutes=10)
    schedule.is_warmup = True
    assert not schedule.end_if_out_of_time(TrainingState(), lambda: 0.0)
    now[0] = 241.0
    assert schedule.end_if_out_of_time(TrainingState(), lambda: 0.0)


def test_epochs_are_a_number_or_auto() -> None:
    assert resolve(preset="xc").training.epochs == "auto"
    assert resolve(preset="xc", sets=["training.epochs=8.0"]).training.epochs == 8, "KFP stores integers as floats"
    for value in ("none", "0", "2.5", "true"):
        with pytest.raises(
            ConfigError, match=r"training.epochs: .*: expected a whole number from 1 to 100000, or auto"
        ):
            resolve(preset="xc", sets=[f"training.epochs={value}"])
    with pytest.raises(ConfigError, match="max_minutes = 5 needs epochs = auto, not 8"):
        resolve(preset="xc", sets=["training.epochs=8", "training.max_minutes=5"])


AUTO = changed(
    training={"epochs": "auto", "validation_fraction": 0.3, "warmup_epochs": 2, "max_epochs": 12},
    pruning={"every": 3},
)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower limits: the tiny problem holds out a dozen documents."""
    monkeypatch.setattr("ramen.training.schedule.FEWEST_HELD_OUT", 5)
    monkeypatch.setattr("ramen.training.schedule.LEAST_STEPS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_limits")
def test_auto_training_ends_and_prunes_in_rounds(train_once: TrainOnce) -> None:
    folder = train_once(AUTO)
    records = history(folder / "model")
    assert [r["epoch"] for r in records] == list(range(1, len(records) + 1)) and 4 <= len(records) <= 12
    assert [r["phase"] for r in records[:3]] == ["warmup", "warmup", "retrain"]
    assert records[-1]["val_gain"] is not None and records[-1]["val_p_at_1"] is not None
    rounds = json.loads((folder / "pruned_graph" / "rounds.json").read_text())
    assert rounds[0]["epoch"] == 2 and all(r["val_p_at_1"] is not None for r in rounds)


@pytest.mark.slow
@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("point", [3, 7, 10])
def test_interrupted_auto_training_is_bit_identical_after_resume(
    point: int, tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path
) -> None:
    expected = train_once(AUTO)
    with pytest.raises(Interrupted):
        run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, AUTO, track=InterruptAtPoint(point))
    run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, AUTO)
    assert_same_artifacts(tmp_path, expected)


class CurveNames(NullTracker):
    """Keeps the names of logged curves."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def curve(self, metrics: Mapping[str, float], step: int) -> None:
        assert step > 0
        self.names |= set(metrics)


@pytest.mark.slow
def test_curves_and_summaries_have_different_names(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    """A summary has no step; MLflow would draw it as step 0 of the curve with its name."""
    track = CurveNames()
    summary = run_warmup(tiny_artifacts, tmp_path, track=track)
    summary |= run_retraining(tiny_artifacts, tmp_path / "warm_model", tmp_path, track=track)
    expected = {"train/loss", "train/learning_rate", "train/gradient_norm", "lambda/links.label", "heldout/p_at_1"}
    assert expected | {"graph/edges_kept/links.document"} <= track.names
    assert not track.names & set(summary) and "edges_kept/links.document" in summary


@pytest.mark.slow
def test_max_minutes_ends_both_stages(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.training.schedule.FEWEST_HELD_OUT", 5)
    train_step, now = Trainer.train_step, [0.0]

    def take_ten_seconds(trainer: Trainer, step: Step) -> dict[str, float]:
        now[0] += 10.0
        return train_step(trainer, step)

    monkeypatch.setattr(Trainer, "train_step", take_ten_seconds)
    monkeypatch.setattr(f"{CLOCK}.monotonic", lambda: now[0])
    training = {"epochs": "auto", "max_minutes": 10, "max_epochs": 10_000, "validation_fraction": 0.3}
    train(tiny_artifacts, tmp_path, changed(training=training))
    assert 560 <= now[0] <= 600
    records = history(tmp_path / "model")
    assert records[-1]["seconds"] == now[0]
    warmup = [r for r in records if r["phase"] == "warmup"]
    assert len(warmup) > 2 and 240 <= warmup[-1]["seconds"] <= 250, "48 steps would take two thirds of the time"
