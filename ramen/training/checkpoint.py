"""Checkpoints and the training state a model artifact carries: safetensors and JSON, nothing pickled.

All randomness is keyed by epoch and step (see `batches`), so weights, optimiser moments and counters are all that a
bit-exact resume needs.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from ramen.artifacts import sha256, write_text

KEEP = 2
"""Checkpoints kept; the older one guards against a damaged newest."""

STATE_FILE = "training_state.safetensors"


@dataclass
class Position:
    """How far training has come.

    Attributes:
        epoch: epochs finished.
        step: steps of the current epoch finished.
        global_step: steps finished in all.
        round: pruning rounds begun.
        sums: running sums of the current epoch's terms.
        history: one record per finished epoch (see `loop.Trainer.run_epochs`).
        rounds: one record per pruning round.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    round: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimiser state as flat named tensors: `<parameter>/<field>`."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach().contiguous().cpu()
    return tensors


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave, exactly."""
    for name, parameter in model.named_parameters():
        fields = {key.rsplit("/", 1)[1]: value for key, value in tensors.items() if key.rsplit("/", 1)[0] == name}
        if fields:
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device).clone()
                for key, value in fields.items()
            }


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimiser's state next to the weights in a model folder."""
    save_file(optimizer_tensors(model, optimizer), path / STATE_FILE)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save_state` wrote."""
    load_optimizer_tensors(model, optimizer, load_file(path / STATE_FILE))


class Checkpoints:
    """Numbered checkpoints under a work directory.

    A checkpoint is a folder that appears by rename, with a sha256 per file; a folder that fails its check is skipped
    in favour of the one before.
    """

    def __init__(self, work: Path) -> None:
        self.folder = work / "checkpoints"

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        position: Position,
        arrays: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write a checkpoint and drop all but the newest `KEEP`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / ".writing"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, beside / "weights.safetensors")
        save_file(optimizer_tensors(model, optimizer), beside / "optimizer.safetensors")
        np.savez(beside / "arrays.npz", **(arrays or {}))  # type: ignore[arg-type]
        (beside / "position.json").write_text(json.dumps(asdict(position)), encoding="utf-8")
        sums = {file.name: sha256(file) for file in sorted(beside.iterdir())}
        write_text(beside / "sums.json", json.dumps(sums, sort_keys=True))
        final = self.folder / f"{position.global_step:09d}-{position.round:03d}"
        shutil.rmtree(final, ignore_errors=True)
        os.rename(beside, final)
        for old in self._all()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Position, dict[str, NDArray[Any]]] | None:
        """Restore the newest whole checkpoint; None if there is none."""
        for folder in reversed(self._all()):
            if not _whole(folder):
                continue
            model.load_state_dict(load_file(folder / "weights.safetensors"))
            load_optimizer_tensors(model, optimizer, load_file(folder / "optimizer.safetensors"))
            position = Position(**json.loads((folder / "position.json").read_text(encoding="utf-8")))
            with np.load(folder / "arrays.npz", allow_pickle=False) as file:
                return position, {name: file[name] for name in file.files}
        return None

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(folder for folder in self.folder.iterdir() if folder.is_dir() and folder.name[0] != ".")


def _whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / "sums.json").read_text(encoding="utf-8"))
        return all(sha256(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError):
        return False
