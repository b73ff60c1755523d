"""Base algorithms, which RAMEN regularises: one module and one line in `BASES` each.

A base algorithm chooses the documents of a step, its candidate labels and the task loss (see `protocol.BaseAlgorithm`).
RAMEN only adds anchors and graph negatives to the step, and regularisers to the loss.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ramen.errors import ConfigError, suggest_name

if TYPE_CHECKING:  # check_name works without torch
    from ramen.base.protocol import BaseAlgorithm, LabelProblem
    from ramen.config import BaseConfig
    from ramen.objective.triplet import Triplet

BASES: dict[str, str] = {
    "inbatch": "ramen.base.protocol:BaseAlgorithm",
    "ance": "ramen.base.ance:Ance",
    "ngame": "ramen.base.ngame:Ngame",
    "dexa": "ramen.base.dexa:Dexa",
    "dexml": "ramen.base.dexml:Dexml",
    "siamesexml": "ramen.base.siamesexml:SiameseXml",
}
"""Name -> "module:class"."""


def check_name(name: str) -> None:
    """Raise ConfigError unless a base algorithm has this name."""
    if name not in BASES:
        raise ConfigError(f"base.name = {name!r}: unknown base algorithm; {suggest_name(name, BASES)}")


def make_base(settings: BaseConfig, problem: LabelProblem, triplet: Triplet) -> BaseAlgorithm:
    """Create the base algorithm `settings.name`.

    Raises:
        ConfigError: no base algorithm has this name.
    """
    check_name(settings.name)
    module, class_name = BASES[settings.name].split(":")
    base: BaseAlgorithm = getattr(importlib.import_module(module), class_name)(problem, settings, triplet)
    return base
