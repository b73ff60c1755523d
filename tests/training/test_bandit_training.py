"""The bandit while training on planted graphs: the noise loses its weight, and that pays."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np


def test_it_takes_weight_from_noise_and_beats_weights_that_stay(planting: ModuleType, tmp_path: Path) -> None:
    data = planting.write(planting.planted(), tmp_path / "data")
    done = {
        name: [planting.train(data, tmp_path / f"{name}{seed}", planting.ROWS[name], seed, 50) for seed in (1, 2)]
        for name in ("uniform weights", "bandit")
    }
    weights = {key: np.mean([weights[key] for _, weights in done["bandit"]]) for key in ("told", "noise")}
    assert weights["told"] > planting.START > weights["noise"] and weights["told"] - weights["noise"] > 0.1
    assert np.mean([p for p, _ in done["bandit"]]) > np.mean([p for p, _ in done["uniform weights"]]) + 2
