"""Checkpoints: safetensors and JSON, nothing pickled.

All randomness is keyed by epoch and step (see `step_sampler`), so weights, optimiser moments and counters are enough
for a bit-exact resume.
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

from ramen.console import warn
from ramen.errors import ArtifactError
from ramen.files import (
    check_type,
    describe_io_error,
    read_arrays,
    read_json,
    sha256,
    sync_folder,
    wrap_read_errors,
    write_text,
)
from ramen.workdir import TASK_FILE, describe_differences, read_task

KEEP = 2
"""Checkpoints kept: an older one remains if the newest is damaged."""

SUMS_FILE = "sums.json"
FILES = ("arrays.npz", "optimizer.safetensors", "position.json", "weights.safetensors", TASK_FILE)
"""Files of a checkpoint, each with its sha256 in `SUMS_FILE`."""
Tensors = dict[str, torch.Tensor]


@dataclass
class TrainingState:
    """Counters and records of training.

    Attributes:
        epoch: finished epochs.
        step: finished steps of the current epoch.
        global_step: finished steps in total.
        round: started pruning rounds.
        sums: running sums of the current epoch's terms.
        history: a record per finished epoch (see `Trainer`).
        rounds: a record per pruning round (see `pruning_rounds`).
        bandit: state of the bandit, {} without one.
        ended: whether the schedule ended training before the last epoch.
        seconds: duration of training so far, with `training.max_minutes` only.
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
    """Restore the state returned by `optimizer_tensors`, exactly."""
    for name, parameter in model.named_parameters():
        fields = {key.rsplit("/", 1)[1]: value for key, value in tensors.items() if key.rsplit("/", 1)[0] == name}
        if fields:
            optimizer.state[parameter] = {
                # fused AdamW keeps its step count as a tensor on the device, SparseAdam as an integer
                key: int(value)
                if key == "step" and not value.is_floating_point()
                else value.to(parameter.device).clone()
                for key, value in fields.items()
            }


class Checkpoints:
    """Numbered checkpoints in a work directory.

    A checkpoint is a folder that is renamed into place once it is complete on disk, with a sha256 per file and its
    task.

    Args:
        work: the stage's work directory.
        task: stage, sections, inputs and code; checkpoints of another task are refused.
    """

    def __init__(self, work: Path, task: Mapping[str, Any]) -> None:
        self.folder = work / "checkpoints"
        self.task = task

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainingState,
        arrays: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        """Write a checkpoint and delete all but the newest `KEEP`.

        Raises:
            ArtifactError: it cannot be written; earlier checkpoints are intact.
        """
        draft = self.folder / ".writing"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            save_file(weights, draft / "weights.safetensors")
            save_file(optimizer_tensors(model, optimizer), draft / "optimizer.safetensors")
            np.savez(draft / "arrays.npz", **(arrays or {}))  # type: ignore[arg-type]
            (draft / "position.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
            (draft / TASK_FILE).write_text(json.dumps(self.task, sort_keys=True), encoding="utf-8")
            sums = {file.name: sha256(file) for file in sorted(draft.iterdir())}
            write_text(draft / SUMS_FILE, json.dumps(sums, sort_keys=True))
            sync_folder(draft)
            final = self.folder / f"{state.global_step:09d}-{state.round:03d}"
            shutil.rmtree(final, ignore_errors=True)
            os.rename(draft, final)
        except Exception as error:
            shutil.rmtree(draft, ignore_errors=True)
            if reason := describe_io_error(error):
                raise ArtifactError(
                    f"{self.folder}: cannot write a checkpoint ({reason}); the one before is intact: fix this and run "
                    "the same command again"
                ) from error
            raise
        for old in self._all()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[TrainingState, dict[str, NDArray[Any]]] | None:
        """Restore the newest checkpoint; None if there is none.

        If it is damaged, warns and restores the one before.

        Raises:
            ArtifactError: all are damaged, or the checkpoint belongs to another task or encoder.
        """
        folders, newest = self._all(), ""
        for folder in reversed(folders):
            if not (damage := damaged(folder)):
                self._check_task(folder)
                try:
                    state, weights, moments, arrays = _read(folder)
                except ArtifactError as error:
                    damage = str(error)
            if damage:
                warn(f"{damage}; using the checkpoint before it")
                newest = newest or damage
                continue
            try:
                model.load_state_dict(weights)
            except RuntimeError:
                raise ArtifactError(
                    f"{folder}: holds the weights of another encoder; delete it to start over: rm -r {self.folder}"
                ) from None
            with wrap_read_errors(folder / "optimizer.safetensors", f"delete it to start over: rm -r {self.folder}"):
                load_optimizer_tensors(model, optimizer, moments)
            return state, arrays
        if folders:
            raise ArtifactError(f"{newest}, and there is no older one; delete it to start over: rm -r {self.folder}")
        return None

    def _check_task(self, folder: Path) -> None:
        task = read_task(folder / TASK_FILE)
        if self.task and (found := describe_differences(task, self.task)):
            raise ArtifactError(
                f"{folder}: belongs to another run: {'; '.join(found)}; delete it to start over: rm -r {self.folder}"
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
    """Read an undamaged checkpoint: state, weights, optimiser state, arrays. Raises ArtifactError."""
    file = folder / "position.json"
    values = read_json(file, dict[str, Any])
    with wrap_read_errors(file):
        state = TrainingState(**values)
    for key, form in get_type_hints(TrainingState).items():
        check_type(getattr(state, key), form, f"{file}: {key}")
    tensors = []
    for name in ("weights.safetensors", "optimizer.safetensors"):
        with wrap_read_errors(folder / name):
            tensors.append(load_file(folder / name))
    return state, *tensors, read_arrays(folder / "arrays.npz")


def damaged(folder: Path) -> str:
    """The first defect of a checkpoint's files, in a phrase; empty if there is none."""
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
