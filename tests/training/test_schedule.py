"""When training ends, and at which learning rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramen.artifacts import open_artifact
from ramen.config import TrainingConfig, resolve
from ramen.errors import ConfigError, Interrupted
from ramen.stages import run_stage
from ramen.tracking import NullTracker
from ramen.training import schedule as planning
from ramen.training.checkpoint import TrainingState
from ramen.training.schedule import Clock, Schedule, has_settled
from ramen.training.trainer import Trainer

from training_recipe import StopAt, changed, history, train


def records(gains: list[float]) -> list[dict[str, Any]]:
    return [{"epoch": i, "phase": "retrain", "val_gain": gain} for i, gain in enumerate(gains, 1)]


def epochs_until_settled(curve: Any, noise: float = 0.0, seed: int = 0) -> int:
    """Epochs after which the rule ends a training whose held-out gain follows `curve(epoch)`."""
    rng = np.random.default_rng(seed)
    gains: list[float] = []
    for epoch in range(1, 200):
        gains.append(curve(epoch) + noise * rng.standard_normal())
        if has_settled(records(gains)):
            return epoch
    return 200


def test_training_continues_while_held_out_gain_rises() -> None:
    assert epochs_until_settled(lambda epoch: 20 + epoch) == 200
    assert epochs_until_settled(lambda epoch: 20 + min(epoch, 30)) in range(31, 42)
    assert epochs_until_settled(lambda epoch: 20 + 10 * (1 - np.exp(-epoch / 8))) > 16, "86 % of all"


def test_training_ends_soon_after_a_peak() -> None:
    found = epochs_until_settled(lambda epoch: 30 + epoch if epoch < 6 else 42 - epoch)
    assert found <= 8, "the data set is overfitted after six epochs"


def test_training_ends_after_four_evaluations_at_the_earliest() -> None:
    assert [epochs_until_settled(lambda epoch, slope=slope: slope * epoch) for slope in (-1, 0, 0.4)] == [4, 4, 4]


def test_noise_of_a_few_hundred_documents_rarely_ends_a_rise() -> None:
    """A point an epoch with a fifth of a point of noise, as averaged weights have on 500 documents."""
    ends = [epochs_until_settled(lambda epoch: 20 + min(epoch, 12), noise=0.2, seed=seed) for seed in range(200)]
    assert np.mean([end < 10 for end in ends]) < 0.1 and np.median(ends) <= 17


def test_epochs_that_were_not_evaluated_do_not_count() -> None:
    assert not has_settled([{"epoch": i, "val_gain": 20.0 if i % 2 else None} for i in range(1, 7)]), (
        "three evaluations"
    )
    assert has_settled([{"epoch": i, "val_gain": 20.0 if i % 2 else None} for i in range(1, 8)])
    rising = [{"epoch": i, "val_gain": float(i) if i % 3 == 0 else None} for i in range(1, 13)]
    assert not has_settled(rising), "a point an epoch"


def plan(held_out: int = 500, steps: int = 20, **training: Any) -> Schedule:
    return Schedule(TrainingConfig(**training), steps, held_out)


def run(made: Schedule, curve: Any, closing: Any = lambda: 0.0) -> tuple[TrainingState, list[float]]:
    """What a training loop does with a plan: the position it ends at, and the rate of each step."""
    position, rates = TrainingState(), []
    made.is_warmup = True
    while position.epoch < made.max_epochs:
        if made.is_warmup and (position.epoch >= made.warmup_epochs or position.ended):
            made.is_warmup = position.ended = False
        if position.ended:
            break
        for index in range(made.steps_per_epoch):
            if index and made.end_if_out_of_time(position, closing):
                break
            rates.append(made.rate(position.global_step))
            position.global_step += 1
        made.end_if_out_of_time(position, closing)
        position.epoch += 1
        position.history.append({"epoch": position.epoch, "val_gain": curve(position.epoch)})
        made.end_if_settled(position)
    return position, rates


def test_the_rate_rises_and_stays() -> None:
    position, rates = run(plan(lr_warmup_steps=50), lambda epoch: min(epoch, 10))
    assert rates[:50] == pytest.approx(np.arange(1, 51) / 50)
    assert set(rates[50:]) == {1.0}
    assert 11 <= position.epoch <= 14


@pytest.mark.parametrize("most", [2, 3, 5, 8, 40])
def test_max_epochs_ends_training(most: int) -> None:
    position, rates = run(plan(max_epochs=most), lambda epoch: epoch)
    assert position.epoch == most and len(rates) == 20 * most


def test_a_given_number_of_epochs_has_a_linear_schedule() -> None:
    position, rates = run(plan(epochs=6, lr_warmup_steps=20), lambda epoch: 0.0)
    assert position.epoch == 6 and not position.ended
    assert rates == [planning.linear_schedule(20, 120)(step) for step in range(120)]


def test_tiny_data_are_trained_for_enough_steps() -> None:
    made = plan(steps=1, max_epochs=200)
    assert made.warmup_epochs == 48 and made.at_least(4) == 48
    assert plan(steps=1000).warmup_epochs == 4
    assert plan(steps=1, epochs=8).warmup_epochs == 4, "as given"


def test_without_held_out_documents_training_lasts_eight_epochs() -> None:
    position, _ = run(plan(held_out=10), lambda epoch: 0.0)
    assert position.epoch == 8
    assert not plan(held_out=10).can_decide and plan(held_out=50).can_decide


def test_minutes_are_kept_whatever_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(planning.time, "monotonic", lambda: now[0])
    for pace in (0.05, 1.0, 7.0):
        now[0] = 0.0
        made = plan(max_minutes=10, max_epochs=10_000)
        made.clock = Clock()
        ordinary = made.rate

        def rate(step: int, pace: float = pace, ordinary: Any = ordinary) -> float:
            now[0] += pace
            return ordinary(step)

        made.rate = rate  # type: ignore[method-assign]
        position, _ = run(made, lambda epoch: epoch, lambda: 30.0)
        assert position.ended and 600 - 30 <= now[0] <= 600 - 30 + 1.01 * pace


def test_a_warm_up_takes_its_share_of_the_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(planning.time, "monotonic", lambda: now[0])
    made = plan(max_minutes=10)
    made.clock, made.is_warmup = Clock(), True
    assert not made.end_if_out_of_time(TrainingState(), lambda: 0.0)
    now[0] = 241.0
    assert made.end_if_out_of_time(TrainingState(), lambda: 0.0), "two fifths"


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
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny problem holds out a dozen documents."""
    monkeypatch.setattr(planning, "FEWEST_HELD_OUT", 5)
    monkeypatch.setattr(planning, "LEAST_STEPS", 4)


