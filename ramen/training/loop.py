"""The training loop: steps, epochs, validation. Composes encoder, objective and base; no paths, no tracking store.

Letters: B documents of a step, L distinct labels of a step, A anchors of a set, D width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramen.base import BaseAlgorithm
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.errors import Interrupted, RamenError
from ramen.objective.regulariser import Links, regulariser, total
from ramen.objective.triplet import Triplet
from ramen.tracking import Tracker
from ramen.training.batches import SideLinks, Step, StepSampler, keyed_rng
from ramen.training.checkpoint import Position
from ramen.training.encoding import StepEncoder
from ramen.training.progress import Progress

LOG_EVERY = 10
"""Steps between two points of the tracked curves."""

TASK = "task"


@dataclass
class Trainer:
    """All that a step needs, and how far training has come.

    Attributes:
        encoder: trained in place.
        optimizer: over the encoder's parameters.
        texts: token table with roles "documents", "labels" and "anchors/<set>".
        sampler: builds the steps.
        base: the task loss.
        triplet: the regularisers' loss.
        weights: λ by term name: "task", "<set>.document", "<set>.label".
        learning_rate: global step -> learning rate.
        clip_norm: gradients are clipped to this norm; 0 = off.
        seed: keys the dropout of each step.
        track: receives step metrics.
        step_encoder: texts to vectors and the gradient back.
        position: counters and history.
        stop: asked after each step; true = save and stop.
        save: writes a checkpoint.
        save_every: seconds between checkpoints.
        last_texts, last_tokens: distinct texts of the last step, and their tokens.
    """

    encoder: SentenceEncoder
    optimizer: torch.optim.Optimizer
    texts: TextTable
    sampler: StepSampler
    base: BaseAlgorithm
    triplet: Triplet
    weights: dict[str, float]
    learning_rate: Callable[[int], float]
    clip_norm: float
    seed: int
    track: Tracker
    step_encoder: StepEncoder
    position: Position = field(default_factory=Position)
    stop: Callable[[], bool] = lambda: False
    save: Callable[[], None] = lambda: None
    save_every: float = 600.0
    last_texts: int = 0
    last_tokens: int = 0
    _saved: float = field(default_factory=time.monotonic)

    def run_epochs(self, until: int, progress: Progress, on_epoch: Callable[[dict[str, float]], None]) -> None:
        """Train to the end of epoch `until` (exclusive count), from wherever `position` stands.

        `on_epoch` gets the mean of each term over the epoch just finished.

        Raises:
            Interrupted: `stop` said so; a checkpoint was saved.
            RamenError: the loss is not finite.
        """
        while self.position.epoch < until:
            epoch = self.position.epoch
            order = self.sampler.epoch_order(epoch)
            for index in range(self.position.step, self.sampler.steps_per_epoch):
                step = self.sampler.step(order, epoch, index)
                terms = self.train_step(step)
                self._count(terms, len(step.documents))
                progress.advance(len(step.documents), f"epoch {epoch + 1}/{until} loss {terms['loss']:.4f}")
                self._maybe_save()
            means = self._end_epoch()
            on_epoch(means)

    def train_step(self, step: Step) -> dict[str, float]:
        """One optimiser step. Returns every term's value, unweighted, and the weighted "loss"."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.position.global_step)
        self.encoder.train()
        roles = {"documents": step.documents, "labels": step.labels}
        roles |= {f"anchors/{name}": batch.pool for name, batch in step.anchors.items()}
        numbers = {role: self.texts.roles[role][items] for role, items in roles.items()}
        distinct, inverse = np.unique(np.concatenate(list(numbers.values())), return_inverse=True)
        self.last_texts = len(distinct)
        self.last_tokens = int(self.texts.store.lengths_of(distinct).sum())
        vectors = self.step_encoder.forward(distinct, self._dropout_seed())
        cuts = np.cumsum([len(items) for items in numbers.values()])[:-1]
        terms = self.losses(step, vectors, dict(zip(numbers, np.split(inverse, cuts), strict=True)))
        loss = total(terms, self.weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.step_encoder.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), self.clip_norm or math.inf)
        values = dict(
            zip(("loss", *terms, "norm"), torch.stack([loss, *terms.values(), norm]).detach().tolist(), strict=True)
        )
        if not math.isfinite(values["loss"]) or not math.isfinite(values.pop("norm")):
            self._not_finite(step, values["loss"])
        self.optimizer.step()
        return values

    def losses(self, step: Step, vectors: Tensor, where: Mapping[str, NDArray[np.int64]]) -> dict[str, Tensor]:
        """Task loss and regularisers of a step.

        Args:
            step: who is in it.
            vectors: float32 [n, D], the step's distinct texts.
            where: role -> row of each of its items in `vectors`.
        """
        vectors_of = {role: vectors.index_select(0, _tensor(rows, vectors.device)) for role, rows in where.items()}
        x_BD, z_LD = vectors_of["documents"], vectors_of["labels"]
        positive_B, mask_BL = _tensor(step.positive, x_BD.device), _tensor(step.mask, x_BD.device)
        terms = {TASK: self.base.loss(x_BD @ z_LD.T, positive_B, mask_BL)}
        for name, batch in step.anchors.items():
            a_AD = vectors_of[f"anchors/{name}"]
            for side, rows, links in (("document", x_BD, batch.document), ("label", z_LD, batch.label)):
                if links is not None:
                    terms[f"{name}.{side}"] = regulariser(rows, a_AD, _links(links, rows.device), self.triplet)
        return terms

    def _dropout_seed(self) -> int:
        return int(keyed_rng(self.seed, "dropout", self.position.global_step).integers(2**62))

    def _count(self, terms: Mapping[str, float], documents: int) -> None:
        position = self.position
        position.step += 1
        position.global_step += 1
        for name, value in terms.items():
            position.sums[name] = position.sums.get(name, 0.0) + value * documents
        position.sums["documents"] = position.sums.get("documents", 0.0) + documents
        if position.global_step % LOG_EVERY == 0:
            values = {f"train/{name}": value for name, value in terms.items()}
            values |= {f"lambda/{name}": self.weights[name] for name in terms if name in self.weights}
            self.track.log(values, step=position.global_step)

    def _end_epoch(self) -> dict[str, float]:
        position = self.position
        documents = position.sums.pop("documents", 0.0)
        means = {name: value / max(documents, 1.0) for name, value in position.sums.items()}
        position.epoch, position.step, position.sums = position.epoch + 1, 0, {}
        return means

    def _maybe_save(self) -> None:
        stop = self.stop()
        if stop or time.monotonic() - self._saved >= self.save_every:
            self.save()
            self._saved = time.monotonic()
        if stop:
            raise Interrupted("stopped on request; a checkpoint was written: run the same command again to go on")

    def _not_finite(self, step: Step, value: float) -> None:
        rows = ", ".join(map(str, step.documents[:8].tolist()))
        weights = ", ".join(f"{name}={weight:g}" for name, weight in self.weights.items())
        raise RamenError(
            f"loss is {value} at step {self.position.global_step} (document rows {rows}...; λ: {weights}); "
            "lower training.lr, or set encoder.precision=fp32"
        )


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _links(links: SideLinks, device: torch.device) -> Links:
    return Links(_tensor(links.rows, device), _tensor(links.positive, device), _tensor(links.mask, device))


