"""Build the trainer of a stage from its artifacts and configuration, from data to loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ramen.artifacts import Artifact, Draft
from ramen.base import make_base
from ramen.base.protocol import BaseAlgorithm
from ramen.config import (
    BanditConfig,
    BaseConfig,
    EncoderConfig,
    GuidanceConfig,
    ObjectiveConfig,
    Section,
    TrainingConfig,
)
from ramen.console import report, warn
from ramen.data.dataset import Dataset, Side
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.errors import ConfigError, DataError, Defect
from ramen.objective.bandit import Bandit
from ramen.objective.guidance import TERMS, Guidance, OracleVectors
from ramen.objective.triplet import Triplet
from ramen.sampling import keyed_rng
from ramen.tracking import Tracker
from ramen.training.checkpoint import Checkpoints
from ramen.training.distributed import Processes
from ramen.training.embedding import TextEmbedder
from ramen.training.gradient_cache import StepEncoder
from ramen.training.graph_negatives import GraphNegatives
from ramen.training.heldout import HeldOutLoss
from ramen.training.inputs import TrainingInputs, prepare_inputs
from ramen.training.schedule import FEWEST_HELD_OUT, STEPS_BETWEEN, Clock, Schedule
from ramen.training.step_loss import TASK, StepLoss
from ramen.training.step_sampler import StepSampler
from ramen.training.trainer import Trainer
from ramen.training.weight_average import WeightAverage

ADAM_EPS = 1e-6
"""Epsilon of AdamW, as in NGAME's code."""
TRUNCATED_SHARE = 0.2
"""Share of texts truncated at `encoder.max_length` above which a warning is printed."""
NOISY_HELD_OUT = 200
"""Held-out documents (or groups of them) below which a warning says that small gains may be noise."""
EVALUATION_SHARE = 0.34
"""Largest share of the training time spent on evaluations with `training.epochs=auto`."""


@dataclass(frozen=True)
class TrainingSections:
    """Config sections of both training stages."""

    encoder: EncoderConfig
    objective: ObjectiveConfig
    bandit: BanditConfig
    base: BaseConfig
    training: TrainingConfig
    guidance: GuidanceConfig

    def by_name(self) -> dict[str, Section]:
        """Section name, as in `config.SECTIONS` -> section."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def build_trainer(
    dataset: Artifact,
    graph: Artifact,
    draft: Draft,
    source: str | Path,
    sections: TrainingSections,
    track: Tracker,
    processes: Processes,
    *,
    clock: Clock | None = None,
    oracle: OracleVectors | None = None,
    texts: Dataset | None = None,
    max_length: int | None = None,
) -> Trainer:
    """Read the inputs, load the encoder and put the parts of training together.

    Args:
        dataset, graph: artifacts to train on.
        draft: the model to write; checkpoints go to its work directory.
        source: encoder name, or folder of a model, to start from.
        sections: config sections.
        track: receives metrics.
        processes: the processes that train together.
        clock: measures `training.max_minutes`; None = starts now.
        oracle: vectors that guide the encoder, or None.
        texts: replaces the artifact's dataset: the same documents and labels with other texts (for an oracle).
        max_length: tokens per text; None = as the source and section `encoder` say.

    Raises:
        ConfigError: a knob names an unknown anchor set, or the bandit has no feedback.
        DataError: too few documents have a label.
    """
    training, objective = sections.training, sections.objective
    torch.manual_seed(training.seed)

    # encoder and data
    encoder = load_encoder(source, sections.encoder, max_length=max_length)
    inputs = prepare_inputs(texts or Dataset.read(dataset.path), graph.path, encoder, objective, training)
    problem = inputs.label_problem(inputs.training_rows, encoder, training)
    held_out_problem = inputs.label_problem(inputs.held_out.rows, encoder, training)

    # objective
    triplet = Triplet(objective.margin, objective.hardest, reduction=objective.reduction)
    base = make_base(sections.base, problem, triplet)
    modules = nn.ModuleDict({"encoder": encoder})
    if base.module is not None:
        modules["base"] = base.module.to(encoder.device)
    loss = _build_loss(sections, inputs, base, oracle)
    tuner = _build_tuner(sections, loss.weights, len(held_out_problem.documents))

    # steps, optimiser and schedule
    sampler = _build_sampler(sections, inputs, base, dataset.path)
    optimizer = make_optimizer(encoder, base.module, training.lr, training.weight_decay)
    average = WeightAverage(optimizer, sampler.steps_per_epoch) if training.epochs == "auto" else None
    schedule = Schedule(
        training,
        sampler.steps_per_epoch,
        held_out=len(held_out_problem.documents),
        evaluation_period=_evaluation_period(inputs, sampler),
        clock=clock or Clock(),
        any_process=processes.any,
    )
    _check_bandit_period(tuner, schedule)

    roles, store = inputs.texts.roles, inputs.texts.store
    embedder = TextEmbedder(encoder, store, processes)
    step_encoder = StepEncoder(encoder, store, processes, training.gradient_caching)
    held_out_loss = HeldOutLoss(held_out_problem, base, triplet.temperature, embedder.embed, roles, encoder.device)
    trainer = Trainer(
        training, inputs, encoder, base, modules, optimizer, sampler, step_encoder, loss, schedule, embedder,
        Checkpoints(draft.work, draft.task), track, processes, average, tuner, held_out_loss,
    )  # fmt: skip
    trainer.use_graphs(inputs.graphs)
    if processes.rank == 0:
        _warn_of_held_out_size(trainer, held_out_problem.documents)
        _warn_of_truncated_texts(inputs.texts, encoder.settings.max_length)
    return trainer


def make_optimizer(
    encoder: SentenceEncoder, base: nn.Module | None, lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW without decay on biases, layer norms (one-dimensional parameters) and the base's parameters."""
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    base_parameters = list(base.parameters()) if base is not None else []
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1] + base_parameters, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=ADAM_EPS, fused=True)


