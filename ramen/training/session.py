"""What a training stage holds between its artifacts: data, trainer, validation, checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ramen.artifacts import Artifact, Draft, write_json
from ramen.base import make_base
from ramen.config import Encoder, Objective, Training
from ramen.data.dataset import Problem
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.graph.metadata import Graph, read_graphs
from ramen.objective.triplet import Triplet
from ramen.stopping import on_stop
from ramen.tracking import Tracker
from ramen.training.batches import StepSampler
from ramen.training.checkpoint import Checkpoints, load_state, save_state
from ramen.training.distributed import Processes
from ramen.training.encoding import StepEncoder
from ramen.training.loop import TASK, Trainer, Validation, linear_schedule, make_optimizer
from ramen.training.progress import Progress
from ramen.training.sampling import keyed_rng

SIDE_NAMES = {"train": "document", "labels": "label"}
"""Graph side on disk -> side in a regulariser's name."""

HISTORY_FILE = "history.json"

EMBED_BLOCK = {"cpu": 4096, "cuda": 1 << 17}
"""Texts a process encodes between two looks at whether it was asked to stop: seconds, not minutes."""


class Session:
    """Everything one training stage holds: data, trainer, validation, checkpoints."""

    def __init__(
        self,
        dataset: Artifact,
        graph: Artifact,
        draft: Draft,
        source: str | Path,
        encoder: Encoder,
        objective: Objective,
        training: Training,
        track: Tracker,
        processes: Processes | None = None,
    ) -> None:
        self.processes = processes or Processes()
        torch.manual_seed(training.seed)
        self.track, self.training, self.objective = track, training, objective
        self.problem = Problem.read(dataset.path)
        self.graphs = read_graphs(graph.path) if objective.graphs else {}
        self.encoder = load_encoder(source, encoder)
        self.texts = text_table(self.encoder, self.problem)
        self.checkpoints = Checkpoints(draft.work, draft.task)
        self.extra_arrays: dict[str, NDArray[Any]] = {}
        self.interrupted = False
        held_out, kept = split_validation(len(self.problem.train), training)
        self.validation = validation_set(self.problem, held_out)
        self.trainer = self._make_trainer(kept)
        self.use_graphs(self.graphs)

    def _make_trainer(self, kept: NDArray[np.int64]) -> Trainer:
        settings, objective, problem = self.training, self.objective, self.problem
        triplet = Triplet(objective.margin, objective.hardest, objective.temperature, objective.reduction)
        base = make_base(settings.base, triplet)
        sampler = StepSampler(
            base,
            kept,
            problem.y_train,
            problem.filter_train,
            self.texts.roles["labels"],
            settings.batch_size,
            settings.seed,
            objective.anchor_pool == "separate",
            objective.anchor_reuse,
            objective.anchor_budget,
        )
        optimizer = make_optimizer(self.encoder, settings.lr, settings.adam_eps, settings.weight_decay)
        schedule = linear_schedule(settings.lr, settings.lr_warmup_steps, settings.epochs * sampler.steps_per_epoch)
        weights = {TASK: objective.lambda_task}
        for name in self.graphs:
            weights |= {f"{name}.document": objective.weight(name, "document")}
            weights |= {f"{name}.label": objective.weight(name, "label")}
        return Trainer(
            self.encoder,
            optimizer,
            self.texts,
            sampler,
            base,
            triplet,
            weights,
            schedule,
            settings.clip_norm,
            settings.seed,
            self.track,
            StepEncoder(self.encoder, self.texts.store, self.processes, settings.gradient_caching),
            problem.train.uids,
            stop=lambda: self.processes.any(self.interrupted),
            save=self.save,
            save_every=60 * settings.checkpoint_minutes,
        )

    @property
    def active(self) -> dict[str, dict[str, bool]]:
        """Which regularisers have a weight above 0, by set and graph side."""
        weights = self.trainer.weights
        return {
            name: {side: weights[f"{name}.{label}"] > 0 for side, label in SIDE_NAMES.items()} for name in self.graphs
        }

    def use_graphs(self, pruned: Mapping[str, Mapping[str, Graph]]) -> None:
        """Sample positives from `pruned`; masks stay with the unpruned graphs."""
        self.trainer.sampler.use_graphs(pruned, self.graphs, self.active, self.objective.anchor_sampling)

    def start_from(self, model: Artifact) -> None:
        """Go on where a finished warm-up ended: optimiser, counters, history."""
        load_state(model.path, self.encoder, self.trainer.optimizer)
        position = self.trainer.position
        position.history = json.loads((model.path / HISTORY_FILE).read_text(encoding="utf-8"))
        position.epoch = len(position.history)
        position.global_step = position.epoch * self.trainer.sampler.steps_per_epoch

    def resume(self, restore: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Restore the newest checkpoint of an interrupted attempt, if there is one."""
        found = self.checkpoints.load(self.encoder, self.trainer.optimizer)
        if found is not None:
            self.trainer.position, arrays = found
            if restore is not None:
                restore(arrays)
            print(
                f"resumed at epoch {self.trainer.position.epoch + 1}, step {self.trainer.position.step}",
                file=sys.stderr,
                flush=True,
            )
        self.processes.wait()  # all have read before rank 0 may write the next one

    def save(self) -> None:
        """Write a checkpoint; rank 0 does."""
        if self.processes.rank > 0:
            return
        self.checkpoints.save(self.encoder, self.trainer.optimizer, self.trainer.position, self.extra_arrays)

    def train(self, phase: str, until: int) -> None:
        """Train to the end of epoch `until`, recording history and validating after each epoch."""
        trainer = self.trainer
        sampler = trainer.sampler
        per_epoch = min(len(sampler.documents), sampler.steps_per_epoch * sampler.batch_size)
        done = trainer.position.epoch * per_epoch + min(trainer.position.step * sampler.batch_size, per_epoch)
        progress = Progress(phase, until * per_epoch, "documents", done)

        def on_epoch(means: dict[str, float]) -> None:
            record = {
                "epoch": trainer.position.epoch + 1,
                "phase": phase,
                "round": trainer.position.round,
                "loss": means["loss"],
                "task_loss": means[TASK],
                "terms": {name: value for name, value in means.items() if name not in ("loss", TASK)},
                "val_p_at_1": self.validate(),
                "lambda": dict(trainer.weights),
                "edges_kept": trainer.position.rounds[-1]["edges_kept"] if trainer.position.rounds else {},
            }
            trainer.position.history.append(record)
            self.track.log(epoch_metrics(record), step=trainer.position.global_step)
            shown = "" if record["val_p_at_1"] is None else f" val P@1 {record['val_p_at_1']:.2f}"
            print(f"{phase} epoch {record['epoch']} loss {record['loss']:.4f}{shown}", file=sys.stderr, flush=True)

        trainer.run_epochs(until, progress, on_epoch)

    def validate(self) -> float | None:
        """P@1 on the held-out documents over all labels, or None when nothing is held out."""
        if not len(self.validation.documents):
            return None
        roles = self.texts.roles
        documents = self.embed(roles["documents"][self.validation.documents])
        return self.validation.p_at_1(documents, self.embed(roles["labels"]))

    def embed(self, texts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Encode stored texts without gradients, all processes together: float32 [n, D], the same in each.

        Raises:
            Interrupted: asked to stop; a checkpoint was saved.
        """
        store, processes = self.texts.store, self.processes
        out = np.empty((len(texts), self.encoder.dimension), np.float32)
        size = EMBED_BLOCK[self.encoder.device.type] * processes.size
        for start in range(0, len(texts), size):
            self.trainer.stop_if_asked()
            block = texts[start : start + size]
            shares = processes.shares(store.lengths_of(block))
            own = torch.from_numpy(self.encoder.embed(store, block[shares[processes.rank]]))
            if processes.size > 1:
                own = processes.gather(own.to(self.encoder.device), shares).cpu()
            out[start : start + size] = own.numpy()
        return out

    def write(self, draft: Draft) -> None:
        """Write encoder, optimiser state and history."""
        self.encoder.save(draft.path)
        save_state(draft.path, self.encoder, self.trainer.optimizer)
        write_json(draft.path / HISTORY_FILE, self.trainer.position.history)
        draft.counts |= {
            "epochs": self.trainer.position.epoch,
            "steps": self.trainer.position.global_step,
            "documents": len(self.trainer.sampler.documents),
            "validation_documents": len(self.validation.documents),
            "distinct_texts": len(self.texts.store),
            "tokens": len(self.texts.store.ids),
        }

    def last_metrics(self) -> dict[str, float]:
        """Loss and validation figure of the last epoch."""
        history = self.trainer.position.history
        metrics = epoch_metrics(history[-1])
        scores = [record["val_p_at_1"] for record in history if record["val_p_at_1"] is not None]
        return metrics | ({"best/val_p_at_1": max(scores)} if scores else {})

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGTERM (a pre-empted node) and Ctrl-C end with a checkpoint after the current step."""

        def ask() -> None:
            self.interrupted = True

        with on_stop(ask):
            yield


def epoch_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """A history record as flat metrics."""
    metrics = {"epoch/loss": record["loss"], "epoch/task_loss": record["task_loss"]}
    metrics |= {f"epoch/{name}": value for name, value in record["terms"].items()}
    if record["val_p_at_1"] is not None:
        metrics["val_p_at_1"] = record["val_p_at_1"]
    return metrics


def text_table(encoder: SentenceEncoder, problem: Problem) -> TextTable:
    """Tokenise every distinct text of the problem once."""
    roles = {"documents": problem.train.texts, "labels": problem.labels.texts}
    roles |= {f"anchors/{name}": anchors.texts.texts for name, anchors in problem.anchor_sets.items()}
    return TextTable.build(encoder.tokenizer, roles, encoder.settings.max_length)


def split_validation(documents: int, training: Training) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(held out, kept) rows of the training documents, int64, sorted."""
    shuffled = keyed_rng(training.seed, "validation").permutation(documents)
    cut = round(documents * training.validation_fraction)
    return np.sort(shuffled[:cut]), np.sort(shuffled[cut:])


def validation_set(problem: Problem, documents: NDArray[np.int64]) -> Validation:
    """The held-out documents with their true and ignored pairs as sorted flat numbers."""
    num_labels = len(problem.labels)

    def pairs(matrix: Any) -> Any:
        block = matrix[documents].tocoo()
        return np.sort(documents[block.row].astype(np.int64) * num_labels + block.col)

    return Validation(documents, pairs(problem.y_train), pairs(problem.filter_train), num_labels)
