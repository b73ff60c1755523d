"""The bandit: its estimates of a derivative, the divergence of the published form, and its bounds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ramen.config import BanditConfig
from ramen.objective.bandit import LAMBDA_MIN, MAX_STEP, Bandit


def make_bandit(seed: int = 0, initial: dict[str, float] | None = None, **knobs: Any) -> Bandit:
    settings = BanditConfig.model_validate({"enabled": True, **knobs})
    return Bandit(settings, initial or {"a": 0.5}, lambda window: np.random.default_rng([seed, window]))


def run(tuner: Bandit, loss: Any, windows: int) -> list[dict[str, float]]:
    path = []
    for _ in range(windows * tuner.settings.period):
        if tuner.observe(loss(tuner.weights)):
            path.append(dict(tuner.means))
    return path


def test_safe_estimates_are_unbiased() -> None:
    tuner = make_bandit()
    z = 0.1 * np.random.default_rng(1).choice((-1.0, 1.0), 200_000)
    estimates = np.array([tuner.slope(2 + 3 * value, value) for value in z])
    assert abs(estimates.mean() - 3) < 3 * estimates.std() / np.sqrt(len(z))


def test_printed_slope_equals_safe_slope_on_signs_and_has_heavy_tails_on_gaussians() -> None:
    printed, safe = make_bandit(form="printed"), make_bandit(form="safe")
    assert all(printed.slope(0.7, z) == pytest.approx(safe.slope(0.7, z), abs=1e-12) for z in (-0.1, 0.1))
    z = 0.1 * np.random.default_rng(0).standard_normal(1000)
    steps = np.abs([printed.slope(0.7, value) for value in z])
    assert steps.max() / np.median(steps) > 100
    assert printed.slope(0.7, 0.0) == safe.slope(0.7, 0.0) == 0


def test_perturbations_are_signs_in_safe_form_and_gaussian_in_printed_form() -> None:
    safe, printed = (make_bandit(form=form, period=1, lr=1e-9) for form in ("safe", "printed"))
    found: dict[str, list[float]] = {"safe": [], "printed": []}
    for _ in range(300):
        for tuner in (safe, printed):
            found[tuner.settings.form].append(tuner.weights["a"] - tuner.means["a"])
            tuner.observe(0.5)
    np.testing.assert_allclose(np.abs(found["safe"]), 0.1, atol=1e-9)
    assert len(np.unique(found["printed"])) == 300 and 0.08 < np.std(found["printed"]) < 0.12


def test_published_feedback_drives_weights_below_zero() -> None:
    """The weighted loss contains λ R, whose slope R is positive even if the regulariser helps."""
    ends = [
        run(make_bandit(seed, form="printed", period=1), lambda w: 0.2 + w["a"] * 0.2, 100)[-1]["a"]
        for seed in range(200)
    ]
    assert np.median(ends) < 0.45
    assert np.mean(np.array(ends) < 0) > 0.2


def test_safe_weights_stay_at_the_floor_when_the_feedback_falls_with_them() -> None:
    path = run(make_bandit(0, period=1, lr=0.05), lambda w: 0.2 + w["a"] * 0.2, 400)
    assert min(step["a"] for step in path) >= LAMBDA_MIN
    assert path[-1]["a"] < 0.3


def test_one_update_per_window_and_steps_are_bounded() -> None:
    tuner = make_bandit(period=30, lr=1.0)
    feedback = np.random.default_rng(0).random(300)
    ends = [step for step in range(1, 301) if tuner.observe(feedback[step - 1])]
    assert ends == list(range(30, 301, 30))
    values = iter(feedback)
    path = [0.5] + [step["a"] for step in run(make_bandit(period=1, lr=1.0), lambda w: next(values), 50)]
    assert 0.04 < np.abs(np.diff(path)).max() <= MAX_STEP + 1e-12


def test_weight_of_0_stays_0_and_perturbed_weights_stay_in_bounds() -> None:
    tuner = make_bandit(initial={"on": 0.02, "off": 0.0}, period=1)
    for _ in range(100):
        assert tuner.weights["off"] == 0 and tuner.weights["on"] >= LAMBDA_MIN
        tuner.observe(0.5)


def test_weights_that_hurt_fall_and_weights_that_help_rise() -> None:
    start = {"good": 0.5, "noise": 0.5}
    ends = [
        run(make_bandit(seed, start, period=1, lr=0.02), lambda w: 0.5 - 0.3 * w["good"] + 0.3 * w["noise"], 300)[-1]
        for seed in range(20)
    ]
    assert np.mean([end["good"] for end in ends]) > 0.6 > 0.4 > np.mean([end["noise"] for end in ends])


def test_steps_are_about_lr_at_any_scale_of_the_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.objective.bandit.LAMBDA_MIN", 0.0)
    monkeypatch.setattr("ramen.objective.bandit.LAMBDA_MAX", 9.0)
    feedback = np.random.default_rng(3).random(300)
    paths = []
    for scale in (1.0, 1000.0):
        values = iter(scale * feedback)
        tuner = make_bandit(initial={"a": 4.0}, period=1, lr=0.01)
        paths.append([step["a"] for step in run(tuner, lambda w, v=values: next(v), 300)])
    np.testing.assert_allclose(paths[0], paths[1])
    steps = np.abs(np.diff(paths[0]))
    assert 0.001 < np.median(steps) < 0.02


def test_steps_shrink_with_the_given_scale() -> None:
    none, half, full = (make_bandit(period=1, lr=0.01) for _ in range(3))
    for value in (0.5, 0.7):
        none.observe(value, 0.0), half.observe(value, 0.5), full.observe(value)
    assert none.means["a"] == 0.5
    assert half.means["a"] - 0.5 == pytest.approx((full.means["a"] - 0.5) / 2) and full.means["a"] != 0.5


@pytest.mark.parametrize("form", ["safe", "printed"])
def test_restored_bandit_continues_identically(form: str) -> None:
    uninterrupted = make_bandit(period=3, form=form)
    restored = make_bandit(period=3, form=form)
    feedback = np.random.default_rng(0).random(100)
    for i, value in enumerate(feedback):
        uninterrupted.observe(value)
        restored.observe(value)
        if i == 49:
            state = json.loads(json.dumps(restored.state()))
            restored = make_bandit(period=3, form=form)
            restored.restore(state)
    assert uninterrupted.means == restored.means and uninterrupted.weights == restored.weights


def test_state_with_other_regularisers_is_restored_where_names_agree() -> None:
    warmed = make_bandit(initial={"a": 0.5, "removed": 0.5}, period=1)
    other = make_bandit(initial={"a": 0.9, "new": 0.3}, period=1)
    for feedback in (1.0, 0.5, 2.0):
        warmed.observe(feedback)
    other.restore(warmed.state())
    assert other.means == {"a": warmed.means["a"], "new": 0.3} and warmed.means["a"] != 0.5
    other.observe(1.0)
    assert set(other.weights) == {"a", "new"}