def _build_loss(
    sections: TrainingSections, inputs: TrainingInputs, base: BaseAlgorithm, oracle: OracleVectors | None
) -> StepLoss:
    """The loss with the initial weight of every term."""
    objective, guidance = sections.objective, sections.guidance
    weights = {TASK: 1.0}
    weights |= {name: getattr(guidance, name) for name in TERMS} if oracle is not None else {}
    for name in inputs.graphs:
        weights |= {f"{name}.{side.item}": objective.weight(name, side.item) for side in Side}
    guide = None if oracle is None else Guidance(oracle, base.triplet, guidance.distance, weights)
    return StepLoss(base, base.triplet, objective.symmetric, weights, guide)


def _build_sampler(
    sections: TrainingSections, inputs: TrainingInputs, base: BaseAlgorithm, dataset: Path
) -> StepSampler:
    """The sampler of steps. Raises DataError, naming `dataset`, if too few documents have a label."""
    objective, training = sections.objective, sections.training
    negatives = None
    if inputs.graphs and objective.graph_negatives and sections.base.random_labels:
        negatives = GraphNegatives(inputs.negative_graphs, objective.anchor_sampling, objective.graph_negatives)
    sampler = StepSampler(
        base,
        training.batch_size,
        training.seed,
        objective.anchor_reuse,
        objective.anchor_budget,
        negatives,
        objective.anchor_sampling,
    )
    if not sampler.steps_per_epoch:
        few = f"too few training documents with a label for a step: {len(base.problem.documents)}"
        few += f", and {len(inputs.held_out)} held out"
        raise DataError(Defect(str(dataset), few, "ingest more, or lower training.validation_fraction"))
    return sampler


