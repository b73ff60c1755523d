"""The average of the weights over training, which replaces the decay of the learning rate where the end is not known.

At a constant learning rate the weights fluctuate around a good point. Their average is near that point, as the weights
after a decay are, and can be evaluated at any time. The average is polynomial: the weight of step t is proportional to
t^3, so the last quarter of training makes up two thirds of the average, however long training lasts.

Sources: Shamir and Zhang, Stochastic gradient descent for non-smooth optimization, ICML 2013 (section 4, eta = 3);
Haegele et al., Scaling laws and compute-optimal training beyond fixed training durations, 2024 (averages in place of
decays). Figures: docs/experiments.md, 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPONENT = 3
"""Power of the step by which a step's weights count."""
UPDATES_PER_EPOCH = 50
"""Updates of the average in an epoch, at most: for tables of millions of labels each takes as long as a step."""
AVERAGE = "average"
"""Key in the optimiser's state: the average is saved and restored with the moments."""


class WeightAverage:
    """Keeps the average of all that an optimiser trains, in the optimiser's state.

    Args:
        optimizer: whose parameters are averaged.
        steps_per_epoch: steps of an epoch.

    Attributes:
        swapped: whether the parameters hold their averages at present.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> None:
        self.optimizer = optimizer
        self.swapped = False
        self.every = max(1, steps_per_epoch // UPDATES_PER_EPOCH)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the current weights.

        Args:
            step: optimiser steps taken so far, at least 1.
        """
        if step % self.every:
            return
        share = (EXPONENT + 1) / (step // self.every + EXPONENT)
        for parameter, state in self._trained():
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter, share)
            else:
                state[AVERAGE] = parameter.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold their averages inside the block, and the trained weights again after it."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The parameters hold the trained weights inside the block, to be saved, even inside `in_place`."""
        if self.swapped:
            with self.in_place():
                yield
        else:
            yield

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters and their averages."""
        for parameter, state in self._trained():
            if AVERAGE in state:
                before = parameter.detach().clone()
                parameter.copy_(state[AVERAGE])
                state[AVERAGE].copy_(before)
        self.swapped = not self.swapped

    def _trained(self) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        """Parameters that were trained at all, with their state; the optimiser takes an empty state as untrained."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [(parameter, state) for parameter in parameters if (state := self.optimizer.state.get(parameter))]
