"""Online tuning of the regularisation weights by a bandit (R-ICLR 3).

Each window of `period` steps trains with perturbed weights `λ + z`; the mean feedback P of the window estimates the
slope of the feedback in each λ. As published, P is the weighted loss itself, which contains every λ as a factor: its
slope in λ is the regulariser's value, never negative, so weights drift to zero and below. The feedbacks "task_loss",
"accuracy" and "heldout_loss" do not contain λ. Two forms, z being the perturbation after the bounds were applied:

* "safe": z = ±σ and the slope is P z / σ², which the cited theory proves. Losses fall by more from window to window
  than a perturbation changes them, so the running mean of earlier windows is subtracted from P (the advantage), and the
  result is divided by its running deviation: a step is about `lr` on any scale. Weights and steps are bounded; the
  lower bound keeps an unhelpful weight from reaching zero for good.
* "printed": Gaussian z and the slope P / z, without baseline and bounds. 1 / z has no mean, so the weights diverge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ramen.config import BanditConfig

MOMENTUM = 0.8
"""Momentum of the running mean and deviation of the feedback."""
MAX_STEP = 0.05
"""Largest change of a weight per window."""
LAMBDA_MIN, LAMBDA_MAX = 0.01, 2.0
"""Bounds of a weight."""


class Bandit:
    """Tunes regularisation weights by their effect on a feedback.

    Attributes:
        means: λ by name, as learnt so far.
        weights: λ + z by name, the weights of the current window.
        windows: number of finished windows.

    Args:
        settings: section `bandit`.
        initial: λ by name; those above 0 are tuned, those at 0 stay 0.
        generator: window number -> numpy generator, so that a window's perturbation depends on its number alone.
    """

    def __init__(
        self, settings: BanditConfig, initial: Mapping[str, float], generator: Callable[[int], np.random.Generator]
    ) -> None:
        self.settings, self._generator = settings, generator
        self.safe = settings.form == "safe"
        self.means = dict(initial)
        self.names = [name for name in sorted(initial) if initial[name] > 0]
        self.windows, self.count, self.total = 0, 0, 0.0
        self.baseline: float | None = None
        self.variance: float | None = None
        self.weights: dict[str, float] = {}
        self._perturb()

    def observe(self, feedback: float, scale: float = 1.0) -> bool:
        """Add a step's feedback, and update the weights at the end of a window.

        Args:
            feedback: of the step; lower is better.
            scale: factor of the weights' step. It follows the learning rate: when the encoder's steps shrink, a weight
                changes less of the feedback, and the update would follow noise.

        Returns:
            Whether a window ended and the weights changed.
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
        self.weights = dict(self.means)
        for name in self.names:
            unit = float(rng.choice((-1.0, 1.0))) if self.safe else float(rng.standard_normal())
            self.weights[name] = self._bounded(self.means[name] + self.settings.sigma * unit)

    def _update(self, feedback: float, scale: float) -> None:
        if self.safe:
            feedback = self._advantage(feedback)
        for name in self.names:
            step = scale * self.settings.lr * self.slope(feedback, self.weights[name] - self.means[name])
            if self.safe:
                step = max(-MAX_STEP, min(MAX_STEP, step))
            self.means[name] = self._bounded(self.means[name] - step)

    def _advantage(self, feedback: float) -> float:
        """Return the feedback minus its running mean, in units that give steps of about `lr`."""
        if self.baseline is None:
            self.baseline = feedback
            return 0.0
        advantage = feedback - self.baseline
        self.baseline = MOMENTUM * self.baseline + (1 - MOMENTUM) * feedback
        square = advantage**2
        self.variance = square if self.variance is None else MOMENTUM * self.variance + (1 - MOMENTUM) * square
        if not self.variance:
            return advantage
        return self.settings.sigma * advantage / math.sqrt(self.variance)

    def slope(self, feedback: float, z: float) -> float:
        """Return the estimated derivative of the feedback by a weight that was perturbed by z; 0 for z = 0."""
        if z == 0:
            return 0.0
        return feedback * z / self.settings.sigma**2 if self.safe else feedback / z

    def _bounded(self, weight: float) -> float:
        return max(LAMBDA_MIN, min(LAMBDA_MAX, weight)) if self.safe else weight

    def state(self) -> dict[str, Any]:
        """Return the state that a bit-exact resume needs, as JSON."""
        return {
            "means": self.means, "weights": self.weights, "windows": self.windows, "count": self.count,
            "total": self.total, "baseline": self.baseline, "variance": self.variance,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; regularisers that it lacks keep their initial weight, others are ignored."""
        for current, restored in ((self.means, state["means"]), (self.weights, state["weights"])):
            current.update({name: restored[name] for name in self.names if name in restored})
        self.windows, self.count = int(state["windows"]), int(state["count"])
        self.total, self.baseline, self.variance = float(state["total"]), state["baseline"], state["variance"]

    @property
    def finite(self) -> bool:
        """Whether every weight is a finite number; the printed form may diverge."""
        return all(math.isfinite(weight) for weight in self.weights.values())
