"""Base algorithms: what RAMEN regularises. One module each, one line in `BASES`.

A base algorithm decides which documents share a step, which labels compete and what the task loss is (see
`protocol.BaseAlgorithm`); RAMEN adds anchors and graph negatives to the step and regularisers to the loss, nothing
else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ramen.errors import ConfigError, nearest

if TYPE_CHECKING:  # so that a name can be checked without torch
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
    """Raise ConfigError unless there is a base algorithm of this name."""
    if name not in BASES:
        raise ConfigError(f"base.name = {name!r}: unknown base algorithm; {nearest(name, BASES)}")


def make_base(settings: BaseConfig, problem: LabelProblem, triplet: Triplet) -> BaseAlgorithm:
    """The base algorithm that `settings.name` names.

    Raises:
        ConfigError: there is none of that name.
    """
    check_name(settings.name)
    module, cls = BASES[settings.name].split(":")
    made: BaseAlgorithm = getattr(importlib.import_module(module), cls)(problem, settings, triplet)
    return made
