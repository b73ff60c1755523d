"""The training loop: steps, epochs, validation. Composes encoder, objective and base; no paths, no tracking store.

Letters: B documents of a step, L distinct labels of a step, A anchors of a set, D width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.base.protocol import BaseAlgorithm, Embed
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.errors import Interrupted, RamenError
from ramen.objective.bandit import Bandit
from ramen.objective.guidance import TERMS, Guidance
from ramen.objective.regulariser import Links, regulariser, total
from ramen.objective.triplet import Triplet
from ramen.sampling import keyed_rng
from ramen.tracking import Tracker
from ramen.training.checkpoint import TrainingState
from ramen.training.gradient_cache import StepEncoder
from ramen.training.progress import Progress
from ramen.training.schedule import Plan
from ramen.training.step_sampler import SideLinks, Step, StepSampler
from ramen.training.weight_average import WeightAverage

ADAM_EPS = 1e-6
"""Epsilon of AdamW, as in NGAME's code."""
CLIP_NORM = 1.0
"""Gradients are clipped to this norm."""
LOG_EVERY = 10
"""Steps between two points of the tracked curves."""

JUDGES = 10_000
"""Held-out documents whose P@1 is looked at, at most: to half a point."""
SCORES = 1 << 25
"""Scores that validation holds at a time (128 MB)."""
FEW = 100
"""Labels of a document up to which all scores are compared with each of theirs, one by one, rather than sorted in."""

TASK = "task"
ACCURACY = "accuracy"
"""In-batch accuracy: share of a step's documents whose sampled positive outscores every negative."""


