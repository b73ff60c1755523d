"""Label context: the neighbours' mean added to each label's vector, at no cost at query time.

Labels are known when the index is built, and so are their anchors and training documents. A label can therefore be
ranked by `normalise(E(text) + sum over sets t of share_t * mean of its neighbours' vectors)`, computed once. The
training documents are one of the sets.

The shares are chosen on held-out documents: of the candidates, the share with the best discounted gain, if it also
lowers the mean log rank of the labels by more than chance. The gain weights the top of the ranking, where a few hundred
documents are noisy; the log rank covers all of it. So a graph without information on the task gets no share.
(Likelihood would not do: a mean flattens the scores, which at a fixed temperature alone looks like a gain.)

An anchor set gets the smallest share within one standard error of the best (the rule of Breiman et al. 1984 for
trees): the best share itself lost more at the first rank on other documents than it won in depth
(docs/lab/experiments.md). The training documents' share is chosen first. The mean of n training documents counts
n / (n + PRIOR), since one document says little about the next: compared with the plain mean, this keeps the recall
without a loss at the first ranks and in the tail (docs/lab/experiments.md).

Letters: L labels, M anchors of a set, D width, S shares, V held-out documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.config import ObjectiveConfig
from ramen.console import report
from ramen.data.dataset import Side
from ramen.graph.metadata import Graph, Graphs, neighbour_means, sampling_weights
from ramen.training.labels.selection import SelectionSample, selection_sample
from ramen.training.trainer import Trainer

Vectors = NDArray[np.float32]

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Candidate shares of an anchor set, in addition to 0."""
DOCUMENT_SHARES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Candidate shares of the training documents, in addition to 0; they hold for a label with very many."""
PRIOR = 64.0
"""Training documents of a label at which half of the share counts."""
SWEEPS = 2
"""Times that every set's share is chosen, given the others'."""
DOCUMENTS_SET = "training_documents"
"""Name of the training documents among the sets."""
CERTAIN = 2.0
"""Standard errors of the paired difference by which a share must lower the log rank."""
PARSIMONY = 1.0
"""Standard errors of the paired difference by which the best share may beat a smaller one that is chosen instead."""


@dataclass(frozen=True)
class LabelContext:
    """Vectors that are added to the labels' vectors.

    Attributes:
        vectors: float32 [L, D].
        without_held_out: float32 [L, D], the same without the held-out documents, for choices made on them.
        shares: share of each set.
    """

    vectors: Vectors
    without_held_out: Vectors
    shares: dict[str, float]


def label_context(
    trainer: Trainer, objective: ObjectiveConfig, graphs: Graphs, labels_LD: Vectors
) -> LabelContext | None:
    """Choose the share of every anchor set and of the training documents on the held-out documents.

    Args:
        trainer: the trained encoder and its held-out documents.
        objective: section `objective`.
        graphs: set -> side -> pruned graph.
        labels_LD: float32 [L, D], the vectors by which labels are ranked without context.

    Returns:
        None if it is off, too few documents are held out, or no set helps.

    Raises:
        Interrupted: SIGTERM or Ctrl-C; a checkpoint was saved.
    """
    kind = objective.label_context
    if kind == "none" or not len(trainer.inputs.held_out):
        return None
    sample = selection_sample(trainer, "no label context")
    if sample is None:
        return None
    documents = _document_neighbours(trainer) if kind in ("documents", "both") else None
    means = {} if documents is None else {DOCUMENTS_SET: documents.means(hide=True)}
    for name, sides in graphs.items():
        if kind in ("anchors", "both") and trainer.inputs.active[name][Side.LABEL] and sides[Side.LABEL].num_edges:
            means[name] = _anchor_neighbours(trainer, objective, name, sides).means()
    shares = dict.fromkeys(means, 0.0)
    for _ in range(SWEEPS):
        for name, mean in means.items():
            rest = _weighted_sum(means, {**shares, name: 0.0})
            rest += labels_LD
            candidates, parsimony = (DOCUMENT_SHARES, 0.0) if name == DOCUMENTS_SET else (SHARES, PARSIMONY)
            gain, log_rank = compare_context_shares(sample, rest, mean, (0.0, *candidates))
            shares[name] = (0.0, *candidates)[choose_share(gain, log_rank, parsimony)]
    report(" ".join(["label context: shares", *(f"{name} {share:g}" for name, share in shares.items())]))
    if not any(shares.values()):
        return None
    without_held_out = _weighted_sum(means, shares)
    if documents is not None and shares[DOCUMENTS_SET]:
        means[DOCUMENTS_SET] = documents.means()
    return LabelContext(_weighted_sum(means, shares), without_held_out, shares)


@dataclass(frozen=True)
class _Neighbours:
    """Edges from labels to items with vectors.

    Attributes:
        indptr: int64 [L + 1].
        columns: int [E], rows of `vectors`.
        vectors: float32 [n, D].
        weights: float32 [n].
        hidden: bool [E], edges to held-out documents; None if there are none.
        prior: weight of a zero vector in each mean; 0 = the plain mean.
    """

    indptr: NDArray[np.int64]
    columns: NDArray[Any]
    vectors: Vectors
    weights: Vectors
    hidden: NDArray[np.bool_] | None = None
    prior: float = 0.0

    def means(self, hide: bool = False) -> Vectors:
        """Weighted mean of each label's neighbours, float32 [L, D], 0 for a label without any.

        Args:
            hide: leave out the hidden edges.
        """
        values = self.weights[self.columns]
        if hide and self.hidden is not None:
            values = values * ~self.hidden
        shape = (len(self.indptr) - 1, len(self.vectors))
        edges = sp.csr_matrix((values.astype(np.float32), self.columns, self.indptr), shape=shape)
        return neighbour_means(edges, self.vectors, self.prior)


def _anchor_neighbours(
    trainer: Trainer, objective: ObjectiveConfig, name: str, sides: Mapping[Side, Graph]
) -> _Neighbours:
    """A set's anchors, weighted by their probability to be drawn. No anchor is a held-out document."""
    graph, anchor_weights = sides[Side.LABEL], sampling_weights(sides, objective.anchor_sampling)
    used, columns = np.unique(graph.indices, return_inverse=True)
    weights = np.ones(len(used)) if anchor_weights is None else anchor_weights[used]
    vectors = trainer.embed(trainer.inputs.texts.roles[f"anchors/{name}"][used])
    return _Neighbours(graph.indptr, columns, vectors, np.asarray(weights, np.float32))