def _build_tuner(sections: TrainingSections, weights: dict[str, float], held_out: int) -> Bandit | None:
    """The bandit over the weights of the regularisers; None if it is off or there is nothing to tune."""
    bandit, training = sections.bandit, sections.training
    weights = {name: weight for name, weight in weights.items() if name not in TERMS}
    if not bandit.enabled or not any(weight > 0 for name, weight in weights.items() if name != TASK):
        return None
    if bandit.feedback == "heldout_loss" and not held_out:
        raise ConfigError(
            "bandit.feedback = heldout_loss needs a held-out document with a label, and there is none: raise "
            f"training.validation_fraction (now {training.validation_fraction:g})"
        )
    tuned = {name: weight for name, weight in weights.items() if name != TASK or bandit.form == "printed"}
    return Bandit(bandit, tuned, lambda window: keyed_rng(training.seed, "bandit", window))


def _check_bandit_period(tuner: Bandit | None, schedule: Schedule) -> None:
    steps = schedule.max_epochs * schedule.steps_per_epoch
    if tuner is not None and steps < tuner.settings.period:
        raise ConfigError(
            f"bandit.period = {tuner.settings.period}: training has {steps} steps, so no window would end; lower it, "
            "or set bandit.enabled=false"
        )


def _evaluation_period(inputs: TrainingInputs, sampler: StepSampler) -> int:
    """Epochs between two evaluations: at least `STEPS_BETWEEN` steps, and `EVALUATION_SHARE` of the time at most.

    An evaluation encodes all labels without a gradient, which costs a third of a text of a step. A step has as many
    labels and random labels as documents.
    """
    lengths_of, roles = inputs.texts.store.lengths_of, inputs.texts.roles
    document_tokens, label_tokens = (int(lengths_of(roles[role]).sum()) for role in ("documents", "labels"))
    base: BaseAlgorithm = sampler.base
    tokens_per_label = label_tokens / max(len(inputs.dataset.labels), 1)
    step_label_tokens = base.rows * (1 + base.settings.random_labels) * tokens_per_label
    share = base.rows / max(len(inputs.dataset.train), 1)
    epoch_tokens = 3 * (share * document_tokens + step_label_tokens)
    epochs = math.ceil(STEPS_BETWEEN / max(sampler.steps_per_epoch, 1))
    return max(epochs, math.ceil(label_tokens / max(EVALUATION_SHARE * epoch_tokens, 1)))


def _warn_of_held_out_size(trainer: Trainer, labelled: NDArray[np.int64]) -> None:
    """Report which documents decide when training ends, or warn why too few do.

    Args:
        trainer: with its schedule.
        labelled: int64, rows of the held-out documents that have a label.
    """
    inputs, schedule, training = trainer.inputs, trainer.schedule, trainer.settings
    if training.validation_fraction and not len(inputs.held_out):
        why = f"of {len(inputs.dataset.train):,} documents"
        if inputs.dataset.groups is not None:
            why = "every group of documents is larger"
        warn(f"training.validation_fraction = {training.validation_fraction:g} holds out no document ({why}); raise it")
    if not schedule.auto:
        return
    summary = f"training.epochs = auto: {schedule.held_out:,} held-out documents have a label"
    if not schedule.can_decide:
        warn(
            f"{summary}, {FEWEST_HELD_OUT} are needed to decide when training ends; training for "
            f"{schedule.max_epochs} epochs; raise training.validation_fraction, or set training.epochs"
        )
        return
    independent = schedule.held_out
    if inputs.dataset.groups is not None:  # documents of a group are not independent of each other
        independent = len(np.unique(inputs.dataset.groups[labelled]))
    if independent < NOISY_HELD_OUT:
        in_groups = f" in {independent:,} groups" if independent < schedule.held_out else ""
        warn(f"{summary}{in_groups}: small gains go unnoticed; raise training.validation_fraction")
    else:
        report(f"{summary} and decide when training ends")


def _warn_of_truncated_texts(texts: TextTable, max_length: int) -> None:
    """The default length suits titles; full text would lose most of its content."""
    shares = {role: float((texts.store.lengths_of(items) >= max_length).mean()) for role, items in texts.roles.items()
              if len(items)}  # fmt: skip
    if truncated := [f"{100 * share:.0f} % of {role}" for role, share in shares.items() if share > TRUNCATED_SHARE]:
        warn(f"encoder.max_length = {max_length} tokens truncates {', '.join(truncated)}; raise it for full text")
