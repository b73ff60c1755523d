"""How long training runs and at which learning rate.

A given number of epochs has a linear schedule. With `training.epochs=auto` the end is not known beforehand: the rate
rises, stays constant, and decays to 0 once held-out documents no longer gain (warm-up, stable, decay: Hu et al.,
MiniCPM, 2024; Haegele et al., Scaling laws and compute-optimal training beyond fixed training durations, 2024). The
decay is short: a quarter of the epochs before it.

Held-out quality is the discounted gain of each held-out document's labels, as nDCG discounts them: unlike P@1 it moves
with every rank, so a few hundred documents show the trend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramen.config import Training
from ramen.training.checkpoint import Position

DECAY_SHARE = 0.25
"""Epochs of the decay, as a share of the epochs before it."""
RECENT = 0.15
"""Share of the evaluations so far whose mean must beat that of as many before them."""
FEWEST_EVALUATIONS = 2
"""Evaluations in each of these two means, at least."""
WORTHWHILE = 0.75
"""Points by which the recent mean must be better for training to continue. At less, the decay gains more than further
training does, and labels deep in the ranking are lost again (docs/experiments.md, 2026-11-23)."""
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
    """Decides the learning rate and the end of training; what it has decided is in `Position`.

    Attributes:
        training: section `training`.
        steps_per_epoch: of the sampler.
        held_out: held-out documents with a label.
        every: epochs between two evaluations.
        warming: this is the warm-up, which never decays.
        clock: what `training.max_minutes` is measured by.
        reserve: seconds that the stage needs once training has ended.
        agree: whether any process says so; all must decide alike.
    """

    training: Training
    steps_per_epoch: int
    held_out: int = 0
    every: int = 1
    warming: bool = False
    clock: Clock = field(default_factory=Clock)
    reserve: Callable[[], float] = lambda: 0.0
    agree: Callable[[bool], bool] = lambda flag: flag
    _first: tuple[int, float] | None = None

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
        """Epochs of the warm-up."""
        if not self.auto:
            return min(self.training.warmup_epochs, self.most)
        return max(1, min(self.at_least(self.training.warmup_epochs), self.most - self.decay_epochs(self.most - 1)))

    def at_least(self, epochs: int) -> int:
        """So many epochs, or as many as `LEAST_STEPS` take."""
        return max(epochs, math.ceil(LEAST_STEPS / max(self.steps_per_epoch, 1))) if self.auto else epochs

    @staticmethod
    def decay_epochs(done: int) -> int:
        """Epochs of a decay that begins after so many."""
        return max(1, round(DECAY_SHARE * done))

    def rate(self, step: int, position: Position) -> float:
        """The learning rate of a step, as a share of the peak."""
        if not self.auto:
            return linear_schedule(self.training.lr_warmup_steps, self.most * self.steps_per_epoch)(step)
        rise = self.training.lr_warmup_steps
        share = min(1.0, (step + 1) / rise) if rise else 1.0
        if position.decay_start >= 0:
            share *= max(0.0, 1 - (step - position.decay_start) / max(position.decay_steps, 1))
        return share

    def total_steps(self, position: Position) -> int | None:
        """Steps of warm-up and retraining together; None while the end is open."""
        if position.decay_start >= 0:
            return position.decay_start + position.decay_steps
        return None if self.auto else self.most * self.steps_per_epoch

    def evaluates(self, epoch: int) -> bool:
        """Whether held-out documents are ranked after epoch `epoch` (1 = the first), other than at a phase's end."""
        return not self.auto or epoch % self.every == 0

    def review(self, position: Position) -> None:
        """Before an epoch: begin the decay if training no longer pays, or must end."""
        if not self.auto or self.warming or position.decay_start >= 0:
            return
        left, decay = self.most - position.epoch, self.decay_epochs(position.epoch)
        if left <= decay or (self.decides and settled(position.history)):
            position.decay_start = position.global_step
            position.decay_steps = max(1, min(left, decay)) * self.steps_per_epoch

    def cut(self, position: Position) -> bool:
        """After a step: whether the epoch ends here, since the decay is over or the time is up."""
        self._watch(position)
        return self.ended(position)

    def ended(self, position: Position) -> bool:
        """Whether the decay is over, or a warm-up's time."""
        if position.decay_start >= 0:
            return position.global_step >= position.decay_start + position.decay_steps
        return self.warming and self.budget < math.inf and self.agree(self.clock.elapsed >= self.budget)

    @property
    def budget(self) -> float:
        """Seconds of `training.max_minutes` that may have passed when the stage ends."""
        seconds = 60 * self.training.max_minutes or math.inf
        return WARMUP_SHARE * seconds if self.warming else seconds

    def _watch(self, position: Position) -> None:
        """Keep to `training.max_minutes`: begin the decay in time, end it when the time is up."""
        if self.budget == math.inf or self.warming:
            return
        if self._first is None:  # steps of this attempt, without what came before them
            self._first = (position.global_step, self.clock.elapsed)
            return
        step, since = self._first
        left = self.budget - self.reserve() - self.clock.elapsed
        pace = (self.clock.elapsed - since) / max(position.global_step - step, 1)
        if position.decay_start < 0:
            decay = max(1, round(DECAY_SHARE * position.global_step / (1 + DECAY_SHARE)))
            if self.agree(left <= decay * pace):
                position.decay_start = position.global_step
                position.decay_steps = max(1, min(decay, int(left / pace) if pace else decay))
        elif self.agree(left <= 0):
            position.decay_steps = position.global_step - position.decay_start


def settled(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether held-out quality has stopped improving.

    The mean of the last 15 % of all evaluations is compared with that of as many before: a mean is less noisy than
    the last figure, and the longer training has run, the longer a gain may take.

    Args:
        history: records of epochs; those with a `val_gain` were evaluated.
    """
    gains = [record["val_gain"] for record in history if record.get("val_gain") is not None]
    recent = max(FEWEST_EVALUATIONS, round(RECENT * len(gains)))
    if len(gains) < 2 * recent:
        return False
    return bool(sum(gains[-recent:]) / recent < sum(gains[-2 * recent : -recent]) / recent + WORTHWHILE)


def linear_schedule(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Step -> share of the peak: linear rise over `warmup_steps`, then linear decay to 0 at `total_steps`."""
    warmup_steps = min(warmup_steps, max(total_steps // 2, 1))

    def at(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (total_steps - step) / max(total_steps - warmup_steps, 1))

    return at
