"""Label context: what a label's neighbours add to its vector, at no cost when a query comes.

Labels are known when the index is built, and so are their anchors and their training documents; a test document is not.
So a label may be ranked by `normalise(E(text) + sum over sets t of share_t * mean of its neighbours' vectors)`,
computed once. Which sets help, and by how much, is asked of the held-out documents: the share with the best discounted
gain (that of nDCG) stays if it also lowers the mean log rank of their labels by more than chance. The first looks at
the top of the ranking, where a few hundred documents say little for certain; the second at all of it. So a graph that
says nothing about the task is left out, whatever it is. Of an anchor set the smallest share counts that is within one
standard error of the best (the rule by which Breiman et al. 1984 choose a tree): chosen as the best, it cost the first
place on other documents more than it won in depth (docs/experiments.md). (Not by the likelihood: a mean flattens the
scores, and at a fixed temperature that alone looks like a gain.) The training documents are a set too, with and without
graphs, and the first to be asked: what a graph adds is asked beside them, not in their place. Of a label with n of them
the mean counts n / (n + PRIOR): one document says little about the next, and the text is the prior
(docs/experiments.md: against the plain mean it keeps the recall and costs the first ranks and the tail nothing).

Letters: L labels, M anchors of a set, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.graph.metadata import Graph, drawing_weights, neighbour_means
from ramen.training.labels.selection import HeldOutRanking
from ramen.training.setup import Session

Vectors = NDArray[np.float32]

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares that are tried for an anchor set, beside 0."""
DOCUMENT_SHARES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Shares that are tried for the training documents, beside 0: of a label with very many."""
PRIOR = 64.0
"""Training documents of a label for which half of the share counts."""
SWEEPS = 2
"""Times that every set's share is chosen anew, given the others'."""
DOCUMENTS_SET = "training_documents"
"""Name of the training documents among the sets."""
CERTAIN = 2.0
"""A share must win by this many standard errors of the difference, document by document."""
PARSIMONY = 1.0
"""Of an anchor set's shares the smallest counts that the best beats by no more than this many standard errors."""


@dataclass(frozen=True)
class Context:
    """What is added to the labels' vectors.

    Attributes:
        vectors: float32 [L, D].
        unseen: float32 [L, D], the same without the held-out documents, which else find themselves in it: for all that
            is judged by them.
        shares: of each set.
    """

    vectors: Vectors
    unseen: Vectors
    shares: dict[str, float]


def label_context(session: Session, pruned: Mapping[str, Mapping[str, Graph]], labels: Vectors) -> Context | None:
    """Choose the share of every anchor set, and of the training documents, on the held-out documents.

    Args:
        session: the trained encoder and its held-out documents.
        pruned: set -> side -> graph.
        labels: float32 [L, D] the vectors by which labels are ranked without context.

    Returns:
        None when it is off, too few documents are held out to choose by, or no set helps.

    Raises:
        Interrupted: asked to stop; a checkpoint was saved.
    """
    held_out, wanted = session.validation.documents, session.objective.label_context
    if wanted == "none" or not len(held_out):
        return None
    judges = HeldOutRanking.of(session, "no label context")
    if judges is None:
        return None
    active = session.active
    documents = _documents(session, held_out) if wanted in ("documents", "both") else None
    means = {} if documents is None else {DOCUMENTS_SET: documents.means(unseen=True)}
    for name, sides in pruned.items():  # the anchors' own vectors go as soon as their means are there
        if wanted in ("anchors", "both") and active[name]["labels"] and sides["labels"].num_edges:
            means[name] = _anchors(session, name, sides).means()
    shares = dict.fromkeys(means, 0.0)
    for _ in range(SWEEPS):
        for name, mean in means.items():
            others = _total(means, {**shares, name: 0.0})
            others += labels
            candidates, parsimony = (DOCUMENT_SHARES, 0.0) if name == DOCUMENTS_SET else (SHARES, PARSIMONY)
            tried = (0.0, *candidates)
            gain, log_rank = _judged(judges, others, mean, tried)
            shares[name] = tried[_chosen(gain, log_rank, parsimony)]
    said = " ".join(f"{name} {share:g}" for name, share in shares.items())
    print(f"label context: shares {said}", file=sys.stderr, flush=True)
    if not any(shares.values()):
        return None
    unseen = _total(means, shares)
    if documents is not None and shares[DOCUMENTS_SET]:
        means[DOCUMENTS_SET] = documents.means()
    return Context(_total(means, shares), unseen, shares)


