"""The bandit: its estimators against the derivative they estimate, the defect of the published one, its safeguards."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ramen.config import BanditConfig
from ramen.objective.bandit import Bandit


def bandit(seed: int = 0, initial: dict[str, float] | None = None, **knobs: Any) -> Bandit:
    settings = BanditConfig.model_validate({"enabled": True, **knobs})
    return Bandit(settings, initial or {"a": 0.5}, lambda window: np.random.default_rng([seed, window]))


def run(tuner: Bandit, loss: Any, windows: int) -> list[dict[str, float]]:
    path = []
    for _ in range(windows * tuner.settings.period):
        if tuner.observe(loss(tuner.weights)):
            path.append(dict(tuner.means))
    return path


@pytest.mark.parametrize(("estimator", "baseline"), [("rademacher", False), ("stein", False)])
def test_estimates_are_unbiased(estimator: str, baseline: bool) -> None:
    tuner = bandit(estimator=estimator, baseline=baseline, safeguards=False)
    sigma, rng = 0.1, np.random.default_rng(1)
    z = sigma * (rng.choice((-1.0, 1.0), 200_000) if estimator == "rademacher" else rng.standard_normal(200_000))
    estimates = np.array([tuner.slope(2 + 3 * value, value) for value in z])
    assert abs(estimates.mean() - 3) < 3 * estimates.std() / np.sqrt(len(z))


def test_the_printed_estimator_equals_rademachers_on_signs_and_has_wild_tails_on_gaussians() -> None:
    paper, signs = bandit(estimator="paper"), bandit(estimator="rademacher")
    assert all(paper.slope(0.7, z) == pytest.approx(signs.slope(0.7, z), abs=1e-12) for z in (-0.1, 0.1))
    z = 0.1 * np.random.default_rng(0).standard_normal(1000)
    literal = bandit(estimator="paper", safeguards=False)
    steps = np.abs([literal.slope(0.7, value) for value in z])
    assert steps.max() / np.median(steps) > 100
    assert paper.slope(0.7, 0.0) == literal.slope(0.7, 0.0) == 0


def test_a_window_whose_perturbation_the_floor_cut_short_says_nothing() -> None:
    """At 0.011 over a floor of 0.01 a step down is 0.001 long; P / z of it would throw the weight up by the largest."""
    tuner = bandit(estimator="paper", period=1, baseline=False, initial={"a": 0.011})
    for _ in range(200):
        z, mean = tuner.weights["a"] - tuner.means["a"], tuner.means["a"]
        tuner.observe(0.2)
        assert tuner.means["a"] == mean or abs(z) >= 0.025
        tuner.means["a"] = 0.011
        tuner._perturb()


def test_the_published_feedback_drives_weights_below_zero_and_a_floor_holds_them() -> None:
    """The weighted loss contains λ R: its slope is R > 0 whatever R is worth."""
    settings = {"period": 1, "baseline": False, "sigma": 0.1, "lr": 0.01}
    ends = [
        run(bandit(seed, safeguards=False, **settings), lambda w: 0.2 + w["a"] * 0.2, 400)[-1]["a"]
        for seed in range(200)
    ]
    assert np.mean(ends) < 0 and np.mean(ends) < 0.5 - 3 * np.std(ends) / np.sqrt(len(ends))
    held = run(bandit(0, lambda_min=0.05, **settings), lambda w: 0.2 + w["a"] * 0.2, 400)
    assert min(step["a"] for step in held) >= 0.05


def test_one_update_per_window_and_steps_are_bounded() -> None:
    tuner = bandit(period=30, max_step=0.02, baseline=False, lr=1.0)
    ends = [step for step in range(1, 301) if tuner.observe(0.3)]
    assert ends == list(range(30, 301, 30))
    path = [0.5] + [step["a"] for step in run(bandit(period=1, max_step=0.02, baseline=False, lr=1.0), lambda w: 1, 50)]
    assert np.abs(np.diff(path)).max() <= 0.02 + 1e-12


def test_weights_that_are_off_stay_off_and_perturbed_ones_stay_in_bounds() -> None:
    tuner = bandit(initial={"on": 0.02, "off": 0.0}, period=1, lambda_min=0.01)
    for _ in range(100):
        assert tuner.weights["off"] == 0 and tuner.weights["on"] >= 0.01
        tuner.observe(0.5)


def test_a_fixed_sum_stays() -> None:
    tuner = bandit(initial={"task": 1.0, "a": 0.1, "b": 0.3}, period=1, gauge="fixed_sum", lr=0.1)
    run(tuner, lambda w: w["a"] - w["b"], 50)
    assert sum(tuner.means.values()) == pytest.approx(1.4)


@pytest.mark.parametrize("estimator", ["rademacher", "paper", "stein", "reward"])
def test_it_lowers_what_hurts_and_raises_what_helps(estimator: str) -> None:
    settings = {"estimator": estimator, "period": 1, "lr": 0.02, "sigma": 0.1}
    start = {"good": 0.5, "noise": 0.5}
    ends = [
        run(bandit(seed, start, **settings), lambda w: 0.5 - 0.3 * w["good"] + 0.3 * w["noise"], 300)[-1]
        for seed in range(20)
    ]
    assert np.mean([end["good"] for end in ends]) > 0.6 > 0.4 > np.mean([end["noise"] for end in ends])


@pytest.mark.parametrize("estimator", ["rademacher", "paper", "stein", "reward"])
def test_the_scale_of_the_feedback_does_not_matter_and_steps_are_about_lr(estimator: str) -> None:
    feedback = np.random.default_rng(3).random(300)
    paths = []
    for scale in (1.0, 1000.0):
        values = iter(scale * feedback)
        knobs = {"estimator": estimator, "period": 1, "lr": 0.01, "lambda_min": 0.0, "lambda_max": 9.0}
        paths.append([step["a"] for step in run(bandit(initial={"a": 4.0}, **knobs), lambda w, v=values: next(v), 300)])
    np.testing.assert_allclose(paths[0], paths[1])
    steps = np.abs(np.diff(paths[0]))
    assert 0.001 < np.median(steps) < 0.02


def test_steps_shrink_with_the_scale_they_are_told() -> None:
    still, half, whole = (bandit(period=1, lr=0.01) for _ in range(3))
    for value in (0.5, 0.7):
        still.observe(value, 0.0), half.observe(value, 0.5), whole.observe(value)
    assert still.means["a"] == 0.5
    assert half.means["a"] - 0.5 == pytest.approx((whole.means["a"] - 0.5) / 2) and whole.means["a"] != 0.5


def test_a_restored_bandit_goes_the_same_way() -> None:
    whole = bandit(period=3)
    parts = bandit(period=3)
    feedback = np.random.default_rng(0).random(100)
    for i, value in enumerate(feedback):
        whole.observe(value)
        parts.observe(value)
        if i == 49:
            state = json.loads(json.dumps(parts.state()))
            parts = bandit(period=3)
            parts.restore(state)
    assert whole.means == parts.means and whole.weights == parts.weights


def test_regularisers_may_come_and_go_between_warm_up_and_retraining() -> None:
    warmed, other = bandit(initial={"a": 0.5, "gone": 0.5}, period=1), bandit(initial={"a": 0.9, "new": 0.3}, period=1)
    for feedback in (1.0, 0.5, 2.0):
        warmed.observe(feedback)
    other.restore(warmed.state())
    assert other.means == {"a": warmed.means["a"], "new": 0.3} and warmed.means["a"] != 0.5
    other.observe(1.0)
    assert set(other.weights) == {"a", "new"}
