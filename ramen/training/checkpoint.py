"""Checkpoints and the training state a model artifact carries: safetensors and JSON, nothing pickled.

All randomness is keyed by epoch and step (see `batches`), so weights, optimiser moments and counters are all that a
bit-exact resume needs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from ramen.artifacts import (
    checked,
    failed_io,
    flush,
    read_arrays,
    read_json,
    reading,
    sha256,
    write_text,
)
from ramen.errors import ArtifactError, warn
from ramen.workdir import TASK_FILE, differences, read_task

KEEP = 2
"""Checkpoints kept; the older one guards against a damaged newest."""

STATE_FILE = "training_state.safetensors"
SUMS_FILE = "sums.json"
FILES = ("arrays.npz", "optimizer.safetensors", "position.json", "weights.safetensors", TASK_FILE)
"""Files of a checkpoint, each with its sha256 in `SUMS_FILE`."""
Tensors = dict[str, torch.Tensor]


@dataclass
class TrainingState:
    """How far training has come.

    Attributes:
        epoch: epochs finished.
        step: steps of the current epoch finished.
        global_step: steps finished in all.
        round: pruning rounds begun.
        sums: running sums of the current epoch's terms.
        history: one record per finished epoch (see `loop.Trainer.run_epochs`).
        rounds: one record per pruning round.
        bandit: state of the bandit, {} without one.
        ended: whether the stage ends here, before its last epoch (`plan.Plan`).
        seconds: that training has taken, counted for `training.max_minutes` only.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    round: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    bandit: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    seconds: float = 0.0


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
                # the step count of fused AdamW is a tensor on the device, as all it keeps; that of SparseAdam a number
                key: int(value)
                if key == "step" and not value.is_floating_point()
                else value.to(parameter.device).clone()
                for key, value in fields.items()
            }


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimiser's state next to the weights in a model folder."""
    save_file(optimizer_tensors(model, optimizer), path / STATE_FILE)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save_state` wrote."""
    with reading(path / STATE_FILE):
        load_optimizer_tensors(model, optimizer, load_file(path / STATE_FILE))


class Checkpoints:
    """Numbered checkpoints under a work directory.

    A checkpoint is a folder that appears by rename once all of it is on the disk, with a sha256 per file and the task
    it belongs to.

    Args:
        work: the stage's work directory.
        task: what was asked for; a checkpoint of another task is refused.
    """

    def __init__(self, work: Path, task: Mapping[str, Any]) -> None:
        self.folder = work / "checkpoints"
        self.task = task

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        position: TrainingState,
        arrays: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write a checkpoint and drop all but the newest `KEEP`.

        Raises:
            ArtifactError: it cannot be written; those before it are untouched.
        """
        beside = self.folder / ".writing"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            save_file(weights, beside / "weights.safetensors")
            save_file(optimizer_tensors(model, optimizer), beside / "optimizer.safetensors")
            np.savez(beside / "arrays.npz", **(arrays or {}))  # type: ignore[arg-type]
            (beside / "position.json").write_text(json.dumps(asdict(position)), encoding="utf-8")
            (beside / TASK_FILE).write_text(json.dumps(self.task, sort_keys=True), encoding="utf-8")
            sums = {file.name: sha256(file) for file in sorted(beside.iterdir())}
            write_text(beside / SUMS_FILE, json.dumps(sums, sort_keys=True))
            flush(beside)
            final = self.folder / f"{position.global_step:09d}-{position.round:03d}"
            shutil.rmtree(final, ignore_errors=True)
            os.rename(beside, final)
        except Exception as error:
            shutil.rmtree(beside, ignore_errors=True)
            if reason := failed_io(error):
                raise ArtifactError(
                    f"{self.folder}: a checkpoint cannot be written ({reason}); the one before is intact: mend it and "
                    "run the same command again"
                ) from error
            raise
        for old in self._all()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[TrainingState, dict[str, NDArray[Any]]] | None:
        """Restore the newest checkpoint; None if there is none.

        A damaged one is passed over, with a warning, for the one before.

        Raises:
            ArtifactError: all are damaged, or it belongs to another task or another encoder.
        """
        folders, newest = self._all(), ""
        for folder in reversed(folders):
            if not (damage := damaged(folder)):
                self._check_task(folder)
                try:
                    position, weights, moments, arrays = _read(folder)
                except ArtifactError as error:
                    damage = str(error)
            if damage:
                warn(f"{damage}; the checkpoint before it is tried")
                newest = newest or damage
                continue
            try:
                model.load_state_dict(weights)
            except RuntimeError:
                raise ArtifactError(
                    f"{folder}: holds weights of another encoder; start afresh: rm -r {self.folder}"
                ) from None
            with reading(folder / "optimizer.safetensors", f"start afresh: rm -r {self.folder}"):
                load_optimizer_tensors(model, optimizer, moments)
            return position, arrays
        if folders:
            raise ArtifactError(f"{newest}, nor is there an older one; start afresh: rm -r {self.folder}")
        return None

    def _check_task(self, folder: Path) -> None:
        theirs = read_task(folder / TASK_FILE)
        if self.task and (found := differences(theirs, self.task)):
            raise ArtifactError(
                f"{folder}: a checkpoint of another run: {'; '.join(found)}; start afresh: rm -r {self.folder}"
            )

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            folder
            for folder in self.folder.iterdir()
            if re.fullmatch(r"\d{9,}-\d{3,}", folder.name) and folder.is_dir()
        )


def _read(folder: Path) -> tuple[TrainingState, Tensors, Tensors, dict[str, NDArray[Any]]]:
    """Read an undamaged checkpoint: position, weights, optimiser state, arrays. Raises ArtifactError."""
    file = folder / "position.json"
    values = read_json(file, dict[str, Any])
    with reading(file):
        position = TrainingState(**values)
    for key, form in get_type_hints(TrainingState).items():
        checked(getattr(position, key), form, f"{file}: {key}")
    tensors = []
    for name in ("weights.safetensors", "optimizer.safetensors"):
        with reading(folder / name):
            tensors.append(load_file(folder / name))
    return position, *tensors, read_arrays(folder / "arrays.npz")


def damaged(folder: Path) -> str:
    """What is wrong with a checkpoint's files, in a phrase; empty if nothing is."""
    try:
        sums = read_json(folder / SUMS_FILE, dict[str, str])
    except ArtifactError:
        return f"{folder}: has no readable {SUMS_FILE}"
    if lost := sorted(set(FILES) - set(sums)):
        return f"{folder / SUMS_FILE}: has no checksum of {lost[0]}"
    for name in FILES:
        if not (folder / name).is_file():
            return f"{folder / name}: is missing"
        if sha256(folder / name) != sums[name]:
            return f"{folder / name}: differs from its checksum"
    return ""
