"""Learning rate and end of training.

With a fixed number of epochs the learning rate follows a linear schedule. With `training.epochs=auto` it rises and
stays constant, and training ends once the average of the weights (`weight_average`) stops improving on held-out
documents. Held-out quality is the discounted gain (`heldout.Quality.gain`): unlike P@1 it changes with every rank, so a
few hundred documents show the trend.
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
"""Share of training in which the held-out gain must have risen for training to continue."""
WORTHWHILE = 0.5
"""Points by which it must have risen. With less, labels deep in the ranking are lost again (docs/lab/experiments.md,
2026-11-23)."""
FEWEST_EVALUATIONS = 4
"""Evaluations before training may end."""
FEWEST_HELD_OUT = 50
"""Held-out documents with a label that are needed to decide when training ends."""
EPOCHS_UNDECIDED = 8
"""Epochs with fewer held-out documents."""
STEPS_BETWEEN = 12
"""Fewest steps between two evaluations: a tiny dataset is not evaluated after every step."""
LEAST_STEPS = 48
"""Fewest steps of a warm-up and of a pruning round: an epoch of a tiny dataset is a step or two."""
WARMUP_SHARE = 0.4
"""Largest share of `training.max_minutes` that the warm-up takes."""


@dataclass
class Clock:
    """Seconds of training, over both stages and all attempts.

    Attributes:
        before: seconds of earlier stages and attempts.
        started: `time.monotonic()` at the start of this attempt.
    """

    before: float = 0.0
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started


@dataclass
class Schedule:
    """Decides the learning rate and the end of training; the decisions are kept in `TrainingState`.

    Attributes:
        training: section `training`.
        steps_per_epoch: steps of an epoch.
        held_out: number of held-out documents with a label.
        evaluation_period: epochs between two evaluations.
        is_warmup: the current phase is the warm-up, which ends early only when its share of the time is used up.
        clock: measures `training.max_minutes`.
        any_process: whether a flag is set in any process: all processes must decide alike.
    """

    training: TrainingConfig
    steps_per_epoch: int
    held_out: int = 0
    evaluation_period: int = 1
    is_warmup: bool = False
    clock: Clock = field(default_factory=Clock)
    any_process: Callable[[bool], bool] = lambda flag: flag

    @property
    def auto(self) -> bool:
        """Whether training decides on its end."""
        return self.training.epochs == "auto"

    @property
    def can_decide(self) -> bool:
        """Whether enough documents are held out to see when training stops paying."""
        return self.auto and self.held_out >= FEWEST_HELD_OUT

    @property
    def max_epochs(self) -> int:
        """Largest number of epochs of warm-up and retraining together."""
        if self.training.epochs != "auto":
            return self.training.epochs
        return self.training.max_epochs if self.can_decide else min(EPOCHS_UNDECIDED, self.training.max_epochs)

    @property
    def warmup_epochs(self) -> int:
        """Epochs of the warm-up; with `auto`, at least one epoch is left for retraining."""
        if not self.auto:
            return min(self.training.warmup_epochs, self.max_epochs)
        return max(1, min(self.at_least(self.training.warmup_epochs), self.max_epochs - 1))

    def at_least(self, epochs: int) -> int:
        """`epochs`, or with `auto` as many as `LEAST_STEPS` steps take, if that is more."""
        return max(epochs, math.ceil(LEAST_STEPS / max(self.steps_per_epoch, 1))) if self.auto else epochs

    def rate(self, step: int) -> float:
        """Learning rate of a step, as a share of the peak."""
        warmup_steps = self.training.lr_warmup_steps
        if not self.auto:
            return linear_schedule(warmup_steps, self.max_epochs * self.steps_per_epoch)(step)
        return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0

    def total_steps(self) -> int | None:
        """Steps of warm-up and retraining together; None with `auto`."""
        return None if self.auto else self.max_epochs * self.steps_per_epoch

    def is_evaluated(self, epoch: int) -> bool:
        """Whether to evaluate on held-out documents after epoch `epoch` (from 1), apart from the end of a phase."""
        return not self.auto or epoch % self.evaluation_period == 0

    def end_if_settled(self, state: TrainingState) -> None:
        """After an epoch: end training if held-out quality stopped improving."""
        if self.can_decide and not self.is_warmup and has_settled(state.history):
            state.ended = True

    def end_if_out_of_time(self, state: TrainingState, closing_seconds: Callable[[], float]) -> bool:
        """After a step: end training if the time is used up.

        Args:
            state: counters and history.
            closing_seconds: estimates how long the stage takes after training.

        Returns:
            Whether training has ended.
        """
        if self.time_limit < math.inf and not state.ended:
            seconds = self.clock.elapsed + (0.0 if self.is_warmup else closing_seconds())
            state.ended = self.any_process(seconds >= self.time_limit)
        return state.ended

    @property
    def time_limit(self) -> float:
        """Seconds after which the phase must end; infinite without `training.max_minutes`."""
        seconds = 60 * self.training.max_minutes or math.inf
        return WARMUP_SHARE * seconds if self.is_warmup else seconds


def has_settled(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether held-out quality has stopped improving.

    Compares the last gain with the gain at three quarters of training: the longer training has run, the longer the next
    half point may take. The gains are those of averaged weights, which hardly fluctuate.

    Args:
        history: records of epochs; evaluated epochs have a `val_gain`.
    """
    evaluated = [(r["epoch"], r["val_gain"]) for r in history if r.get("val_gain") is not None]
    if len(evaluated) < FEWEST_EVALUATIONS:
        return False
    epochs, gains = zip(*evaluated, strict=True)
    return bool(gains[-1] < np.interp((1 - RECENT) * epochs[-1], epochs, gains) + WORTHWHILE)


def linear_schedule(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Step -> share of the peak: linear rise over `warmup_steps`, then linear decay to 0 at `total_steps`."""
    warmup_steps = min(warmup_steps, max(total_steps // 2, 1))

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / max(total_steps - warmup_steps, 1))

    return share