@pytest.mark.usefixtures("few")
def test_training_ends_by_itself_and_prunes_on_the_way(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    train(tiny_artifacts, tmp_path, AUTO)
    found = history(tmp_path / "model")
    assert [r["epoch"] for r in found] == list(range(1, len(found) + 1)) and 4 <= len(found) <= 12
    assert [r["phase"] for r in found[:3]] == ["warmup", "warmup", "retrain"]
    assert found[-1]["val_gain"] is not None and found[-1]["val_p_at_1"] is not None
    rounds = json.loads((tmp_path / "pruned_graph" / "rounds.json").read_text())
    assert rounds[0]["epoch"] == 2 and all(r["val_p_at_1"] is not None for r in rounds)


class Curves(NullTracker):
    """Remembers the names of curves."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def curve(self, metrics: Any, step: int) -> None:
        assert step > 0
        self.names |= set(metrics)


def test_curves_and_summaries_have_different_names(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    """A summary has no step, which MLflow draws as step 0 of a curve of that name."""
    inputs, track = {name: tiny_artifacts[name] for name in ("dataset", "graph")}, Curves()
    outputs = {"warm_model": tmp_path / "warm_model"}
    summary = run_stage("warmup", sections=changed(), inputs=inputs, outputs=outputs, track=track)
    outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    inputs["warm_model"] = tmp_path / "warm_model"
    summary |= run_stage("prune-retrain", sections=changed(), inputs=inputs, outputs=outputs, track=track)
    expected = {"train/loss", "train/learning_rate", "train/gradient_norm", "lambda/links.label", "heldout/p_at_1"}
    assert expected | {"graph/edges_kept/links.document"} <= track.names
    assert not track.names & set(summary) and "edges_kept/links.document" in summary


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("after", [3, 7, 10])
def test_an_interrupted_auto_training_ends_bit_identical(
    after: int, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    train(tiny_artifacts, tmp_path / "whole", AUTO)
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    inputs["warm_model"] = tmp_path / "whole" / "warm_model"
    outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    with pytest.raises(Interrupted):
        run_stage("prune-retrain", sections=AUTO, inputs=inputs, outputs=outputs, track=StopAt(after))
    run_stage("prune-retrain", sections=AUTO, inputs=inputs, outputs=outputs)
    for name, path in outputs.items():
        assert open_artifact(path, name).digest == open_artifact(tmp_path / "whole" / name, name).digest


def test_a_budget_of_minutes_ends_both_stages(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "FEWEST_HELD_OUT", 5)
    plain = Trainer.train_step
    spent = [0.0]

    def slow(self: Trainer, step: Any) -> dict[str, float]:
        spent[0] += 10.0
        return plain(self, step)

    monkeypatch.setattr(Trainer, "train_step", slow)
    monkeypatch.setattr(planning.time, "monotonic", lambda: spent[0])
    training = {"epochs": "auto", "max_minutes": 10, "max_epochs": 10_000, "validation_fraction": 0.3}
    train(tiny_artifacts, tmp_path, changed(training=training))
    assert 560 <= spent[0] <= 600
    found = history(tmp_path / "model")
    assert found[-1]["seconds"] == spent[0]
    warm = [r for r in found if r["phase"] == "warmup"]
    assert len(warm) > 2 and 240 <= warm[-1]["seconds"] <= 250, "48 steps would take two thirds of the time"
