"""What a training stage holds between its artifacts: data, trainer, validation, checkpoints."""

from __future__ import annotations

import functools
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import nn

from ramen import config
from ramen.artifacts import Artifact, Draft, read_arrays, read_json, reading, write_json
from ramen.base import make_base
from ramen.base.protocol import BaseAlgorithm, LabelProblem
from ramen.config import BaseConfig, EncoderConfig, ObjectiveConfig, Section, TrainingConfig
from ramen.data.dataset import Dataset, whole_groups
from ramen.data.filters import heldout_filter
from ramen.data.sparse import without
from ramen.encoder.label_vectors import OFFSETS_FILE, read_offsets, write_offsets
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.errors import ConfigError, DataError, Defect, nearest, warn
from ramen.graph.cleaning import anchors_among, false_negative_anchors
from ramen.graph.metadata import Graph, read_graphs
from ramen.objective.bandit import Bandit
from ramen.objective.guidance import TERMS, Guidance, Oracle
from ramen.objective.triplet import Triplet
from ramen.sampling import keyed_rng
from ramen.signals import on_interrupt
from ramen.tracking import Tracker, flat_params
from ramen.training.checkpoint import Checkpoints, load_state, save_state
from ramen.training.distributed import Processes
from ramen.training.gradient_cache import StepEncoder
from ramen.training.graph_negatives import GraphNegatives
from ramen.training.label_augmentation import augmented
from ramen.training.progress import Progress
from ramen.training.schedule import FEWEST_HELD_OUT, STEPS_BETWEEN, Clock, Plan
from ramen.training.step_sampler import StepSampler
from ramen.training.trainer import ACCURACY, TASK, Quality, Trainer, Validation, make_optimizer
from ramen.training.weight_average import WeightAverage

SIDE_NAMES: dict[str, Literal["document", "label"]] = {"train": "document", "labels": "label"}
"""Graph side on disk -> side in a regulariser's name."""

HISTORY_FILE = "history.json"
BANDIT_FILE = "bandit.json"
BASE_FILE = "base.npz"
"""What the base algorithm clustered or mined last."""
BASE_PREFIX = "base:"
"""Marks the base algorithm's arrays among those of a checkpoint."""

WARMED = {
    "encoder": ("name", "max_length", "pooling"),
    "base": ("name", "dexa"),
    "objective": ("augment_labels",),
    "training": ("seed", "validation_fraction", "warmup_epochs"),
    "guidance": ("enabled", "anchor_sets", "max_length", "epochs"),
}
"""What a warm model has settled: its encoder, its base algorithm and the pairs that this goes by, which documents it
has not seen, so that they may judge, from which epoch on rounds are counted, and its oracle."""
CUT_SHARE = 0.2
"""More texts than this share cut at `encoder.max_length` are worth a warning."""
LEAST_HELD_OUT = 500
"""Documents held out when they decide the end of training, if that is no more than a tenth."""
NOISY_HELD_OUT = 200
"""Held-out documents, or groups of them, below which a warning says that small gains may be noise."""
LARGEST_GROUP = 0.02
"""Share of the held-out documents that one group takes at most, where smaller groups suffice. Groups are drawn whole,
and a few large ones (the language packs of one program) would decide alone when training ends."""
EVALUATION_SHARE = 0.34
"""Share of training's time that evaluations on held-out documents take at most, with `training.epochs=auto`."""
CLOSING_MARGIN = 1.3
"""How much longer than expected the work after training may take, where `training.max_minutes` is kept."""
EMBED_BLOCK = {"cpu": 4096, "cuda": 1 << 17}
"""Texts a process encodes between two looks at whether it was asked to stop: seconds, not minutes."""


