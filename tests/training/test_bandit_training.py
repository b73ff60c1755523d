"""The bandit in training on planted graphs: the noise set loses its weight, and test P@1 improves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.mark.slow
def test_bandit_lowers_the_weight_of_noise_and_beats_constant_weights(
    bandit_benchmark: ModuleType, tmp_path: Path
) -> None:
    data = bandit_benchmark.write(bandit_benchmark.planted(), tmp_path / "data")
    results = {
        name: [
            bandit_benchmark.train(data, tmp_path / f"{name}{seed}", bandit_benchmark.ROWS[name], seed, 50)
            for seed in (1, 2)
        ]
        for name in ("uniform weights", "bandit")
    }
    weights = {key: np.mean([weights[key] for _, weights in results["bandit"]]) for key in ("told", "noise")}
    assert weights["told"] > bandit_benchmark.START > weights["noise"] and weights["told"] - weights["noise"] > 0.1
    assert np.mean([p for p, _ in results["bandit"]]) > np.mean([p for p, _ in results["uniform weights"]]) + 2
