"""The average of the weights over training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ramen.training.step_sampler import Step
from ramen.training.trainer import Trainer
from ramen.training.weight_average import EXPONENT, WeightAverage

from training_recipe import changed, train


def run_steps(count: int, steps_per_epoch: int = 10) -> tuple[WeightAverage, torch.nn.Parameter, list[torch.Tensor]]:
    """Optimise a parameter; return the average of its values, the parameter, and its value after each step."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    average, values = WeightAverage(optimizer, steps_per_epoch), []
    generator = torch.Generator().manual_seed(0)
    for step in range(1, count + 1):
        parameter.grad = torch.randn(3, generator=generator)
        optimizer.step()
        average.update(step)
        values.append(parameter.detach().clone())
    return average, parameter, values


def test_average_weighs_steps_by_their_cube() -> None:
    average, parameter, values = run_steps(40)
    t = np.arange(1, 41)
    weights = np.array([np.prod((i + np.arange(EXPONENT)), dtype=float) for i in t])  # t (t + 1) (t + 2)
    expected = np.average(torch.stack(values).numpy(), axis=0, weights=weights)
    with average.in_place():
        assert parameter.detach().numpy() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(parameter.detach(), values[-1])


def test_long_epochs_update_the_average_fifty_times() -> None:
    average, parameter, values = run_steps(400, steps_per_epoch=200)
    included = torch.stack(values)[3::4].numpy()
    weights = np.array([i * (i + 1) * (i + 2) for i in range(1, 101)], float)
    with average.in_place():
        assert parameter.detach().numpy() == pytest.approx(np.average(included, axis=0, weights=weights), rel=1e-4)


def test_put_back_restores_the_trained_weights() -> None:
    average, parameter, values = run_steps(5)
    with average.in_place():
        assert not torch.equal(parameter, values[-1])
        with average.put_back():
            assert torch.equal(parameter, values[-1])
        assert not torch.equal(parameter, values[-1])
    with average.put_back():
        assert torch.equal(parameter, values[-1])


def test_parameters_without_or_with_a_late_gradient_stay_finite() -> None:
    trained, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([trained, unused], lr=0.1, fused=True)
    average = WeightAverage(optimizer, 1)
    for step in (1, 2, 3):
        trained.grad = torch.ones(2)
        unused.grad = torch.ones(2) if step == 3 else None  # its first gradient comes later
        optimizer.step()
        average.update(step)
    with average.in_place():
        assert torch.isfinite(unused).all() and torch.isfinite(trained).all()


@pytest.mark.slow
def test_model_of_auto_training_holds_the_average(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[dict[str, torch.Tensor]] = []
    train_step = Trainer.train_step

    def record_weights(trainer: Trainer, step: Step) -> dict[str, float]:
        terms = train_step(trainer, step)
        values.append({name: value.detach().clone() for name, value in trainer.encoder.named_parameters()})
        return terms

    monkeypatch.setattr(Trainer, "train_step", record_weights)
    training = {"epochs": "auto", "validation_fraction": 0.3, "warmup_epochs": 1, "max_epochs": 4}
    train(tiny_artifacts, tmp_path, changed(training=training))
    written = load_file(next(tmp_path.glob("model/**/model.safetensors")))
    t = np.arange(1, len(values) + 1)
    weights = t * (t + 1.0) * (t + 2.0)
    differing = 0
    for name, last in values[-1].items():
        key = next((key for key in written if name.endswith(key)), None)
        if key is None:
            continue
        stacked = np.stack([value[name].numpy() for value in values]).astype(np.float64)
        expected = np.average(stacked, axis=0, weights=weights)
        assert written[key].numpy() == pytest.approx(expected, abs=1e-5)
        differing += int(not np.allclose(expected, last.numpy(), atol=1e-5))
    assert differing, "the average differs from the last weights"
