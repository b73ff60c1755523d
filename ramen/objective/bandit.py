"""Online tuning of the regularisation weights by a bandit (R-ICLR 3).

Every window of `period` steps trains with perturbed weights `λ + z`; the mean feedback P of the window says which way
each λ should go. As published, P is the weighted loss itself, which contains every λ as a factor: its slope in λ is the
regulariser's value, never negative, so weights drift to zero and below. The feedbacks "task_loss", "accuracy" and
"heldout_loss" do not contain λ, and a floor keeps a weight that is not wanted now from being lost for ever. Losses fall
by more from window to window than a perturbation changes them, so the mean of the windows before is taken off (the
advantage), and what is left is measured in its own running deviation: a step is then about `lr`, whatever the feedback.

Estimators of the slope, z being what was really added (after the floor and the cap):

* "rademacher": P u / δ, z = δ u with u = ±1: what the cited theory proves. A bound that cuts z short
  cuts the estimate short, too.
* "paper": P / z with Gaussian z, as printed; 1 / z has no mean, so |z| is kept above σ / 4 unless `safeguards` is off,
  and a window whose z a bound cut shorter says nothing.
* "stein": P z / σ², the Gaussian estimator that is unbiased.
* "reward": λ goes by lr times advantage z / σ², cut to ±1, the policy gradient of MOGIC's authors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ramen.config import BanditConfig

SMALLEST = 0.25
"""Least |z| of "paper", in σ."""


class Bandit:
    """Tunes the weights it is given; knows nothing of where they act.

    Attributes:
        means: λ by name, what has been learnt so far.
        weights: λ + z by name, what the current window trains with.
        windows: windows finished.

    Args:
        settings: section `bandit`.
        initial: λ by name, all to be tuned; those at 0 stay 0 and are left alone.
        generator: window number -> numpy generator, so that a window can be drawn again from its number alone.
    """

    def __init__(
        self, settings: BanditConfig, initial: Mapping[str, float], generator: Callable[[int], np.random.Generator]
    ) -> None:
        self.settings, self._generator = settings, generator
        self.means = dict(initial)
        self.names = [name for name in sorted(initial) if initial[name] > 0]
        self.sum_of_weights = sum(initial.values())
        self.windows, self.count, self.total = 0, 0, 0.0
        self.baseline: float | None = None
        self.variance: float | None = None
        self.weights: dict[str, float] = {}
        self._perturb()

    def observe(self, feedback: float, scale: float = 1.0) -> bool:
        """Count a step's feedback (lower is better). Returns whether a window ended and the weights changed.

        `scale` multiplies the weights' step: when the encoder's own steps shrink, a weight changes less of the feedback
        and the noise would be all that is left to follow.
        """
        self.total += feedback
        self.count += 1
        if self.count < self.settings.period:
            return False
        self._update(self.total / self.count, scale)
        self.windows += 1
        self.count, self.total = 0, 0.0
        self._perturb()
        return True

    def _perturb(self) -> None:
        rng = self._generator(self.windows)
        sigma, settings = self.settings.sigma, self.settings
        self.weights = dict(self.means)
        for name in self.names:
            if settings.estimator == "rademacher":
                z = sigma * float(rng.choice((-1.0, 1.0)))
            else:
                z = sigma * float(rng.standard_normal())
                while settings.estimator == "paper" and settings.safeguards and abs(z) < SMALLEST * sigma:
                    z = sigma * float(rng.standard_normal())
            self.weights[name] = self._bounded(self.means[name] + z)

    def _update(self, feedback: float, scale: float) -> None:
        advantage = self._advantage(feedback) if self.settings.baseline else feedback
        for name in self.names:
            step = scale * self.settings.lr * self.slope(advantage, self.weights[name] - self.means[name])
            if self.settings.safeguards:
                step = max(-self.settings.max_step, min(self.settings.max_step, step))
            self.means[name] = self._bounded(self.means[name] - step)
        if self.settings.gauge == "fixed_sum":
            ratio = self.sum_of_weights / max(sum(self.means.values()), 1e-12)
            self.means = {name: mean * ratio for name, mean in self.means.items()}

    def _advantage(self, feedback: float) -> float:
        """Feedback less the running mean; with `normalise`, in units that give steps of about `lr`."""
        keep = self.settings.baseline_momentum
        if self.baseline is None:
            self.baseline = feedback
            return 0.0
        advantage = feedback - self.baseline
        self.baseline = keep * self.baseline + (1 - keep) * feedback
        square = advantage**2
        self.variance = square if self.variance is None else keep * self.variance + (1 - keep) * square
        if not self.settings.normalise or not self.variance:
            return advantage
        return self.settings.sigma * advantage / math.sqrt(self.variance)

    def slope(self, feedback: float, z: float) -> float:
        """Estimated derivative of the feedback by a weight, to which z was added; 0 for z = 0."""
        settings = self.settings
        if z == 0:
            return 0.0
        if settings.estimator == "paper":
            # the floor or the cap may have cut z short
            return 0.0 if settings.safeguards and abs(z) < SMALLEST * settings.sigma else feedback / z
        estimate = feedback * z / settings.sigma**2
        return max(-1.0, min(1.0, estimate)) if settings.estimator == "reward" else estimate

    def _bounded(self, weight: float) -> float:
        if not self.settings.safeguards:
            return weight
        return max(self.settings.lambda_min, min(self.settings.lambda_max, weight))

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, as JSON."""
        return {
            "means": self.means, "weights": self.weights, "windows": self.windows, "count": self.count,
            "total": self.total, "baseline": self.baseline, "variance": self.variance,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; regularisers that it does not know start as they are, others are gone."""
        for mine, theirs in ((self.means, state["means"]), (self.weights, state["weights"])):
            mine.update({name: theirs[name] for name in self.names if name in theirs})
        self.windows, self.count = int(state["windows"]), int(state["count"])
        self.total, self.baseline, self.variance = float(state["total"]), state["baseline"], state["variance"]

    @property
    def finite(self) -> bool:
        """Whether every weight is a number; the literal form may leave the reals."""
        return all(math.isfinite(weight) for weight in self.weights.values())