@dataclass(frozen=True)
class _Neighbours:
    """Edges from labels to what has vectors.

    Attributes:
        indptr: int64 [L + 1].
        columns: int [E], rows of `vectors`.
        vectors: float32 [n, D].
        weights: float32 [n].
        hidden: bool [E], edges that a held-out document must not see while it judges; None = there are none.
        prior: the mean of neighbours that weigh as much in all is halved; 0 = the mean as it is.
    """

    indptr: NDArray[np.int64]
    columns: NDArray[Any]
    vectors: Vectors
    weights: Vectors
    hidden: NDArray[np.bool_] | None = None
    prior: float = 0.0

    def means(self, unseen: bool = False) -> Vectors:
        """Mean of each label's neighbours, by their weights, shrunk: float32 [L, D], 0 for a label without any.

        `unseen`: without the hidden edges.
        """
        values = self.weights[self.columns]
        if unseen and self.hidden is not None:
            values = values * ~self.hidden
        shape = (len(self.indptr) - 1, len(self.vectors))
        return neighbour_means(
            sp.csr_matrix((values.astype(np.float32), self.columns, self.indptr), shape=shape), self.vectors, self.prior
        )


def _anchors(session: Session, name: str, sides: Mapping[str, Graph]) -> _Neighbours:
    """A set's anchors, weighted as draws from the pruned graph would be; as no test document is one, no judge is."""
    graph, drawn = sides["labels"], drawing_weights(sides, session.objective.anchor_sampling)
    used, columns = np.unique(graph.indices, return_inverse=True)
    weights = np.ones(len(used), np.float32) if drawn is None else np.asarray(drawn[used], np.float32)
    vectors = session.embed(session.texts.roles[f"anchors/{name}"][used])
    return _Neighbours(graph.indptr, columns, vectors, weights)


def _documents(session: Session, held_out: NDArray[np.int64]) -> _Neighbours:
    """The training documents of each label."""
    of_label = session.problem.y_train.T.tocsr()
    vectors = session.embed_role("documents")
    hidden = np.isin(of_label.indices, held_out)
    return _Neighbours(
        of_label.indptr.astype(np.int64),
        of_label.indices,
        vectors,
        np.ones(len(vectors), np.float32),
        hidden,
        PRIOR,
    )


def _total(means: Mapping[str, Vectors], shares: Mapping[str, float]) -> Vectors:
    """The sum of the sets' means, each with its share: float32 [L, D], a new array."""
    total = np.zeros_like(next(iter(means.values())))
    for name, mean in means.items():
        if shares[name]:
            total += np.float32(shares[name]) * mean
    return total


def _chosen(gain: NDArray[np.float64], log_rank: NDArray[np.float64], parsimony: float) -> int:
    """Which share: the smallest whose gain the best beats by no more than `parsimony` errors, if it surely helps.

    Args:
        gain, log_rank: float64 [S, V], of the shares in ascending order, the first 0.
        parsimony: standard errors of the difference, document by document.
    """

    def error(difference: NDArray[np.float64]) -> float:
        return float(difference.std() / np.sqrt(max(len(difference), 1)))

    best = int(gain.mean(1).argmax())
    lost = [gain[best] - each for each in gain[: best + 1]]
    smallest = next(share for share, each in enumerate(lost) if each.mean() <= parsimony * error(each))
    fall = log_rank[0] - log_rank[smallest]
    return smallest if fall.mean() > CERTAIN * error(fall) else 0


def _judged(
    judges: HeldOutRanking, labels: Vectors, mean: Vectors, shares: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`Judges.ask` about `normalise(labels + share * mean)`, whose scores are linear in the share before the norm."""
    cross, square, own = ((a * b).sum(1) for a, b in ((labels, mean), (mean, mean), (labels, labels)))

    def combine(plain: Vectors, moved: Vectors, share: float) -> Vectors:
        norm = np.sqrt(np.maximum(own + 2 * share * cross + share * share * square, 1e-12))
        return np.asarray((plain + share * moved) / norm)

    return judges.ask(labels, mean, combine, np.asarray(shares, np.float32))
