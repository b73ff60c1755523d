"""How long training runs and at which learning rate.

A given number of epochs has a linear schedule. With `training.epochs=auto` the end is not known beforehand: the rate
rises and stays constant, and training ends once the average of the weights (`averaging`) no longer gains on held-out
documents.

Held-out quality is the discounted gain of each held-out document's labels, as nDCG discounts them: unlike P@1 it moves
with every rank, so a few hundred documents show the trend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ramen.config import TrainingConfig
from ramen.training.checkpoint import TrainingState

RECENT = 0.25
"""Share of training in which held-out gain must have risen for training to continue."""
WORTHWHILE = 0.5
"""Points by which it must have risen. At less, labels deep in the ranking are lost again (docs/experiments.md,
2026-11-23)."""
FEWEST_EVALUATIONS = 4
"""Evaluations before training ends, at least."""
FEWEST_HELD_OUT = 50
"""Held-out documents with a label from which the end of training can be decided."""
EPOCHS_UNDECIDED = 8
"""Epochs with fewer than that."""
STEPS_BETWEEN = 12
"""Steps between two evaluations, at least: a tiny data set is not evaluated after every step."""
LEAST_STEPS = 48
"""Steps of a warm-up and of a pruning round, at least: of a tiny data set an epoch is a step or two."""
WARMUP_SHARE = 0.4
"""Share of `training.max_minutes` that the warm-up takes at most."""


@dataclass
class Clock:
    """Seconds that training has taken, over both stages and all attempts.

    Attributes:
        before: seconds of earlier stages and attempts.
        started: `time.monotonic()` when this attempt started.
    """

    before: float = 0.0
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started


@dataclass
class Plan:
    """Decides the learning rate and the end of training; what it has decided is in `TrainingState`.

    Attributes:
        training: section `training`.
        steps_per_epoch: of the sampler.
        held_out: held-out documents with a label.
        every: epochs between two evaluations.
        warming: this is the warm-up, which ends early only when its share of the time is up.
        clock: what `training.max_minutes` is measured by.
        reserve: seconds that the stage needs once training has ended.
        agree: whether any process says so; all must decide alike.
    """

    training: TrainingConfig
    steps_per_epoch: int
    held_out: int = 0
    every: int = 1
    warming: bool = False
    clock: Clock = field(default_factory=Clock)
    reserve: Callable[[], float] = lambda: 0.0
    agree: Callable[[bool], bool] = lambda flag: flag

    @property
    def auto(self) -> bool:
        """Whether training ends by itself."""
        return self.training.epochs == "auto"

    @property
    def decides(self) -> bool:
        """Whether enough documents are held out to see when training no longer pays."""
        return self.auto and self.held_out >= FEWEST_HELD_OUT

    @property
    def most(self) -> int:
        """Epochs at most."""
        if self.training.epochs != "auto":
            return self.training.epochs
        return self.training.max_epochs if self.decides else min(EPOCHS_UNDECIDED, self.training.max_epochs)

    @property
    def warmup_epochs(self) -> int:
        """Epochs of the warm-up; with an open end at least one is left for retraining."""
        if not self.auto:
            return min(self.training.warmup_epochs, self.most)
        return max(1, min(self.at_least(self.training.warmup_epochs), self.most - 1))

    def at_least(self, epochs: int) -> int:
        """So many epochs, or as many as `LEAST_STEPS` take."""
        return max(epochs, math.ceil(LEAST_STEPS / max(self.steps_per_epoch, 1))) if self.auto else epochs

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the peak."""
        rise = self.training.lr_warmup_steps
        if not self.auto:
            return linear_schedule(rise, self.most * self.steps_per_epoch)(step)
        return min(1.0, (step + 1) / rise) if rise else 1.0

    def total_steps(self) -> int | None:
        """Steps of warm-up and retraining together; None while the end is open."""
        return None if self.auto else self.most * self.steps_per_epoch

    def evaluates(self, epoch: int) -> bool:
        """Whether held-out documents are ranked after epoch `epoch` (1 = the first), other than at a phase's end."""
        return not self.auto or epoch % self.every == 0

    def review(self, position: TrainingState) -> None:
        """After an epoch: end training if it no longer pays."""
        if self.decides and not self.warming and settled(position.history):
            position.ended = True

    def cut(self, position: TrainingState) -> bool:
        """After a step: whether the epoch ends here, since the time is up."""
        if self.budget < math.inf and not position.ended:
            seconds = self.clock.elapsed + (0.0 if self.warming else self.reserve())
            position.ended = self.agree(seconds >= self.budget)
        return position.ended

    @property
    def budget(self) -> float:
        """Seconds of `training.max_minutes` that may have passed when the stage ends."""
        seconds = 60 * self.training.max_minutes or math.inf
        return WARMUP_SHARE * seconds if self.warming else seconds


def settled(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether held-out quality has stopped improving.

    The last gain is compared with that at three quarters of training: the longer training has run, the longer the next
    half point may take. The gains are those of averaged weights, which hardly fluctuate.

    Args:
        history: records of epochs; those with a `val_gain` were evaluated.
    """
    evaluated = [(r["epoch"], r["val_gain"]) for r in history if r.get("val_gain") is not None]
    if len(evaluated) < FEWEST_EVALUATIONS:
        return False
    epochs, gains = zip(*evaluated, strict=True)
    return bool(gains[-1] < np.interp((1 - RECENT) * epochs[-1], epochs, gains) + WORTHWHILE)


def linear_schedule(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Step -> share of the peak: linear rise over `warmup_steps`, then linear decay to 0 at `total_steps`."""
    warmup_steps = min(warmup_steps, max(total_steps // 2, 1))

    def at(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / max(total_steps - warmup_steps, 1))

    return at
