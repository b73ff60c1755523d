"""The average of the weights over training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ramen.training.trainer import Trainer
from ramen.training.weight_average import EXPONENT, WeightAverage

from training_recipe import changed, train


def steps(count: int, steps_per_epoch: int = 10) -> tuple[WeightAverage, torch.nn.Parameter, list[torch.Tensor]]:
    """An average over `count` steps of a parameter, and the parameter's value after each."""
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
    average, parameter, values = steps(40)
    t = np.arange(1, 41)
    weights = np.array([np.prod((i + np.arange(EXPONENT)), dtype=float) for i in t])  # t (t + 1) (t + 2)
    expected = np.average(torch.stack(values).numpy(), axis=0, weights=weights)
    with average.in_place():
        assert parameter.detach().numpy() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(parameter.detach(), values[-1])


def test_long_epochs_update_the_average_fifty_times() -> None:
    average, parameter, values = steps(400, steps_per_epoch=200)
    included = torch.stack(values)[3::4].numpy()
    weights = np.array([i * (i + 1) * (i + 2) for i in range(1, 101)], float)
    with average.in_place():
        assert parameter.detach().numpy() == pytest.approx(np.average(included, axis=0, weights=weights), rel=1e-4)


def test_weights_are_put_back_to_be_saved() -> None:
    average, parameter, values = steps(5)
    with average.in_place():
        assert not torch.equal(parameter, values[-1])
        with average.put_back():
            assert torch.equal(parameter, values[-1])
        assert not torch.equal(parameter, values[-1])
    with average.put_back():
        assert torch.equal(parameter, values[-1])


def test_untrained_parameters_stay() -> None:
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
def test_model_of_an_open_end_holds_the_average(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    step = Trainer.train_step

    def recorded(self: Trainer, *args: object) -> dict[str, float]:
        values = step(self, *args)  # type: ignore[arg-type]
        seen.append({name: value.detach().clone() for name, value in self.encoder.named_parameters()})
        return values

    monkeypatch.setattr(Trainer, "train_step", recorded)
    training = {"epochs": "auto", "validation_fraction": 0.3, "warmup_epochs": 1, "max_epochs": 4}
    train(tiny_artifacts, tmp_path, changed(training=training))
    written = next(tmp_path.glob("model/**/model.safetensors"))
    found = load_file(written)
    t = np.arange(1, len(seen) + 1)
    weights = t * (t + 1.0) * (t + 2.0)
    compared = 0
    for name, value in seen[-1].items():
        key = next((key for key in found if name.endswith(key)), None)
        if key is None:
            continue
        stacked = np.stack([each[name].numpy() for each in seen]).astype(np.float64)
        expected = np.average(stacked, axis=0, weights=weights)
        assert found[key].numpy() == pytest.approx(expected, abs=1e-5)
        compared += int(not np.allclose(expected, value.numpy(), atol=1e-5))
    assert compared, "the average differs from the last weights"