def linear_schedule(peak: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Linear rise over `warmup_steps`, then linear decay to 0 at `total_steps`."""
    warmup_steps = min(warmup_steps, max(total_steps // 2, 1))

    def at(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        return peak * max(0.0, (total_steps - step) / max(total_steps - warmup_steps, 1))

    return at


def make_optimizer(encoder: SentenceEncoder, lr: float, eps: float, weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW without decay on biases and layer norms (one-dimensional parameters)."""
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=eps, fused=True)


@dataclass(frozen=True)
class Validation:
    """Held-out training documents.

    Attributes:
        documents: int64 [v] rows of the training matrix, none of which is trained on.
        positives, ignored: pairs (row * L + label), sorted int64.
        num_labels: L.
    """

    documents: NDArray[np.int64]
    positives: NDArray[np.int64]
    ignored: NDArray[np.int64]
    num_labels: int

    def p_at_1(self, documents: NDArray[np.float32], labels: NDArray[np.float32], chunk: int = 1024) -> float:
        """Percentage of held-out documents whose best label is true (filtered labels do not compete).

        Args:
            documents: float32 [v, D]; labels: float32 [L, D].
        """
        hits = 0
        for start in range(0, len(self.documents), chunk):
            scores = documents[start : start + chunk] @ labels.T
            rows = self.documents[start : start + chunk]
            low, high = np.searchsorted(
                self.ignored, [rows.min() * self.num_labels, (rows.max() + 1) * self.num_labels]
            )
            ignored = self.ignored[low:high]
            place = {int(row): i for i, row in enumerate(rows)}
            for pair in ignored:
                row = place.get(int(pair // self.num_labels))
                if row is not None:
                    scores[row, pair % self.num_labels] = -np.inf
            best = rows * self.num_labels + scores.argmax(1)
            hits += int(np.isin(best, self.positives).sum())
        return 100.0 * hits / max(len(self.documents), 1)
