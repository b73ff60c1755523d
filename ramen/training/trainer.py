"""The training loop: sample a step, encode, losses, backward, optimiser step, log, checkpoint.

Letters: D width of a vector, N training documents, L labels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from ramen.base.protocol import BaseAlgorithm
from ramen.config import BanditConfig, TrainingConfig
from ramen.console import report
from ramen.encoder.model import SentenceEncoder
from ramen.errors import Interrupted, RamenError
from ramen.graph.metadata import Graphs
from ramen.objective.bandit import Bandit
from ramen.objective.guidance import TERMS
from ramen.sampling import keyed_rng
from ramen.signals import on_interrupt
from ramen.tracking import Tracker
from ramen.training.checkpoint import Checkpoints, TrainingState
from ramen.training.distributed import Processes
from ramen.training.embedding import TextEmbedder
from ramen.training.gradient_cache import StepEncoder
from ramen.training.heldout import EVALUATED, HeldOutLoss, Quality
from ramen.training.inputs import TrainingInputs
from ramen.training.progress import Progress
from ramen.training.schedule import Schedule
from ramen.training.step_loss import ACCURACY, TASK, StepLoss
from ramen.training.step_sampler import Step, StepSampler
from ramen.training.weight_average import WeightAverage

CLIP_NORM = 1.0
"""Gradients are clipped to this norm."""
LOG_EVERY = 10
"""Steps between two points of the tracked curves."""
LABEL_BLOCK = 1 << 17
"""Label vectors that the base algorithm transforms at a time: millions do not fit a GPU's memory."""
CLOSING_MARGIN = 1.3
"""Factor on the estimated duration of the work after training, with `training.max_minutes`."""
BASE_PREFIX = "base:"
"""Prefix of the base algorithm's arrays among the arrays of a checkpoint."""

Vectors = NDArray[np.float32]