def _document_neighbours(trainer: Trainer) -> _Neighbours:
    """The training documents of each label."""
    documents = trainer.inputs.dataset.y_train.T.tocsr()
    vectors = trainer.embed_role("documents")
    hidden = np.isin(documents.indices, trainer.inputs.held_out.rows)
    weights = np.ones(len(vectors), np.float32)
    return _Neighbours(documents.indptr.astype(np.int64), documents.indices, vectors, weights, hidden, PRIOR)


def _weighted_sum(means: Mapping[str, Vectors], shares: Mapping[str, float]) -> Vectors:
    """Sum of the sets' means times their shares: float32 [L, D], a new array."""
    total = np.zeros_like(next(iter(means.values())))
    for name, mean in means.items():
        if shares[name]:
            total += np.float32(shares[name]) * mean
    return total


def choose_share(gain_SV: NDArray[np.float64], log_rank_SV: NDArray[np.float64], parsimony: float) -> int:
    """Index of the smallest share whose gain is close enough to the best; 0 if it does not certainly help.

    Args:
        gain_SV, log_rank_SV: float64 [S, V], for the shares in ascending order, the first 0.
        parsimony: standard errors of the paired difference that count as close enough.
    """

    def error(difference_V: NDArray[np.float64]) -> float:
        return float(difference_V.std() / np.sqrt(max(len(difference_V), 1)))

    best = int(gain_SV.mean(1).argmax())
    losses = [gain_SV[best] - gain_V for gain_V in gain_SV[: best + 1]]
    smallest = next(index for index, loss in enumerate(losses) if loss.mean() <= parsimony * error(loss))
    fall = log_rank_SV[0] - log_rank_SV[smallest]
    return smallest if fall.mean() > CERTAIN * error(fall) else 0


def compare_context_shares(
    sample: SelectionSample, labels_LD: Vectors, mean_LD: Vectors, shares: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`HeldOut.compare_shares` of `normalise(labels + share * mean)`, computed from two matrix products."""
    cross, square, own = ((a * b).sum(1) for a, b in ((labels_LD, mean_LD), (mean_LD, mean_LD), (labels_LD, labels_LD)))

    def combine(by_labels: Vectors, by_mean: Vectors, share: float) -> Vectors:
        norm = np.sqrt(np.maximum(own + 2 * share * cross + share * share * square, 1e-12))
        return np.asarray((by_labels + share * by_mean) / norm)

    candidates = np.asarray(shares, np.float32)
    return sample.held_out.compare_shares(sample.vectors, labels_LD, mean_LD, combine, candidates)