@dataclass(frozen=True)
class TrainingSections:
    """The sections that both training stages see."""

    encoder: EncoderConfig
    objective: ObjectiveConfig
    bandit: config.BanditConfig
    base: BaseConfig
    training: TrainingConfig
    guidance: config.GuidanceConfig

    def sections(self) -> dict[str, Section]:
        """By name, as `config.SECTIONS` names them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class Session:
    """Everything one training stage holds: data, trainer, validation, checkpoints.

    Args:
        dataset, graph: what is trained on.
        draft: where the model goes, with the work directory for checkpoints.
        source: model that training starts from.
        settings: sections.
        track: receives metrics.
        processes: that train together; None = this one alone.
        problem: in the place of the dataset's, of the same documents and labels (an oracle reads other texts).
        oracle: whose vectors guide the encoder, or None.
        max_length: tokens of a text, whatever settings and source say; None = what they say.
        clock: what `training.max_minutes` is measured by; None = it starts now.

    Raises:
        ConfigError: a knob names an anchor set that is not there, or the bandit has nothing to be judged by.
        DataError: there are too few documents with a label for one step.
    """

    def __init__(
        self,
        dataset: Artifact,
        graph: Artifact,
        draft: Draft,
        source: str | Path,
        settings: TrainingSections,
        track: Tracker,
        processes: Processes | None = None,
        problem: Dataset | None = None,
        oracle: Oracle | None = None,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self._embedded = (0, 0.0)  # tokens and seconds
        self.processes = processes or Processes()
        self.settings, self.track = settings, track
        self.training, self.objective = settings.training, settings.objective
        torch.manual_seed(self.training.seed)
        self.problem = problem or Dataset.read(dataset.path)
        self.oracle = oracle
        held_out, kept = split_validation(self.problem, self.training)
        if self.training.validation_fraction and not len(held_out) and self.processes.rank == 0:
            fraction = f"training.validation_fraction = {self.training.validation_fraction:g}"
            too = "every group of documents is larger" if self.problem.groups is not None else "there are too few"
            warn(f"{fraction} holds out no document, since {too}; raise it")
        self.ignored = heldout_filter(self.problem, held_out)
        reads_graphs = self.objective.graphs or self.objective.augment_labels
        known = training_graphs(graph.path, self.problem, held_out) if reads_graphs else {}
        self.graphs, self.graph_negatives = self._used(known) if self.objective.graphs else ({}, None)
        self._pairs = self._true_pairs(known)
        self._false_negative_anchors = self._false_negative_anchors_of(held_out)
        self.encoder = load_encoder(source, settings.encoder, max_length=max_length)
        self.texts = text_table(self.encoder, self.problem)
        if self.processes.rank == 0:
            _warn_of_cut_texts(self.texts, self.encoder.settings.max_length)
        self.checkpoints = Checkpoints(draft.work, draft.task)
        self.extra_arrays: dict[str, NDArray[Any]] = {}
        self.interrupted = False
        self.validation = validation_set(self.problem, held_out, self.ignored)
        self.trainer = self._make_trainer(held_out, kept)
        self.plan = self.trainer.plan
        if not self.trainer.sampler.steps_per_epoch:
            count = len(self.trainer.base.problem.documents)
            found = f"too few training documents with a label for a step: {count}, and {len(held_out)} held out"
            raise DataError(Defect(str(dataset.path), found, "ingest more, or lower training.validation_fraction"))
        tuner, steps = self.trainer.tuner, self.plan.most * self.trainer.sampler.steps_per_epoch
        if tuner is not None and steps < tuner.settings.period:
            raise ConfigError(
                f"bandit.period = {tuner.settings.period}: training has {steps} steps, so no window would end and the "
                "weights would stay where chance put them; lower it, or set bandit.enabled=false"
            )
        if self.processes.rank == 0:
            self._report_held_out()
        self.use_graphs(self.graphs)

    def _report_held_out(self) -> None:
        """Say what decides the end of training, or why nothing can."""
        if not self.plan.auto:
            return
        count = f"{self.plan.held_out:,} held-out documents have a label"
        if not self.plan.decides:
            warn(
                f"training.epochs = auto: {count}, and {FEWEST_HELD_OUT} are needed to see when training no longer "
                f"pays; trains {self.plan.most} epochs; raise training.validation_fraction, or set training.epochs"
            )
        elif (groups := self._held_out_groups()) < NOISY_HELD_OUT:
            among = f", of {groups:,} groups" if groups < self.plan.held_out else ""
            warn(f"training.epochs = auto: {count}{among}: small gains go unseen; raise training.validation_fraction")
        else:
            print(f"training.epochs = auto: {count} and decide when training ends", file=sys.stderr, flush=True)

    def _held_out_groups(self) -> int:
        """Groups of the held-out documents with a label; documents of a group are not independent of each other."""
        groups = self.problem.groups
        if groups is None:
            return self.plan.held_out
        return len(np.unique(groups[self._told(self.validation.documents).documents]))

    def _used(self, graphs: dict[str, dict[str, Graph]]) -> tuple[dict[str, dict[str, Graph]], GraphNegatives | None]:
        """The graphs that are trained on, and the negatives that graphs name."""
        objective = self.objective
        used = chosen_sets(graphs, objective.anchor_sets, "objective.anchor_sets")
        known = [f"{name}.{side}" for name in used for side in SIDE_NAMES.values()]
        for name in objective.lambdas:
            if name not in known:
                left = " of objective.anchor_sets" if name.rpartition(".")[0] in graphs else ""
                raise ConfigError(f"objective.lambdas.{name}: no such regulariser{left}; {nearest(name, known)}")
        named = chosen_sets(graphs, objective.negative_sets, "objective.negative_sets")
        negatives = None
        if objective.graph_negatives and self.settings.base.random_labels:
            negatives = GraphNegatives(named, objective.anchor_sampling, objective.graph_negatives)
        return used, negatives

    def _true_pairs(self, graphs: dict[str, dict[str, Graph]]) -> sp.csr_matrix:
        """What counts as true in training: CSR N x L."""
        y, ignore = self.problem.positives, self.problem.filter_train
        if not self.objective.augment_labels:
            return y
        return augmented(y, ignore, chosen_sets(graphs, self.objective.anchor_sets, "objective.anchor_sets"))

    def _told(self, documents: NDArray[np.int64]) -> LabelProblem:
        """What the base algorithm is told of some of the training documents."""
        problem, y = self.problem, self._pairs
        return LabelProblem(
            documents[np.diff(y.indptr)[documents] > 0],
            y,
            self.ignored,
            self.texts.roles["labels"],
            self.texts.roles["documents"],
            self.training.batch_size,
            self.encoder.dimension,
            self.training.seed,
            problem.unseen,
        )

    def _make_trainer(self, held_out: NDArray[np.int64], kept: NDArray[np.int64]) -> Trainer:
        settings, objective = self.training, self.objective
        triplet = Triplet(objective.margin, objective.hardest, reduction=objective.reduction)
        base = make_base(self.settings.base, self._told(kept), triplet)
        if base.module is not None:
            base.module.to(self.encoder.device)
        sampler = StepSampler(
            base,
            settings.batch_size,
            settings.seed,
            objective.anchor_reuse,
            objective.anchor_budget,
            self.graph_negatives,
        )
        # one module, so that checkpoints and the optimiser's state name every parameter
        own = {} if base.module is None else {"base": base.module}
        self.trained = nn.ModuleDict({"encoder": self.encoder, **own})
        optimizer = make_optimizer(self.encoder, base.module, settings.lr, settings.weight_decay)
        plan = Plan(
            settings,
            sampler.steps_per_epoch,
            held_out=len(self._told(self.validation.documents).documents),
            every=self._epochs_between(sampler),
            clock=self.clock,
            reserve=self._closing_seconds,
            agree=self.processes.any,
        )
        guidance = self.settings.guidance
        weights = {TASK: 1.0}
        weights |= {name: getattr(guidance, name) for name in TERMS} if self.oracle is not None else {}
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
            objective.symmetric,
            weights,
            settings.lr,
            plan,
            settings.seed,
            self.track,
            StepEncoder(self.encoder, self.texts.store, self.processes, settings.gradient_caching),
            self.problem.train.uids,
            self.embed_role,
            average=WeightAverage(optimizer, sampler.steps_per_epoch) if plan.auto else None,
            guidance=None if self.oracle is None else Guidance(self.oracle, triplet, guidance.distance, weights),
            tuner=self._tuner({name: weight for name, weight in weights.items() if name not in TERMS}),
            heldout=self._heldout(held_out, base),
            stop=lambda: self.processes.any(self.interrupted),
            save=self.save,
            save_every=60 * settings.checkpoint_minutes,
        )

    def _epochs_between(self, sampler: StepSampler) -> int:
        """Epochs between two evaluations: at least `STEPS_BETWEEN` steps, and a third of training's time at most.

        To rank labels for held-out documents all labels are encoded, without a gradient, which costs a third of a text
        of a step; a step has as many labels and random labels as documents.
        """
        tokens = {
            role: int(self.texts.store.lengths_of(self.texts.roles[role]).sum()) for role in ("documents", "labels")
        }
        mean_label = tokens["labels"] / max(len(self.problem.labels), 1)
        drawn = sampler.base.rows * (1 + self.settings.base.random_labels) * mean_label
        share = sampler.base.rows / max(len(self.problem.train), 1)
        epoch = 3 * (share * tokens["documents"] + drawn)
        steps = math.ceil(STEPS_BETWEEN / max(sampler.steps_per_epoch, 1))
        return max(steps, math.ceil(tokens["labels"] / max(EVALUATION_SHARE * epoch, 1)))

    def _closing_seconds(self) -> float:
        """How long the last validation takes, and encoding every text once for the label context."""
        tokens, seconds = self._embedded
        store, roles = self.texts.store, self.texts.roles
        ranked = np.concatenate([roles["labels"], roles["documents"][self.validation.documents]])
        needed = len(store.ids) + int(store.lengths_of(ranked).sum())
        return CLOSING_MARGIN * seconds / max(tokens, 1) * needed

    def _tuner(self, weights: dict[str, float]) -> Bandit | None:
        """The bandit over the weights of the regularisers; None when it is off or there is nothing to tune."""
        settings = self.settings.bandit
        if not settings.enabled or not any(w > 0 for name, w in weights.items() if name != TASK):
            return None
        if settings.feedback == "heldout_loss" and not len(self._told(self.validation.documents).documents):
            raise ConfigError(
                "bandit.feedback = heldout_loss needs a held-out document with a label, and there is none: raise "
                f"training.validation_fraction (now {self.training.validation_fraction:g})"
            )
        tuned = {name: w for name, w in weights.items() if name != TASK or settings.form == "printed"}
        return Bandit(settings, tuned, lambda window: keyed_rng(self.training.seed, "bandit", window))

    def _heldout(self, held_out: NDArray[np.int64], base: BaseAlgorithm) -> Callable[[], float]:
        """Mean negative log-likelihood of a label of each of some held-out documents, without dropout or gradient.

        Always the same sample: another one each time would change the loss by more than a window of training does. And
        not the task loss: a triplet loss is 0 wherever the margin is kept, and says nothing there.
        """

        @functools.cache  # of the pairs of all labels: hundreds of megabytes, that few bandits ask for
        def sampler() -> StepSampler:
            told = BaseAlgorithm(self._told(held_out), self.settings.base, base.triplet)
            return StepSampler(told, self.training.batch_size, self.training.seed)

        def loss() -> float:
            step = sampler().step(sampler().epoch_order(0), 0, 0)
            roles = self.texts.roles
            # not to be stopped here, in the middle of a step: its end asks
            documents, labels = (
                self.embed(roles[role][items], may_stop=False)
                for role, items in (("documents", step.documents), ("labels", step.labels))
            )
            positive, others = torch.from_numpy(step.positive), torch.from_numpy(step.mask)
            with torch.no_grad():
                z_LD = base.label_vectors(torch.from_numpy(labels).to(self.encoder.device), step.labels).cpu()
                scores_BL = torch.from_numpy(documents) @ z_LD.T / base.triplet.temperature
                others[torch.arange(len(positive)), positive] = False
                return float(nn.functional.cross_entropy(scores_BL.masked_fill(others, -torch.inf), positive))

        return loss

    @property
    def active(self) -> dict[str, dict[str, bool]]:
        """Which regularisers take part, by set and graph side: those that begin with a weight above 0.

        Not those whose weight is above 0 just now: the bandit's perturbations may take it there and back.
        """
        weight = self.objective.weight
        return {name: {side: weight(name, label) > 0 for side, label in SIDE_NAMES.items()} for name in self.graphs}

    def use_graphs(self, pruned: Mapping[str, Mapping[str, Graph]]) -> None:
        """Sample positives from `pruned`; masks stay with the unpruned graphs."""
        sampling, texts = self.objective.anchor_sampling, self.texts.roles
        self.trainer.sampler.use_graphs(pruned, self.graphs, self.active, sampling, texts, self._false_negative_anchors)

    def _false_negative_anchors_of(self, held_out: NDArray[np.int64]) -> dict[str, dict[str, sp.csr_matrix]]:
        """Set -> side -> pairs of an item and an anchor that is no negative of its, whatever the graph says."""
        problem, known = self.problem, np.ones(len(self.problem.train), np.float32)
        known[held_out] = 0
        y = sp.csr_matrix(sp.diags(known) @ problem.y_train)
        y.eliminate_zeros()
        sets = {name: problem.anchor_sets[name].texts for name in self.graphs}
        return {
            name: {
                "train": false_negative_anchors(problem.train, problem.labels, y, anchors),
                "labels": false_negative_anchors(problem.labels, problem.train, sp.csr_matrix(y.T), anchors),
            }
            for name, anchors in sets.items()
        }

    def start_from(self, model: Artifact) -> None:
        """Go on where a finished warm-up ended: optimiser, counters, history."""
        load_state(model.path, self.trained, self.trainer.optimizer)
        base, offsets = self.trainer.base, read_offsets(model.path)
        with reading(model.path / BASE_FILE):
            base.restore(read_arrays(model.path / BASE_FILE))
        if base.module is not None and offsets is not None:
            with reading(model.path / OFFSETS_FILE):
                base.module.load_state_dict({name: torch.from_numpy(array) for name, array in offsets.items()})
        position, history = self.trainer.position, model.path / HISTORY_FILE
        position.history = read_json(history, list[dict[str, Any]])
        position.epoch = len(position.history)
        position.bandit = read_json(model.path / BANDIT_FILE, dict[str, Any])
        with reading(model.path / BANDIT_FILE):
            self.trainer.restore_tuner()
        with reading(history):
            position.global_step = operator.index(position.history[-1]["step"])
            self.clock.before += float(position.history[-1].get("seconds", 0.0))

    def resume(self, restore: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Restore the newest checkpoint of an interrupted attempt, if there is one."""
        found = self.checkpoints.load(self.trained, self.trainer.optimizer)
        if found is not None:
            self.trainer.position, arrays = found
            self.clock.before = self.trainer.position.seconds
            own = {key: arrays.pop(key) for key in list(arrays) if key.startswith(BASE_PREFIX)}
            self.trainer.restore_tuner()
            self.trainer.base.restore({key.removeprefix(BASE_PREFIX): array for key, array in own.items()})
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
        own = {BASE_PREFIX + key: array for key, array in self.trainer.base.state().items()}
        arrays = {**self.extra_arrays, **own}
        self.trainer.position.seconds = self.clock.elapsed if self.training.max_minutes else 0.0
        average = self.trainer.average
        with average.put_back() if average is not None else nullcontext():
            self.checkpoints.save(self.trained, self.trainer.optimizer, self.trainer.position, arrays)

    def end(self) -> None:
        """Save, and use the average of the weights, if there is one, in all that follows training."""
        self.save()
        if self.trainer.average is not None:
            self.trainer.average.swap()

    def train(self, phase: str, until: int) -> None:
        """Train to the end of epoch `until`, or of the plan, recording history and validating when it is due."""
        trainer = self.trainer
        self.plan.warming = phase == "warmup"
        done = round(trainer.position.global_step * trainer.documents_per_step)
        progress = Progress(phase, trainer.total_documents, "documents", done)

        def on_epoch(means: dict[str, float]) -> None:
            position = trainer.position
            epoch = position.epoch + 1
            due = epoch == until or self.plan.evaluates(epoch) or position.ended
            quality = self.validate() if due else None
            record = {
                "epoch": epoch,
                "step": position.global_step,
                "phase": phase,
                "round": trainer.position.round,
                "loss": means["loss"],
                "task_loss": means[TASK],
                "accuracy": means[ACCURACY],
                "terms": {name: value for name, value in means.items() if name not in ("loss", TASK, ACCURACY)},
                "val_p_at_1": None if quality is None else quality.p_at_1,
                "val_gain": None if quality is None else quality.gain,
                "lambda": {**trainer.weights, **(trainer.tuner.means if trainer.tuner else {})},
                "edges_kept": trainer.position.rounds[-1]["edges_kept"] if trainer.position.rounds else {},
            }
            if self.training.max_minutes:
                record["seconds"] = self.clock.elapsed
            position.history.append(record)
            shown = ""
            if quality is not None:
                curve = {"heldout/p_at_1": quality.p_at_1, "heldout/gain": quality.gain}
                self.track.curve(curve, step=position.global_step)
                shown = f" held-out P@1 {quality.p_at_1:.2f} gain {quality.gain:.2f}"
            progress.close()
            print(f"{phase} epoch {epoch} loss {record['loss']:.4f}{shown}", file=sys.stderr, flush=True)

        trainer.run_epochs(until, progress, on_epoch)
        progress.close()

    def validate(self) -> Quality | None:
        """What (a sample of) the held-out documents find among all labels, or None when nothing is held out.

        Evaluates the average of the weights, if there is one.
        """
        held_out, average = self.validation.sampled(), self.trainer.average
        if not len(held_out.documents):
            return None
        with average.in_place() if average is not None else nullcontext():
            documents = self.embed(self.texts.roles["documents"][held_out.documents])
            labels = self.embed_role("labels")
        return held_out.quality(documents, labels)

    def embed_role(self, role: Literal["documents", "labels"]) -> NDArray[np.float32]:
        """Vectors of all training documents, or those by which all labels are ranked: float32 [N or L, D]."""
        vectors = self.embed(self.texts.roles[role])
        if role == "labels":
            base, size = self.trainer.base, EMBED_BLOCK["cuda"]  # millions of labels are no guest for a GPU's memory
            for start in range(0, len(vectors), size):
                part = np.arange(start, min(start + size, len(vectors)))
                with torch.no_grad():
                    encoded = torch.from_numpy(vectors[part]).to(self.encoder.device)
                    vectors[part] = base.label_vectors(encoded, part).cpu().numpy()
        return vectors

    def embed(self, texts: NDArray[np.int64], *, may_stop: bool = True) -> NDArray[np.float32]:
        """Encode stored texts without gradients, all processes together: float32 [n, D], the same in each.

        Args:
            texts: int64 [n] text numbers.
            may_stop: look between blocks whether someone asked to stop; a checkpoint is written as things stand.

        Raises:
            Interrupted: asked to stop; a checkpoint was saved.
        """
        store, processes = self.texts.store, self.processes
        started = time.monotonic()
        out = np.empty((len(texts), self.encoder.dimension), np.float32)
        size = EMBED_BLOCK[self.encoder.device.type] * processes.size
        for start in range(0, len(texts), size):
            if may_stop:
                self.trainer.stop_if_asked()
            block = texts[start : start + size]
            shares = processes.shares(store.lengths_of(block))
            own = torch.from_numpy(self.encoder.embed(store, block[shares[processes.rank]]))
            if processes.size > 1:
                own = processes.gather(own.to(self.encoder.device), shares).cpu()
            out[start : start + size] = own.numpy()
        before, seconds = self._embedded
        self._embedded = before + int(store.lengths_of(texts).sum()), seconds + time.monotonic() - started
        return out

    def write(self, draft: Draft, to_go_on: bool) -> None:
        """Write encoder and history; `to_go_on`, also all that further training starts from, several times as much."""
        self.encoder.save(draft.path)
        base = self.trainer.base
        if to_go_on:
            save_state(draft.path, self.trained, self.trainer.optimizer)
            np.savez(draft.path / BASE_FILE, **base.state())  # type: ignore[arg-type]
            write_json(draft.path / BANDIT_FILE, self.trainer.position.bandit)
        if base.module is not None:
            arrays = {name: value.detach().cpu().numpy() for name, value in base.module.state_dict().items()}
            write_offsets(draft.path, arrays["table"], arrays["row_of"])
        write_json(draft.path / HISTORY_FILE, self.trainer.position.history)
        draft.counts |= {
            "epochs": self.trainer.position.epoch,
            "steps": self.trainer.position.global_step,
            "documents": len(self.trainer.base.problem.documents),
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

        with on_interrupt(ask):
            yield


def check_warm_settings(model: Artifact, asked: TrainingSections) -> None:
    """Training goes on with what was warmed up; other values would be asked for in vain.

    Raises:
        ConfigError: the knobs name others.
    """
    for section, keys in WARMED.items():
        warmed, now = model.manifest["sections"][section], getattr(asked, section)
        if not (warmed.get("enabled", True) or now.enabled):
            continue  # neither has what the other knobs are of
        if missing := [key for key in keys if key not in warmed]:
            raise ConfigError(
                f"{model.path}: was warmed up by an older version, without {section}.{missing[0]}; run `ramen warmup` "
                "again"
            )
        before, after = flat_params({section: warmed}), flat_params({section: now.model_dump()})
        for key, value in after.items():
            if key.split(".")[1] in keys and before.get(key) != value:
                raise ConfigError(
                    f"{key} = {value}: {model.path} was warmed up with {before.get(key)}; run `ramen warmup` again, or "
                    "set it back"
                )


def training_graphs(path: Path, problem: Dataset, held_out: NDArray[np.int64]) -> dict[str, dict[str, Graph]]:
    """The graphs under `path` without the edges to held-out documents (their rows), where documents are anchors.

    A label that is drawn to a document is trained on that pair; so, as no test document is an anchor,
    none that validates is one.
    """
    texts, graphs = problem.train.at(held_out), read_graphs(path)
    for name, sides in graphs.items():
        hidden = anchors_among(texts, problem.anchor_sets[name].texts)
        graphs[name] = {side: graph.select(~hidden[graph.indices]) for side, graph in sides.items()}
    return graphs


def chosen_sets(graphs: dict[str, dict[str, Graph]], wanted: Sequence[str], knob: str) -> dict[str, dict[str, Graph]]:
    """The graphs of the anchor sets that a knob asks for, all if it names none; no others are looked at.

    Raises:
        ConfigError: it names one that is not there.
    """
    if unknown := sorted(set(wanted) - set(graphs)):
        there = ", ".join(graphs) or "none"
        raise ConfigError(f"{knob}: {unknown[0]!r} is no anchor set of the dataset; there are {there}")
    return {name: sides for name, sides in graphs.items() if not wanted or name in wanted}


def epoch_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """A history record as flat metrics."""
    metrics = {"epoch/loss": record["loss"], "epoch/task_loss": record["task_loss"]}
    metrics |= {f"epoch/{name}": value for name, value in record["terms"].items()}
    return metrics | {key: record[key] for key in ("val_p_at_1", "val_gain") if record[key] is not None}


def text_table(encoder: SentenceEncoder, problem: Dataset) -> TextTable:
    """Tokenise every distinct text of the problem once."""
    roles = {"documents": problem.train.texts, "labels": problem.labels.texts}
    roles |= {f"anchors/{name}": anchors.texts.texts for name, anchors in problem.anchor_sets.items()}
    return TextTable.build(encoder.tokenizer, roles, encoder.settings.max_length)


def _warn_of_cut_texts(texts: TextTable, max_length: int) -> None:
    """The default reads titles; full text, cut there, would lose most of what it says."""
    cut = {role: float((texts.store.lengths_of(items) >= max_length).mean()) for role, items in texts.roles.items()
           if len(items)}  # fmt: skip
    if many := {role: share for role, share in cut.items() if share > CUT_SHARE}:
        told = ", ".join(f"{100 * share:.0f} % of {role}" for role, share in many.items())
        limit = f"encoder.max_length = {max_length} tokens"
        warn(f"{told} reach {limit} and are cut there; raise it for full text")


def split_validation(problem: Dataset, training: TrainingConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(held out, kept) rows of the training documents, int64, sorted.

    Where the dataset has groups they are held out whole, as they were set aside for test: a held-out document with a
    sibling in training is an easier one than those that are served. Groups larger than `LARGEST_GROUP` come last.
    """
    rng, documents = keyed_rng(training.seed, "validation"), len(problem.train)
    cut = round(documents * training.validation_fraction)
    if training.epochs == "auto" and training.validation_fraction:
        cut = max(cut, min(LEAST_HELD_OUT, documents // 10))
    if problem.groups is None:
        shuffled = rng.permutation(documents)
        return np.sort(shuffled[:cut]), np.sort(shuffled[cut:])
    sizes = np.bincount(problem.groups)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(sizes[order] > max(1, LARGEST_GROUP * cut), kind="stable")]
    held_out = whole_groups(problem.groups, order, cut)
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def validation_set(problem: Dataset, documents: NDArray[np.int64], ignored: sp.csr_matrix) -> Validation:
    """The held-out documents with their true and ignored (CSR N x L) pairs as sorted flat numbers."""
    num_labels = len(problem.labels)

    def pairs(matrix: Any) -> Any:
        block = matrix[documents].tocoo()
        return np.sort(documents[block.row].astype(np.int64) * num_labels + block.col)

    return Validation(documents, pairs(without(problem.y_train, ignored)), pairs(ignored), num_labels, problem.unseen)