@dataclass(repr=False, eq=False)
class Trainer:
    """Trains an encoder and a base algorithm; both training stages run it. Built by `setup.build_trainer`.

    Attributes:
        settings: section `training`.
        inputs: pairs, graphs and texts.
        encoder: the encoder, trained in place.
        base: the base algorithm: which pairs a step holds, and the task loss.
        modules: encoder and, if the base algorithm has parameters, its module: everything that is trained.
        optimizer: over the parameters of `modules`.
        sampler: builds the steps.
        step_encoder: encodes the texts of a step, and carries the gradient back.
        loss: terms of a step and their weights.
        schedule: learning rate and end of training.
        embedder: embeds texts without gradients.
        checkpoints: of this stage.
        track: receives metrics.
        processes: the processes that train together.
        average: average of the weights; None if the last weights are used.
        tuner: bandit that moves the regularisers' weights, or None.
        held_out_loss: the bandit's feedback `heldout_loss`, or None.
        state: counters and history.
        pruning_arrays: state of the pruning rounds, saved in every checkpoint.
        interrupted: SIGTERM or Ctrl-C reached this process.
        step_texts, step_tokens: distinct texts of the last step, and their tokens.
    """

    settings: TrainingConfig
    inputs: TrainingInputs
    encoder: SentenceEncoder
    base: BaseAlgorithm
    modules: nn.ModuleDict
    optimizer: torch.optim.Optimizer
    sampler: StepSampler
    step_encoder: StepEncoder
    loss: StepLoss
    schedule: Schedule
    embedder: TextEmbedder
    checkpoints: Checkpoints
    track: Tracker
    processes: Processes
    average: WeightAverage | None = None
    tuner: Bandit | None = None
    held_out_loss: HeldOutLoss | None = None
    state: TrainingState = field(default_factory=TrainingState)
    pruning_arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    interrupted: bool = False
    step_texts: int = 0
    step_tokens: int = 0
    _last_save: float = field(default_factory=time.monotonic)
    _gradient_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.tuner is not None:
            self.loss.weights.update(self.tuner.weights)

    # The loop

    def train(self, phase: str, until: int) -> None:
        """Train to the end of epoch `until`, or until the schedule ends training, from the current state.

        Raises:
            Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
            RamenError: the loss is not finite, or memory is exhausted.
        """
        state = self.state
        self.schedule.is_warmup = phase == "warmup"
        done = round(state.global_step * self._documents_per_step)
        progress = Progress(phase, self._total_documents, "documents", done)
        while state.epoch < until and not state.ended:
            self._train_epoch(progress)
            # an interruption from here to the end of the epoch repeats the evaluation, not the steps
            self._record_epoch(phase, until, progress)
            state.epoch, state.step, state.sums = state.epoch + 1, 0, {}
            self.schedule.end_if_settled(state)
        progress.close()

    def _train_epoch(self, progress: Progress) -> None:
        """Train the rest of the current epoch."""
        state, epoch = self.state, self.state.epoch
        if state.step == 0 and self.base.refresh_due(epoch):
            self.base.refresh(epoch, self.embed_role)
        order = self.sampler.epoch_order(epoch)
        for index in range(state.step, self.sampler.steps_per_epoch):
            if index and self._out_of_time():
                break
            step = self.sampler.step(order, epoch, index)
            with self._explain_out_of_memory(step):
                terms = self.train_step(step)
            progress.total = self._total_documents
            progress.advance(len(step.documents), f"epoch {epoch + 1} {self._progress_facts(terms['loss'])}")
            self._count_step(terms, len(step.documents), progress.rate)
            self.stop_if_interrupted()
            if self.checkpoint_is_due():
                self.save()
        self._out_of_time()

    def train_step(self, step: Step) -> dict[str, float]:
        """One optimiser step. Returns every term's value, unweighted, and the weighted "loss"."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self.rate
        self.encoder.train()

        roles = {"documents": step.documents, "labels": step.labels}
        roles |= {f"anchors/{name}": anchors.pool for name, anchors in step.anchors.items()}
        texts = {role: self.inputs.texts.roles[role][items] for role, items in roles.items()}
        distinct, inverse = np.unique(np.concatenate(list(texts.values())), return_inverse=True)
        self.step_texts, self.step_tokens = len(distinct), int(self.inputs.texts.store.lengths_of(distinct).sum())
        encoded = self.step_encoder.forward(distinct, self._dropout_seed())
        ends = np.cumsum([len(items) for items in texts.values()])[:-1]
        vectors = {
            role: encoded.index_select(0, torch.from_numpy(rows).to(encoded.device, non_blocking=True))
            for role, rows in zip(texts, np.split(inverse, ends), strict=True)
        }

        terms, accuracy = self.loss.terms(step, vectors)
        loss = self.loss.weighted_sum(terms)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.step_encoder.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)

        names = ("loss", *terms, ACCURACY, "norm")
        numbers = torch.stack([loss, *terms.values(), accuracy, norm]).detach().tolist()  # one transfer from the GPU
        values = dict(zip(names, numbers, strict=True))
        self._gradient_norm = values.pop("norm")
        self._check_finite(step, values["loss"])
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.state.global_step + 1)
        self._tune_weights(values)
        return values

    def _tune_weights(self, values: Mapping[str, float]) -> None:
        """Give the bandit its feedback on a step; use its new weights when a window ends."""
        if self.tuner is None:
            return
        settings: BanditConfig = self.tuner.settings
        if settings.feedback == "heldout_loss":  # one evaluation at the end of a window stands for the whole window
            window_ends = self.tuner.count + 1 == settings.period
            assert self.held_out_loss is not None
            feedback = self.held_out_loss() * settings.period if window_ends else 0.0
        elif settings.feedback == "accuracy":
            feedback = 1.0 - values[ACCURACY]
        else:
            feedback = values["loss" if settings.feedback == "weighted_objective" else TASK]
        # in the printed form the bandit's own step size never shrinks
        if self.tuner.observe(feedback, 1.0 if settings.form == "printed" else self.rate):
            self.loss.weights.update(self.tuner.weights)
        self.state.bandit = self.tuner.state()

    @property
    def rate(self) -> float:
        """Learning rate of the next step, as a share of the peak."""
        return self.schedule.rate(self.state.global_step)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def use_graphs(self, graphs: Graphs) -> None:
        """Draw anchors from (pruned) `graphs`; the unpruned graphs still tell which anchors are no negatives."""
        inputs = self.inputs
        self.sampler.use_graphs(graphs, inputs.graphs, inputs.active, inputs.texts.roles, inputs.false_negatives)

    # Held-out documents

    def _record_epoch(self, phase: str, until: int, progress: Progress) -> None:
        """Evaluate on held-out documents if it is due, and add a record to the history."""
        state, epoch = self.state, self.state.epoch + 1
        is_due = epoch == until or self.schedule.is_evaluated(epoch) or state.ended
        quality = self.validate() if is_due else None
        means = self._epoch_means()
        record = {
            "epoch": epoch,
            "step": state.global_step,
            "phase": phase,
            "round": state.round,
            "loss": means["loss"],
            "task_loss": means[TASK],
            "accuracy": means[ACCURACY],
            "terms": {name: value for name, value in means.items() if name not in ("loss", TASK, ACCURACY)},
            "val_p_at_1": None if quality is None else quality.p_at_1,
            "val_gain": None if quality is None else quality.gain,
            "lambda": {**self.loss.weights, **(self.tuner.means if self.tuner else {})},
            "edges_kept": state.rounds[-1]["edges_kept"] if state.rounds else {},
        }
        if self.settings.max_minutes:
            record["seconds"] = self.schedule.clock.elapsed
        state.history.append(record)
        shown = ""
        if quality is not None:
            curve = {"heldout/p_at_1": quality.p_at_1, "heldout/gain": quality.gain}
            self.track.curve(curve, step=state.global_step)
            shown = f" held-out P@1 {quality.p_at_1:.2f} gain {quality.gain:.2f}"
        progress.close()
        report(f"{phase} epoch {epoch} loss {record['loss']:.4f}{shown}")

    def validate(self) -> Quality | None:
        """Quality on (a sample of) the held-out documents, with averaged weights if there are any; None without any."""
        held_out = self.inputs.held_out.evenly_spaced(EVALUATED)
        if not len(held_out):
            return None
        with self.average.in_place() if self.average is not None else nullcontext():
            documents = self.embed(self.inputs.texts.roles["documents"][held_out.rows])
            labels = self.embed_role("labels")
        return held_out.quality(documents, labels)

    def embed_role(self, role: Literal["documents", "labels"]) -> Vectors:
        """Vectors of all training documents, or the vectors by which all labels are ranked: float32 [N or L, D]."""
        vectors = self.embed(self.inputs.texts.roles[role])
        if role == "labels":
            for start in range(0, len(vectors), LABEL_BLOCK):
                block = np.arange(start, min(start + LABEL_BLOCK, len(vectors)))
                with torch.no_grad():
                    encoded = torch.from_numpy(vectors[block]).to(self.encoder.device)
                    vectors[block] = self.base.label_vectors(encoded, block).cpu().numpy()
        return vectors

    def embed(self, texts: NDArray[np.int64]) -> Vectors:
        """Vectors of stored texts, float32 [n, D], the same in every process.

        Raises:
            Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
        """
        return self.embedder.embed(texts, self.stop_if_interrupted)

    # Checkpoints and interruption

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End with a checkpoint after the current step on SIGTERM (a pre-empted node) and Ctrl-C."""

        def request() -> None:
            self.interrupted = True

        with on_interrupt(request):
            yield

    def interrupt_requested(self) -> bool:
        """Whether SIGTERM or Ctrl-C reached any process; all processes must call it together."""
        return self.processes.any(self.interrupted)

    def stop_if_interrupted(self) -> None:
        """Save a checkpoint and stop if an interruption was requested in any process.

        Raises:
            Interrupted: it was.
        """
        if self.interrupt_requested():
            self.save()
            raise Interrupted("interrupted; a checkpoint was written: run the same command again to resume")

    def checkpoint_is_due(self) -> bool:
        """Whether `training.checkpoint_minutes` have passed since this last was true."""
        if time.monotonic() - self._last_save < 60 * self.settings.checkpoint_minutes:
            return False
        self._last_save = time.monotonic()
        return True

    def save(self) -> None:
        """Write a checkpoint (rank 0 only)."""
        if self.processes.rank > 0:
            return
        base_arrays = {BASE_PREFIX + key: array for key, array in self.base.state().items()}
        self.state.seconds = self.schedule.clock.elapsed if self.settings.max_minutes else 0.0
        with self.average.put_back() if self.average is not None else nullcontext():
            self.checkpoints.save(self.modules, self.optimizer, self.state, {**self.pruning_arrays, **base_arrays})

    def resume(self) -> None:
        """Restore the newest checkpoint of an interrupted attempt, if there is one."""
        found = self.checkpoints.load(self.modules, self.optimizer)
        if found is not None:
            self.state, arrays = found
            self.schedule.clock.before = self.state.seconds
            self.restore_tuner()
            base_keys = [key for key in arrays if key.startswith(BASE_PREFIX)]
            self.base.restore({key.removeprefix(BASE_PREFIX): arrays.pop(key) for key in base_keys})
            self.pruning_arrays = arrays
            place = f"epoch {self.state.epoch + 1}, step {self.state.step}"
            report(f"resumed at {place}")
        self.processes.wait()  # all processes have read before rank 0 writes the next checkpoint

    def restore_tuner(self) -> None:
        """Restore the bandit's state and weights from `state`."""
        if self.tuner is not None and self.state.bandit:
            self.tuner.restore(self.state.bandit)
            self.loss.weights.update(self.tuner.weights)

    def finish(self) -> None:
        """Save, and use the average of the weights, if there is one, for everything after training."""
        self.save()
        if self.average is not None:
            self.average.swap()

    # Counting, logging, errors

    def last_metrics(self) -> dict[str, float]:
        """Loss and held-out quality of the last epoch, and the best held-out P@1."""
        record = self.state.history[-1]
        metrics = {"epoch/loss": record["loss"], "epoch/task_loss": record["task_loss"]}
        metrics |= {f"epoch/{name}": value for name, value in record["terms"].items()}
        metrics |= {key: record[key] for key in ("val_p_at_1", "val_gain") if record[key] is not None}
        scores = [record["val_p_at_1"] for record in self.state.history if record["val_p_at_1"] is not None]
        return metrics | ({"best/val_p_at_1": max(scores)} if scores else {})

    def _dropout_seed(self) -> int:
        return int(keyed_rng(self.settings.seed, "dropout", self.state.global_step).integers(2**62))

    def _count_step(self, terms: Mapping[str, float], documents: int, rate: float) -> None:
        state = self.state
        state.step += 1
        state.global_step += 1
        for name, value in terms.items():
            state.sums[name] = state.sums.get(name, 0.0) + value * documents
        state.sums["documents"] = state.sums.get("documents", 0.0) + documents
        if state.global_step % LOG_EVERY == 0 or state.step == self.sampler.steps_per_epoch:
            values = {f"train/{name}": value for name, value in terms.items()}
            values |= {f"lambda/{name}": self.loss.weights[name] for name in terms if name in self.loss.weights}
            values |= {"train/documents_per_second": rate, "train/memory_gib": memory_gib(self.encoder.device)}
            values |= {"train/learning_rate": self.optimizer.param_groups[0]["lr"]}
            values |= {"train/gradient_norm": self._gradient_norm}
            self.track.curve(values, step=state.global_step)

    def _epoch_means(self) -> dict[str, float]:
        sums = dict(self.state.sums)
        documents = sums.pop("documents", 0.0)
        return {name: value / max(documents, 1.0) for name, value in sums.items()}

    @property
    def _documents_per_step(self) -> float:
        """Mean number of documents of a step."""
        steps = self.sampler.steps_per_epoch
        return self.base.documents_per_row * min(self.base.rows, steps * self.sampler.batch_size) / max(steps, 1)

    @property
    def _total_documents(self) -> int | None:
        """Documents of warm-up and retraining together; None if the schedule does not know."""
        steps = self.schedule.total_steps()
        return None if steps is None else round(steps * self._documents_per_step)

    def _progress_facts(self, loss: float) -> str:
        """Loss, the range of the graphs' weights and memory, for the progress line."""
        others = (TASK, *TERMS)
        graphs = sorted({weight for name, weight in self.loss.weights.items() if name not in others and weight > 0})
        ends = [f"{weight:.3g}" for weight in (*graphs[:1], *graphs[1:][-1:])]
        lambdas = f" lambda {'..'.join(ends)}" if ends else ""
        return f"loss {loss:.4f}{lambdas} memory {memory_gib(self.encoder.device):.1f} GiB"

    def _out_of_time(self) -> bool:
        return self.schedule.end_if_out_of_time(self.state, self._closing_seconds)

    def _closing_seconds(self) -> float:
        """Estimated duration of the last validation and of encoding every text for the label context."""
        return CLOSING_MARGIN * self.embedder.estimate_seconds(self._closing_tokens)

    @cached_property
    def _closing_tokens(self) -> int:
        store, roles = self.inputs.texts.store, self.inputs.texts.roles
        ranked = np.concatenate([roles["labels"], roles["documents"][self.inputs.held_out.rows]])
        return len(store.ids) + int(store.lengths_of(ranked).sum())

    @contextmanager
    def _explain_out_of_memory(self, step: Step) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # torch raises OutOfMemoryError, on a CPU a plain RuntimeError
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not is_memory:
                raise
            raise RamenError(
                f"out of memory at step {self.state.global_step} ({len(step.documents)} documents, {self.step_texts} "
                f"texts, {self.step_tokens} tokens); the last checkpoint is intact; set training.gradient_caching="
                "true, or lower encoder.tokens_per_chunk or training.batch_size"
            ) from None

    def _check_finite(self, step: Step, loss: float) -> None:
        if math.isfinite(loss) and math.isfinite(self._gradient_norm):
            return
        uids = ", ".join(self.inputs.dataset.train.uids[row] for row in step.documents[:8].tolist())
        weights = ", ".join(f"{name}={weight:g}" for name, weight in self.loss.weights.items())
        what = "the gradient is not finite" if math.isfinite(loss) else f"loss is {loss}"
        raise RamenError(
            f"{what} at step {self.state.global_step} (documents {uids}...; λ: {weights}); lower training.lr, or set "
            "encoder.precision=fp32"
        )


def memory_gib(device: torch.device) -> float:
    """Resident memory of this process; on a GPU, the peak memory of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30  # type: ignore[no-any-return]
