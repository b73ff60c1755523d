"""Polynomial average of the weights over training, which replaces learning-rate decay when the end is not known.

At a constant learning rate the weights fluctuate around a good point. Their average is close to that point, as the
weights after a decay are, and can be evaluated at any time. The weight of step t in the average is proportional to t^3,
so the last quarter of training makes up two thirds of it, however long training lasts.

Sources: Shamir and Zhang, Stochastic gradient descent for non-smooth optimization, ICML 2013 (section 4, eta = 3);
Haegele et al., Scaling laws and compute-optimal training beyond fixed training durations, 2024 (averages instead of
decays). Figures: docs/lab/experiments.md, 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPONENT = 3
"""Exponent of the step in its weight."""
UPDATES_PER_EPOCH = 50
"""Largest number of updates per epoch: with a table of millions of labels, an update takes as long as a step."""
AVERAGE = "average"
"""Key in the optimiser's state: the average is saved and restored with the moments."""


class WeightAverage:
    """Average of an optimiser's parameters, kept in the optimiser's state.

    Args:
        optimizer: the optimiser.
        steps_per_epoch: steps of an epoch.

    Attributes:
        swapped: whether the parameters currently hold their averages.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self.optimizer = optimizer
        self.swapped = False
        self.period = max(1, steps_per_epoch // UPDATES_PER_EPOCH)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current weights.

        Args:
            step: number of finished optimiser steps, at least 1.
        """
        if step % self.period:
            return
        share = (EXPONENT + 1) / (step // self.period + EXPONENT)
        for parameter, state in self._trained():
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter, share)
            else:
                state[AVERAGE] = parameter.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap in the averages for the duration of the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Swap the trained weights back in for the duration of the block, to save them, even inside `in_place`."""
        if self.swapped:
            with self.in_place():
                yield
        else:
            yield

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the parameters and their averages."""
        for parameter, state in self._trained():
            if AVERAGE in state:
                before = parameter.detach().clone()
                parameter.copy_(state[AVERAGE])
                state[AVERAGE].copy_(before)
        self.swapped = not self.swapped

    def _trained(self) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        """Parameters with an optimiser state, and the state; parameters that never had a gradient have none."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [(parameter, state) for parameter in parameters if (state := self.optimizer.state.get(parameter))]
