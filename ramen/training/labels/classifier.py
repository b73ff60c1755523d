"""The second stage (M2) of NGAME-type bases: a classifier per label on the frozen encoder's vectors.

A classifier w_l starts as its label's vector and is trained on the documents, which helps frequent labels. Scores are
cosines, so the fused score (1 - share) x·z_l + share x·w_l is an inner product with one vector per label. The share is
chosen on held-out documents (NGAME fits a decision tree instead, which no index can serve).

Letters: N documents, L labels, D width, P positives and K negatives per document and step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.artifacts import Draft
from ramen.base.mining import mine_shortlists, sample_shortlists
from ramen.config import ClassifierConfig
from ramen.console import report
from ramen.sampling import RowSampler, keyed_rng
from ramen.training.checkpoint import Checkpoints, TrainingState
from ramen.training.heldout import EVALUATED
from ramen.training.labels.selection import selection_sample
from ramen.training.progress import Progress
from ramen.training.trainer import Trainer

SHARES = np.linspace(0.0, 1.0, 11, dtype=np.float32)
"""Candidate shares of the classifier in the fused score."""
BATCH_SIZE, LEARNING_RATE, MARGIN, DROPOUT = 2048, 1e-3, 0.2, 0.5
"""Training of the classifiers, as in NGAME's code; dropout of the documents' vectors."""
SHORTLIST = 100
"""Nearest negatives per document from which a step samples."""
DEFAULT_SHARE = 0.5
"""The share without enough held-out documents to choose one."""


@dataclass(frozen=True)
class Classified:
    """Trained classifiers: `weight` float32 [L, D] unit norm, and their `share` in the fused score."""

    weight: NDArray[np.float32]
    share: float
    metrics: dict[str, float]


class Classifiers(nn.Module):
    """One vector per label.

    Args:
        start: float32 [L, D], the labels' vectors.
    """

    def __init__(self, start: NDArray[np.float32]) -> None:
        super().__init__()
        labels, dimension = start.shape
        self.table = nn.Embedding(labels, dimension, sparse=True, _weight=torch.from_numpy(start.copy()))

    def forward(self, documents_BD: Tensor, labels_BK: Tensor) -> Tensor:
        """Cosines [B, K] of documents and the classifiers of their labels."""
        w_BKD = nn.functional.normalize(self.table(labels_BK), dim=-1)
        return torch.einsum("bd,bkd->bk", nn.functional.normalize(documents_BD, dim=-1), w_BKD)


def train_classifiers(
    trainer: Trainer,
    settings: ClassifierConfig,
    draft: Draft,
    labels_LD: NDArray[np.float32],
    fused_with_LD: NDArray[np.float32],
) -> Classified | None:
    """Train classifiers if the base algorithm has a second stage; None without one, or if it is switched off.

    Every process computes the same: only the encoder's vectors are needed.

    Args:
        trainer: the trained encoder.
        settings: section `classifier`.
        draft: the model; checkpoints go to its work directory.
        labels_LD: float32 [L, D], the labels' vectors, from which classifiers start.
        fused_with_LD: float32 [L, D], the vectors to fuse with, computed without the held-out documents.

    Raises:
        Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
    """
    base, processes = trainer.base, trainer.processes
    if not (settings.epochs and base.classifies):
        return None
    documents_ND = trainer.embed_role("documents")
    device = trainer.encoder.device
    model = Classifiers(labels_LD).to(device)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=LEARNING_RATE)
    checkpoints = Checkpoints(draft.work / "classifier", draft.task)
    state = TrainingState()
    if (found := checkpoints.load(model, optimizer)) is not None:
        state = found[0]
    processes.wait()

    problem, seed = base.problem, trainer.settings.seed
    shortlists = mine_shortlists(problem, documents_ND, labels_LD, SHORTLIST)
    positives = RowSampler(problem.y.indptr, problem.y.indices)
    progress = Progress("classifier", settings.epochs * len(problem.documents), "documents",
                        state.epoch * len(problem.documents))  # fmt: skip
    for epoch in range(state.epoch, settings.epochs):
        order = keyed_rng(seed, "classifier/order", epoch).permutation(problem.documents)
        total = 0.0
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            rng = keyed_rng(seed, "classifier", epoch, start)
            true = np.stack([positives.draw(rows, rng)[1] for _ in range(settings.positives)], axis=1)
            false = sample_shortlists(shortlists[rows], rng.random((len(rows), settings.negatives)))
            keep = rng.random((len(rows), documents_ND.shape[1]), np.float32) >= DROPOUT
            x_BD = torch.from_numpy(documents_ND[rows] * keep / (1 - DROPOUT)).to(device)
            chosen = torch.from_numpy(np.concatenate([true, np.maximum(false, 0)], axis=1)).to(device)
            valid = torch.from_numpy(false >= 0).to(device)
            loss = mean_hinge(model(x_BD, chosen), settings.positives, valid, MARGIN)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * len(rows)
            progress.advance(len(rows), f"epoch {epoch + 1}/{settings.epochs} loss {float(loss.detach()):.4f}")
        state.epoch = epoch + 1
        state.global_step = state.epoch
        state.sums = {"loss": total / max(len(order), 1)}
        interrupted = trainer.interrupt_requested()  # the same in all processes, unlike the clock
        if (interrupted or trainer.checkpoint_is_due()) and processes.rank == 0:
            checkpoints.save(model, optimizer, state)
        if interrupted:
            trainer.stop_if_interrupted()
    weight = nn.functional.normalize(model.table.weight.detach(), dim=-1).cpu().numpy()
    share, metrics = choose_fused_share(trainer, documents_ND, fused_with_LD, weight)
    metrics |= {"classifier/loss": state.sums.get("loss", 0.0), "classifier/share": share}
    report(f"classifier share {share:.1f} of the fused score")
    return Classified(weight, share, metrics)


def mean_hinge(scores_BK: Tensor, positives: int, valid_BN: Tensor, margin: float) -> Tensor:
    """Mean triplet hinge over all pairs of a positive (the first columns) and a valid negative (the others)."""
    true_BP1, false_B1N = scores_BK[:, :positives, None], scores_BK[:, None, positives:]
    hinge = (false_B1N - true_BP1 + margin).clamp_min(0.0) * valid_BN[:, None, :]
    return hinge.sum() / (valid_BN.sum() * positives).clamp_min(1)


def choose_fused_share(
    trainer: Trainer, documents_ND: NDArray[np.float32], labels_LD: NDArray[np.float32], weight_LD: NDArray[np.float32]
) -> tuple[float, dict[str, float]]:
    """The share with the best discounted gain on held-out documents, and P@1 of labels, classifiers and both fused."""
    sample = selection_sample(trainer, f"the classifiers' share is {DEFAULT_SHARE:g}")
    if sample is None:
        return DEFAULT_SHARE, {}

    def fuse(first: NDArray[np.float32], second: NDArray[np.float32], share: float) -> NDArray[np.float32]:
        return np.asarray((1 - share) * first + share * second)

    gain, _ = sample.held_out.compare_shares(sample.vectors, labels_LD, weight_LD, fuse, SHARES)
    share = float(SHARES[gain.mean(1).argmax()])
    held_out = trainer.inputs.held_out.evenly_spaced(EVALUATED)
    vectors = documents_ND[held_out.rows]
    metrics = {
        f"{name}/val_p_at_1": held_out.quality(vectors, np.asarray(fuse(labels_LD, weight_LD, s), np.float32)).p_at_1
        for name, s in (("unclassified", 0.0), ("classifier", 1.0), ("fused", share))
    }
    return share, metrics