@dataclass
class Trainer:
    """All that a step needs, and how far training has come.

    Attributes:
        encoder: trained in place.
        optimizer: over the parameters of the encoder and of the base algorithm.
        texts: token table with roles "documents", "labels" and "anchors/<set>".
        sampler: builds the steps.
        base: the task loss.
        triplet: the regularisers' loss.
        symmetric: regularise in both directions.
        weights: λ by term name: "task", "<set>.document", "<set>.label", and those of an oracle (`guidance.TERMS`).
        lr: peak learning rate.
        plan: learning rate and end of training.
        seed: keys the dropout of each step.
        track: receives step metrics.
        step_encoder: texts to vectors and the gradient back.
        uids: of the documents, to name them in errors.
        embed: shows the base algorithm the current vectors when it clusters or mines.
        average: of the weights, None if they are used as they are.
        guidance: what an oracle adds to the loss; None without one.
        tuner: moves the regularisers' weights, or None.
        heldout: loss on held-out documents, for a tuner that is judged by it.
        position: counters and history.
        stop: asked after each step; true = save and stop.
        save: writes a checkpoint.
        save_every: seconds between checkpoints.
        last_texts, last_tokens: distinct texts of the last step, and their tokens.
        gradient_norm: of the last step, before clipping.
    """

    encoder: SentenceEncoder
    optimizer: torch.optim.Optimizer
    texts: TextTable
    sampler: StepSampler
    base: BaseAlgorithm
    triplet: Triplet
    symmetric: bool
    weights: dict[str, float]
    lr: float
    plan: Plan
    seed: int
    track: Tracker
    step_encoder: StepEncoder
    uids: Sequence[str]
    embed: Embed
    average: WeightAverage | None = None
    guidance: Guidance | None = None
    tuner: Bandit | None = None
    heldout: Callable[[], float] = lambda: 0.0
    position: TrainingState = field(default_factory=TrainingState)
    stop: Callable[[], bool] = lambda: False
    save: Callable[[], None] = lambda: None
    save_every: float = 600.0
    last_texts: int = 0
    last_tokens: int = 0
    gradient_norm: float = 0.0
    _saved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.tuner is not None:
            self.weights.update(self.tuner.weights)

    def run_epochs(self, until: int, progress: Progress, on_epoch: Callable[[dict[str, float]], None]) -> None:
        """Train to the end of epoch `until` (exclusive count), or of the plan, from wherever `position` stands.

        `on_epoch` gets the mean of each term over the epoch just trained, before `position` moves to the next.

        Raises:
            Interrupted: `stop` said so; a checkpoint was saved.
            RamenError: the loss is not finite.
        """
        while self.position.epoch < until and not self.position.ended:
            epoch = self.position.epoch
            if self.position.step == 0:
                self.refresh(epoch)
            order = self.sampler.epoch_order(epoch)
            for index in range(self.position.step, self.sampler.steps_per_epoch):
                if index and self.plan.cut(self.position):
                    break
                step = self.sampler.step(order, epoch, index)
                with self._memory_explained(step):
                    terms = self.train_step(step)
                progress.total = self.total_documents
                progress.advance(len(step.documents), f"epoch {epoch + 1} {self._facts(terms['loss'])}")
                self._count(terms, len(step.documents), progress.rate)
                self._maybe_save()
            self.plan.cut(self.position)
            # the epoch ends only when all that follows it is done: stopped in the middle, it is done again
            on_epoch(self._means())
            position = self.position
            position.epoch, position.step, position.sums = epoch + 1, 0, {}
            self.plan.review(position)

    def refresh(self, epoch: int) -> None:
        """Let the base algorithm look at the encoder, if its time has come."""
        if self.base.refresh_due(epoch):
            self.base.refresh(epoch, self.embed)

    @property
    def rate(self) -> float:
        """The learning rate of the next step, as a share of the peak."""
        return self.plan.rate(self.position.global_step)

    @property
    def documents_per_step(self) -> float:
        """Documents of a step, on average."""
        base, steps = self.sampler.base, self.sampler.steps_per_epoch
        return base.documents_per_row * min(base.rows, steps * self.sampler.batch_size) / max(steps, 1)

    @property
    def total_documents(self) -> int | None:
        """Documents of warm-up and retraining together, as far as the plan knows."""
        steps = self.plan.total_steps()
        return None if steps is None else round(steps * self.documents_per_step)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def stop_if_asked(self) -> None:
        """Save and stop if someone asked to; for long work between steps.

        Raises:
            Interrupted: `stop` said so; a checkpoint was saved.
        """
        if self.stop():
            self.save()
            raise Interrupted("stopped on request; a checkpoint was written: run the same command again to go on")

    def train_step(self, step: Step) -> dict[str, float]:
        """One optimiser step. Returns every term's value, unweighted, and the weighted "loss"."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.rate
        self.encoder.train()
        roles = {"documents": step.documents, "labels": step.labels}
        roles |= {f"anchors/{name}": batch.pool for name, batch in step.anchors.items()}
        numbers = {role: self.texts.roles[role][items] for role, items in roles.items()}
        distinct, inverse = np.unique(np.concatenate(list(numbers.values())), return_inverse=True)
        self.last_texts = len(distinct)
        self.last_tokens = int(self.texts.store.lengths_of(distinct).sum())
        vectors = self.step_encoder.forward(distinct, self._dropout_seed())
        cuts = np.cumsum([len(items) for items in numbers.values()])[:-1]
        terms, accuracy = self.losses(step, vectors, dict(zip(numbers, np.split(inverse, cuts), strict=True)))
        loss = total(terms, self.weights)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.step_encoder.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        values = dict(
            zip(
                ("loss", *terms, ACCURACY, "norm"),
                torch.stack([loss, *terms.values(), accuracy, norm]).detach().tolist(),
                strict=True,
            )
        )
        self.gradient_norm = values.pop("norm")
        if not math.isfinite(values["loss"]) or not math.isfinite(self.gradient_norm):
            self._not_finite(step, values["loss"])
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.position.global_step + 1)
        self._tune(values)
        return values

    def _tune(self, values: Mapping[str, float]) -> None:
        """Tell the bandit how the step went; take up its new weights when a window ends."""
        if self.tuner is None:
            return
        feedback = self.tuner.settings.feedback
        last = self.tuner.count + 1 == self.tuner.settings.period
        if feedback == "heldout_loss":  # one look at the window's end stands for all of it
            told = self.heldout() * self.tuner.settings.period if last else 0.0
        elif feedback == "accuracy":
            told = 1.0 - values[ACCURACY]
        else:
            told = values["loss" if feedback == "weighted_objective" else TASK]
        literal = self.tuner.settings.form == "printed"  # as printed, the weights' steps never shrink
        if self.tuner.observe(told, 1.0 if literal else self.rate):
            self.weights.update(self.tuner.weights)
        self.position.bandit = self.tuner.state()

    def restore_tuner(self) -> None:
        """Take up the bandit's state and weights from `position`."""
        if self.tuner is not None and self.position.bandit:
            self.tuner.restore(self.position.bandit)
            self.weights.update(self.tuner.weights)

    def losses(
        self, step: Step, vectors: Tensor, where: Mapping[str, NDArray[np.int64]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Task loss and regularisers of a step, and its accuracy: the share of documents whose positive scores best.

        Args:
            step: who is in it.
            vectors: float32 [n, D], the step's distinct texts.
            where: role -> row of each of its items in `vectors`.
        """
        vectors_of = {role: vectors.index_select(0, _tensor(rows, vectors.device)) for role, rows in where.items()}
        x_BD, z_LD = vectors_of["documents"], vectors_of["labels"]
        positive_B, mask_BL = _tensor(step.positive, x_BD.device), _tensor(step.mask, x_BD.device)
        ranked_LD = self.base.label_vectors(z_LD, step.labels)
        scores_BL = x_BD @ ranked_LD.T
        terms = {TASK: self.base.loss(scores_BL, positive_B, mask_BL)}
        with torch.no_grad():
            best_B = scores_BL.masked_fill(mask_BL, -2.0).amax(1)
            accuracy = (scores_BL.gather(1, positive_B[:, None])[:, 0] > best_B).float().mean()
        if self.guidance is not None:
            terms |= self.guidance(step.documents, step.labels, x_BD, ranked_LD, positive_B, mask_BL)
        for name, batch in step.anchors.items():
            a_AD = vectors_of[f"anchors/{name}"]
            for side, rows, links in (("document", x_BD, batch.document), ("label", z_LD, batch.label)):
                if links is not None:
                    here = _links(links, rows.device)
                    terms[f"{name}.{side}"] = regulariser(rows, a_AD, here, self.triplet, self.symmetric)
        return terms, accuracy

    def _dropout_seed(self) -> int:
        return int(keyed_rng(self.seed, "dropout", self.position.global_step).integers(2**62))

    def _count(self, terms: Mapping[str, float], documents: int, rate: float) -> None:
        position = self.position
        position.step += 1
        position.global_step += 1
        for name, value in terms.items():
            position.sums[name] = position.sums.get(name, 0.0) + value * documents
        position.sums["documents"] = position.sums.get("documents", 0.0) + documents
        if position.global_step % LOG_EVERY == 0 or position.step == self.sampler.steps_per_epoch:
            values = {f"train/{name}": value for name, value in terms.items()}
            values |= {f"lambda/{name}": self.weights[name] for name in terms if name in self.weights}
            values |= {"train/documents_per_second": rate, "train/memory_gib": memory_gib(self.encoder.device)}
            values |= {"train/learning_rate": self.optimizer.param_groups[0]["lr"]}
            values |= {"train/gradient_norm": self.gradient_norm}
            self.track.curve(values, step=position.global_step)

    def _means(self) -> dict[str, float]:
        sums = dict(self.position.sums)
        documents = sums.pop("documents", 0.0)
        return {name: value / max(documents, 1.0) for name, value in sums.items()}

    def _facts(self, loss: float) -> str:
        """What a progress line says about a step: loss, the graphs' λ, memory."""
        others = (TASK, *TERMS)
        graphs = sorted({weight for name, weight in self.weights.items() if name not in others and weight > 0})
        ends = [f"{weight:.3g}" for weight in (*graphs[:1], *graphs[1:][-1:])]
        spread = f" lambda {'..'.join(ends)}" if ends else ""
        return f"loss {loss:.4f}{spread} memory {memory_gib(self.encoder.device):.1f} GiB"

    def _maybe_save(self) -> None:
        self.stop_if_asked()
        if self.due():
            self.save()

    def due(self) -> bool:
        """Whether a checkpoint's time has come; the clock starts anew."""
        if time.monotonic() - self._saved < self.save_every:
            return False
        self._saved = time.monotonic()
        return True

    @contextmanager
    def _memory_explained(self, step: Step) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:  # of torch: OutOfMemoryError, or a plain RuntimeError on a CPU
            mine = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not mine:
                raise
            raise RamenError(
                f"out of memory at step {self.position.global_step} ({len(step.documents)} documents, "
                f"{self.last_texts} texts, {self.last_tokens} tokens): set training.gradient_caching=true, or lower "
                "encoder.tokens_per_chunk or training.batch_size; the last checkpoint is intact"
            ) from None

    def _not_finite(self, step: Step, value: float) -> None:
        named = [self.uids[row] for row in step.documents[:8].tolist()]
        weights = ", ".join(f"{name}={weight:g}" for name, weight in self.weights.items())
        what = f"loss is {value}" if not math.isfinite(value) else "the gradient is not finite"
        raise RamenError(
            f"{what} at step {self.position.global_step} (documents {', '.join(named)}...; λ: {weights}); "
            "lower training.lr, or set encoder.precision=fp32"
        )


def memory_gib(device: torch.device) -> float:
    """Resident memory of this process; on a GPU the most that its tensors took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30  # type: ignore[no-any-return]


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _links(links: SideLinks, device: torch.device) -> Links:
    arrays = (links.rows, links.positive, links.mask, links.drawn, links.row)
    return Links(*(_tensor(array, device) for array in arrays))


def make_optimizer(
    encoder: SentenceEncoder, own: nn.Module | None, lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW without decay on biases and layer norms (one-dimensional parameters).

    `own` holds the base algorithm's parameters (label offsets), which are never decayed.
    """
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    further = list(own.parameters()) if own is not None else []
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1] + further, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=ADAM_EPS, fused=True)


