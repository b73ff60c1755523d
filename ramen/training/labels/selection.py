"""The held-out documents on which label context and the share of classifiers are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramen.console import warn
from ramen.sampling import keyed_rng
from ramen.training.heldout import HeldOut
from ramen.training.trainer import Trainer

MOST = 2000
"""Held-out documents in the sample."""
FEWEST = 20
"""Fewer documents too often agree by chance, and a single one has no standard error."""


@dataclass(frozen=True)
class SelectionSample:
    """A sample of the held-out documents that have a label: their pairs, and their vectors float32 [V, D]."""

    held_out: HeldOut
    vectors: NDArray[np.float32]


def selection_sample(trainer: Trainer, fallback: str) -> SelectionSample | None:
    """The sample, the same each time.

    Args:
        trainer: the trained encoder and its held-out documents.
        fallback: what happens without a sample, for the warning.

    Returns:
        None, with a warning, if there are fewer than `FEWEST` documents.

    Raises:
        Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
    """
    labelled = trainer.inputs.held_out.labelled()
    if len(labelled) < FEWEST:
        warn(
            f"{fallback}: {len(labelled)} held-out documents have a label, {FEWEST} are needed; raise "
            "training.validation_fraction"
        )
        return None
    shuffled = keyed_rng(trainer.settings.seed, "context").permutation(len(labelled))
    sample = labelled.select(np.sort(shuffled[:MOST]))
    return SelectionSample(sample, trainer.embed(trainer.inputs.texts.roles["documents"][sample.rows]))
