"""The trained model as an artifact, and the training state that a warm model carries for retraining."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ramen.artifacts import Artifact, Draft
from ramen.config import Section
from ramen.encoder.label_vectors import OFFSETS_FILE, read_offsets, write_offsets
from ramen.errors import ConfigError
from ramen.files import read_arrays, read_json, wrap_read_errors, write_json
from ramen.tracking import flat_params
from ramen.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from ramen.training.trainer import Trainer

HISTORY_FILE = "history.json"
BANDIT_FILE = "bandit.json"
BASE_FILE = "base.npz"
"""What the base algorithm clustered or mined last."""
STATE_FILE = "training_state.safetensors"
"""State of the optimiser."""

WARM_SETTINGS = {
    "encoder": ("name", "max_length", "pooling"),
    "base": ("name", "dexa"),
    "objective": ("augment_labels",),
    "training": ("seed", "validation_fraction", "warmup_epochs"),
    "guidance": ("enabled", "anchor_sets", "max_length", "epochs"),
}
"""Settings that retraining shares with the warm-up: encoder, base algorithm, true pairs, held-out documents, start of
the rounds, oracle."""


def write_model(draft: Draft, trainer: Trainer) -> None:
    """Write encoder, label offsets and history, and the counts of the manifest."""
    trainer.encoder.save(draft.path)
    if trainer.base.module is not None:
        arrays = {name: value.detach().cpu().numpy() for name, value in trainer.base.module.state_dict().items()}
        write_offsets(draft.path, arrays["table"], arrays["row_of"])
    write_json(draft.path / HISTORY_FILE, trainer.state.history)
    draft.counts |= {
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "documents": len(trainer.base.problem.documents),
        "validation_documents": len(trainer.inputs.held_out),
        "distinct_texts": len(trainer.inputs.texts.store),
        "tokens": len(trainer.inputs.texts.store.ids),
    }


def write_training_state(draft: Draft, trainer: Trainer) -> None:
    """Write what retraining starts from, next to the model: several times the size of the weights."""
    save_file(optimizer_tensors(trainer.modules, trainer.optimizer), draft.path / STATE_FILE)
    np.savez(draft.path / BASE_FILE, **trainer.base.state())  # type: ignore[arg-type]
    write_json(draft.path / BANDIT_FILE, trainer.state.bandit)


def load_training_state(model: Artifact, trainer: Trainer) -> None:
    """Continue where a finished warm-up ended: optimiser, base algorithm, bandit, counters, history.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    file = model.path / STATE_FILE
    with wrap_read_errors(file):
        load_optimizer_tensors(trainer.modules, trainer.optimizer, load_file(file))
    _load_base(model.path, trainer)
    state, file = trainer.state, model.path / HISTORY_FILE
    state.history = read_json(file, list[dict[str, Any]])
    with wrap_read_errors(file):
        state.epoch = len(state.history)
        state.global_step = operator.index(state.history[-1]["step"])
        trainer.schedule.clock.before += float(state.history[-1].get("seconds", 0.0))
    state.bandit = read_json(model.path / BANDIT_FILE, dict[str, Any])
    with wrap_read_errors(model.path / BANDIT_FILE):
        trainer.restore_tuner()


def _load_base(folder: Path, trainer: Trainer) -> None:
    with wrap_read_errors(folder / BASE_FILE):
        trainer.base.restore(read_arrays(folder / BASE_FILE))
    offsets = read_offsets(folder)
    if trainer.base.module is not None and offsets is not None:
        with wrap_read_errors(folder / OFFSETS_FILE):
            trainer.base.module.load_state_dict({name: torch.from_numpy(array) for name, array in offsets.items()})


def check_warm_settings(model: Artifact, sections: Mapping[str, Section]) -> None:
    """Check that the settings of retraining are those of the warm-up, where they must be.

    Raises:
        ConfigError: a setting differs.
    """
    for section, keys in WARM_SETTINGS.items():
        warm, current = model.manifest["sections"][section], sections[section]
        if not (warm.get("enabled", True) or getattr(current, "enabled", True)):
            continue  # switched off in both: its other settings have no effect
        if missing := [key for key in keys if key not in warm]:
            raise ConfigError(
                f"{model.path}: written by an older version, without {section}.{missing[0]}; run `ramen warmup` again"
            )
        before, after = flat_params({section: warm}), flat_params({section: current.model_dump()})
        for key, value in after.items():
            if key.split(".")[1] in keys and before.get(key) != value:
                raise ConfigError(
                    f"{key} = {value}: {model.path} was trained with {before.get(key)}; run `ramen warmup` again, or "
                    "restore the setting"
                )