@dataclass(frozen=True)
class Validation:
    """Held-out training documents.

    Attributes:
        documents: int64 [v] rows of the training matrix, none of which is trained on.
        positives, ignored: pairs (row * L + label), sorted int64.
        num_labels: L.
        unseen: int64, labels that do not compete: training must not see them (zero-shot), no document here has one.
    """

    documents: NDArray[np.int64]
    positives: NDArray[np.int64]
    ignored: NDArray[np.int64]
    num_labels: int
    unseen: NDArray[np.int64]

    def sampled(self) -> Validation:
        """`JUDGES` of the documents at most, the same each time: all take too long with a million labels."""
        if len(self.documents) <= JUDGES:
            return self
        chosen = np.linspace(0, len(self.documents) - 1, JUDGES).astype(np.int64)
        return replace(self, documents=self.documents[chosen])

    def quality(self, documents: NDArray[np.float32], labels: NDArray[np.float32]) -> Quality:
        """How well held-out documents find their labels; filtered and unseen labels do not compete.

        Args:
            documents: float32 [v, D]; labels: float32 [L, D].
        """
        gains: list[float] = []
        hits = 0
        chunk = max(1, SCORES // max(len(labels), 1))
        for start in range(0, len(self.documents), chunk):
            scores = documents[start : start + chunk] @ labels.T
            rows = self.documents[start : start + chunk]
            scores[:, self.unseen] = -np.inf
            ignored, true = self._of(self.ignored, rows), self._of(self.positives, rows)
            for row, scored in enumerate(scores):
                scored[ignored[row]] = -np.inf
                hits += int(scored.argmax() in true[row])
                if len(true[row]):
                    theirs = scored[true[row]]
                    scored[true[row]] = -np.inf
                    gains.append(float((1.0 / np.log2(2.0 + count_above(scored, theirs))).mean()))
        return Quality(100.0 * hits / max(len(self.documents), 1), 100.0 * float(np.mean(gains)) if gains else 0.0)

    def _of(self, pairs: NDArray[np.int64], rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Labels of each row among ascending pairs."""
        low, high = (np.searchsorted(pairs, (rows + end) * self.num_labels) for end in (0, 1))
        return [pairs[a:b] - row * self.num_labels for a, b, row in zip(low, high, rows, strict=True)]


@dataclass(frozen=True)
class Quality:
    """What held-out documents find.

    Attributes:
        p_at_1: percentage of documents whose best label is true.
        gain: mean of 1 / log2(1 + rank) over each document's labels, times 100; a label's rank is that among the
            wrong ones. Documents without a label are left out.
    """

    p_at_1: float
    gain: float


def count_above(scores: NDArray[np.float32], of: NDArray[np.float32]) -> NDArray[np.int64]:
    """How many scores are greater than each of some: int64 [of]."""
    if len(of) <= FEW:
        return np.fromiter((np.count_nonzero(scores > score) for score in of), np.int64, len(of))
    ascending = np.sort(of)
    counts = np.bincount(np.searchsorted(ascending, scores), minlength=len(of) + 1)  # by how many of them are smaller
    return counts[::-1].cumsum()[::-1][np.searchsorted(ascending, of) + 1]
