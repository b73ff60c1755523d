"""The second stage (M2) of NGAME-type bases: a classifier per label on the frozen encoder's vectors.

A classifier w_l starts as its label's vector and learns from the documents themselves, which helps labels with many.
Scores are cosines, so a document's fused score, (1 - share) x·z_l + share x·w_l, is one inner product with one vector
per label; `share` is chosen on the held-out documents (NGAME fits a decision tree there, which no index can serve).

Letters: N documents, L labels, D width, P positives and K negatives per document and step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.artifacts import Draft
from ramen.base.mining import drawn_from, shortlists
from ramen.config import ClassifierConfig
from ramen.sampling import RowSampler, keyed_rng
from ramen.training.checkpoint import Checkpoints, TrainingState
from ramen.training.labels.selection import HeldOutRanking
from ramen.training.progress import Progress
from ramen.training.setup import Session

SHARES = np.linspace(0.0, 1.0, 11, dtype=np.float32)
"""Shares of the classifier that are tried on the held-out documents."""
BATCH_SIZE, LEARNING_RATE, MARGIN, DROPOUT = 2048, 1e-3, 0.2, 0.5
"""Of the training of classifiers, as in NGAME's code; the dropout is of the documents' vectors."""
SHORTLIST = 100
"""Nearest negatives per document from which a step samples."""
WITHOUT_VALIDATION = 0.5
"""The share where too few documents are held out to choose one."""


@dataclass(frozen=True)
class Classified:
    """Classifiers of a finished second stage: `weight` float32 [L, D] unit norm, `share` of the fused score."""

    weight: NDArray[np.float32]
    share: float
    metrics: dict[str, float]


class Classifiers(nn.Module):
    """One vector per label.

    Args:
        start: float32 [L, D] the labels' vectors.
    """

    def __init__(self, start: NDArray[np.float32]) -> None:
        super().__init__()
        labels, dimension = start.shape
        self.table = nn.Embedding(labels, dimension, sparse=True, _weight=torch.from_numpy(start.copy()))

    def forward(self, documents_BD: Tensor, labels_BK: Tensor) -> Tensor:
        """Cosines [B, K] of documents and the classifiers of their labels."""
        w_BKD = nn.functional.normalize(self.table(labels_BK), dim=-1)
        return torch.einsum("bd,bkd->bk", nn.functional.normalize(documents_BD, dim=-1), w_BKD)


def classify(
    session: Session,
    settings: ClassifierConfig,
    draft: Draft,
    labels_LD: NDArray[np.float32],
    unseen_LD: NDArray[np.float32],
) -> Classified | None:
    """Train classifiers if the base algorithm has a second stage; None if it has not, or it is switched off.

    Every process computes the same; none needs the encoder, only its vectors.

    Args:
        session: the trained encoder.
        settings: section `classifier`.
        draft: the model; its work directory holds the checkpoints.
        labels_LD: float32 [L, D] labels' vectors, from which classifiers start.
        unseen_LD: float32 [L, D] the vectors with which they are fused, as they are without the held-out documents.

    Raises:
        Interrupted: asked to stop; a checkpoint was saved.
    """
    base = session.trainer.base
    if not (settings.epochs and base.classifies):
        return None
    documents_ND = session.embed_role("documents")
    device = session.encoder.device
    model = Classifiers(labels_LD).to(device)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=LEARNING_RATE)
    checkpoints = Checkpoints(draft.work / "classifier", draft.task)
    position = TrainingState()
    if (found := checkpoints.load(model, optimizer)) is not None:
        position = found[0]
    session.processes.wait()

    problem, seed = base.problem, session.training.seed
    near = shortlists(problem, documents_ND, labels_LD, SHORTLIST)
    positives = RowSampler(problem.y.indptr, problem.y.indices)
    progress = Progress("classifier", settings.epochs * len(problem.documents), "documents",
                        position.epoch * len(problem.documents))  # fmt: skip
    for epoch in range(position.epoch, settings.epochs):
        order = keyed_rng(seed, "classifier/order", epoch).permutation(problem.documents)
        total = 0.0
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            rng = keyed_rng(seed, "classifier", epoch, start)
            true = np.stack([positives.draw(rows, rng)[1] for _ in range(settings.positives)], axis=1)
            false = drawn_from(near[rows], rng.random((len(rows), settings.negatives)))
            keep = rng.random((len(rows), documents_ND.shape[1]), np.float32) >= DROPOUT
            x_BD = torch.from_numpy(documents_ND[rows] * keep / (1 - DROPOUT)).to(device)
            chosen = torch.from_numpy(np.concatenate([true, np.maximum(false, 0)], axis=1)).to(device)
            valid = torch.from_numpy(false >= 0).to(device)
            loss = _hinges(model(x_BD, chosen), settings.positives, valid, MARGIN)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # type: ignore[no-untyped-call]
            total += float(loss.detach()) * len(rows)
            progress.advance(len(rows), f"epoch {epoch + 1}/{settings.epochs} loss {float(loss.detach()):.4f}")
        position.epoch = epoch + 1
        position.global_step = position.epoch
        position.sums = {"loss": total / max(len(order), 1)}
        stopping = session.trainer.stop()  # asked by all processes alike, unlike the clock
        if (stopping or session.trainer.due()) and session.processes.rank == 0:
            checkpoints.save(model, optimizer, position)
        if stopping:
            session.trainer.stop_if_asked()
    weight = nn.functional.normalize(model.table.weight.detach(), dim=-1).cpu().numpy()
    share, metrics = _fuse(session, documents_ND, unseen_LD, weight)
    metrics |= {"classifier/loss": position.sums.get("loss", 0.0), "classifier/share": share}
    print(f"classifier share {share:.1f} of the fused score", file=sys.stderr, flush=True)
    return Classified(weight, share, metrics)


def _hinges(scores_BK: Tensor, positives: int, valid_BN: Tensor, margin: float) -> Tensor:
    """Mean triplet hinge over all pairs of a positive (the first columns) and a valid negative (the others)."""
    true_BP1, false_B1N = scores_BK[:, :positives, None], scores_BK[:, None, positives:]
    hinge = (false_B1N - true_BP1 + margin).clamp_min(0.0) * valid_BN[:, None, :]
    return hinge.sum() / (valid_BN.sum() * positives).clamp_min(1)


def _fuse(
    session: Session, documents_ND: NDArray[np.float32], labels_LD: NDArray[np.float32], weight: NDArray[np.float32]
) -> tuple[float, dict[str, float]]:
    """The share with the best discounted gain on held-out documents, and the P@1 of either side and of both."""
    judges = HeldOutRanking.of(session, f"classifiers count {WITHOUT_VALIDATION:g} of the score")
    if judges is None:
        return WITHOUT_VALIDATION, {}
    held_out = session.validation.sampled()

    def fused(plain: NDArray[np.float32], moved: NDArray[np.float32], share: float) -> NDArray[np.float32]:
        return np.asarray((1 - share) * plain + share * moved)

    gain, _ = judges.ask(labels_LD, weight, fused, SHARES)
    share = float(SHARES[gain.mean(1).argmax()])
    rows = documents_ND[held_out.documents]
    found = {
        f"{name}/val_p_at_1": held_out.quality(rows, np.asarray(fused(labels_LD, weight, each), np.float32)).p_at_1
        for name, each in (("unclassified", 0.0), ("classifier", 1.0), ("fused", share))
    }
    return share, found
