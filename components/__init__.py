"""Kubeflow components: one folder per stage, each a typed signature around `run_stage`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramen.stages import Stage


def load_component(stage: Stage) -> Any:
    """Import the kfp component of a stage."""
    module = importlib.import_module(f"components.{stage.identifier}.component")
    return getattr(module, stage.identifier)
