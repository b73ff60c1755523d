"""The base run: the same training without the graphs, against which `ramen run` measures the gain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramen.config import Config

RAMEN, BASE = "ramen", "base"
"""The two arms of `ramen run`: folders under `--out`, and names of the MLflow runs."""


def graph_uses(config: Config) -> list[str]:
    """Return what training takes from the graphs, as phrases for a message; empty for a base run."""
    uses = {
        "graphs": config.objective.graphs,
        "label augmentation": config.objective.augment_labels,
        "an oracle": config.guidance.enabled,
    }
    return [name for name, enabled in uses.items() if enabled]


def base_config(config: Config) -> Config:
    """Return the configuration of the base run: no graphs in training, no peers, not registered.

    The peers are left out because the other arm evaluates them on the same data.
    """
    return config.model_copy(
        update={
            "objective": config.objective.model_copy(update={"graphs": False, "augment_labels": False}),
            "guidance": config.guidance.model_copy(update={"enabled": False}),
            "scoring": config.scoring.model_copy(update={"peers": []}),
            "index": config.index.model_copy(update={"model": ""}),
        }
    )


def with_base_evaluation(config: Config, evaluation: Path) -> Config:
    """Return the configuration with `scoring.base` set to the base run's evaluation.

    Links are resolved: the cache compares paths, so a link that points to another evaluation would go unnoticed.
    """
    base = os.path.relpath(evaluation.resolve())
    return config.model_copy(update={"scoring": config.scoring.model_copy(update={"base": base})})
