"""Held-out training documents: which they are, and how an encoder ranks their labels.

Held-out documents decide when training ends, choose the label context and the classifiers' share, and give feedback to
the bandit. Quality is measured by two figures besides P@1, which depends on the first label only and is noisy on a few
hundred documents: the discounted gain (the gain of nDCG), which weights the top of the ranking, and the logarithm of
the rank, which covers all of it.

Letters: V held-out documents, L labels, D width, S shares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numba
import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import nn

from ramen.base.protocol import BaseAlgorithm, LabelProblem
from ramen.config import TrainingConfig
from ramen.data.dataset import Dataset, choose_whole_groups
from ramen.data.sparse import without
from ramen.sampling import keyed_rng
from ramen.training.step_sampler import StepSampler

Ints = NDArray[np.int64]
Vectors = NDArray[np.float32]

FEWEST_FOR_AUTO = 500
"""Held-out documents with `training.epochs=auto`, where that is at most a tenth of the documents."""
LARGEST_GROUP = 0.02
"""Share of the held-out documents that one group may take while smaller groups remain. Groups are held out whole; a few
large ones (the language packs of one program) would otherwise decide alone when training ends."""
EVALUATED = 10_000
"""Held-out documents that a validation ranks labels for: P@1 to half a point."""
SCORES = 1 << 25
"""Scores held in memory at a time (128 MB)."""


@dataclass(frozen=True)
class Quality:
    """Quality of a ranking of all labels for held-out documents.

    Attributes:
        p_at_1: percentage of documents whose first label is true.
        gain: mean of 1 / log2(1 + rank) over each document's labels, times 100, where a label is ranked among the wrong
            labels only. Documents without a label are left out.
    """

    p_at_1: float
    gain: float


@dataclass(frozen=True)
class HeldOut:
    """Held-out training documents with their labels.

    Attributes:
        rows: int64 [V], ascending rows of the training matrix; training uses none of them.
        y: CSR V x L, true pairs.
        ignored: CSR V x L, pairs that do not count.
        unseen: int64, labels that training must not see (zero-shot); they do not compete.
    """

    rows: Ints
    y: sp.csr_matrix
    ignored: sp.csr_matrix
    unseen: Ints

    @classmethod
    def of(cls, dataset: Dataset, rows: Ints, ignored: sp.csr_matrix) -> HeldOut:
        """The held-out documents `rows`; `ignored` is CSR N x L."""
        hidden = ignored[rows]
        return cls(rows, without(dataset.y_train[rows], hidden), hidden, dataset.unseen)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, places: Ints) -> HeldOut:
        """Some of the documents, by their places in `rows`."""
        return HeldOut(self.rows[places], self.y[places], self.ignored[places], self.unseen)

    def labelled(self) -> HeldOut:
        """The documents that have a label."""
        return self.select(np.flatnonzero(np.diff(self.y.indptr)))

    def evenly_spaced(self, count: int) -> HeldOut:
        """At most `count` documents, the same ones each time."""
        if len(self) <= count:
            return self
        return self.select(np.linspace(0, len(self) - 1, count).astype(np.int64))

    def quality(self, documents_VD: Vectors, labels_LD: Vectors) -> Quality:
        """Rank all labels for the documents by cosine."""
        gains: list[float] = []
        hits = 0
        for part in self._chunks(len(labels_LD)):
            hit, ranks = self.rank_labels(part, documents_VD[part] @ labels_LD.T)
            hits += int(hit.sum())
            gains += [mean_gain(of_document) for of_document in ranks if len(of_document)]
        return Quality(100.0 * hits / max(len(self), 1), 100.0 * float(np.mean(gains)) if gains else 0.0)

    def compare_shares(
        self,
        documents_VD: Vectors,
        labels_LD: Vectors,
        others_LD: Vectors,
        combine: Callable[[Vectors, Vectors, float], Vectors],
        shares_S: Vectors,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Quality per document of scores that mix two vectors per label, for several shares of the second.

        Every document needs a label.

        Args:
            documents_VD, labels_LD, others_LD: float32, unit norm. Two matrix products serve all shares.
            combine: scores [n, L] by the first vectors, by the second, and a share -> mixed scores [n, L].
            shares_S: float32 [S].

        Returns:
            Means of 1 / log2(1 + rank) and of log2(rank) over each document's labels, float64 [S, V] each. A label is
            ranked among the wrong labels only.
        """
        gain, log_rank = np.zeros((2, len(shares_S), len(self)))
        for part in self._chunks(len(labels_LD)):
            first, second = documents_VD[part] @ labels_LD.T, documents_VD[part] @ others_LD.T
            for number, share in enumerate(shares_S):
                _, ranks = self.rank_labels(part, combine(first, second, float(share)))
                gain[number, part] = [mean_gain(of_document) for of_document in ranks]
                log_rank[number, part] = [np.log2(of_document).mean() for of_document in ranks]
        return gain, log_rank

    def rank_labels(self, part: slice, scores: Vectors) -> tuple[NDArray[np.bool_], list[Ints]]:
        """Ranks of the true labels of some documents.

        Args:
            part: places in `rows`.
            scores: float32 [n, L], overwritten.

        Returns:
            Whether the first label is true, bool [n], and for each document the ranks of its labels among the wrong
            ones, int64 from 1.
        """
        y, ignored = self.y[part], self.ignored[part].tocoo()
        scores[:, self.unseen] = -np.inf
        scores[ignored.row, ignored.col] = -np.inf
        first = scores.argmax(1)
        hit = np.asarray(y[np.arange(len(scores)), first]).ravel() > 0
        rows = np.repeat(np.arange(len(scores)), np.diff(y.indptr))
        true = scores[rows, y.indices]
        scores[rows, y.indices] = -np.inf
        ranks = 1 + _count_greater(scores, y.indptr.astype(np.int64), true)
        return hit, np.split(ranks, y.indptr[1:-1])

    def _chunks(self, labels: int) -> list[slice]:
        step = max(1, SCORES // max(labels, 1))
        return [slice(start, start + step) for start in range(0, len(self), step)]


def mean_gain(ranks: Ints) -> float:
    """Mean of 1 / log2(1 + rank), ranks from 1."""
    return float((1.0 / np.log2(1.0 + ranks)).mean())


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _count_greater(scores: Vectors, indptr: Ints, values: Vectors) -> Ints:
    """Number of scores of its row that exceed each value: int64 [values]; row r has values indptr[r]:indptr[r + 1]."""
    out = np.zeros(len(values), np.int64)
    for row in range(len(indptr) - 1):
        own = values[indptr[row] : indptr[row + 1]]
        if not len(own):
            continue
        order = np.argsort(own)
        ascending = own[order]
        exceeded = np.zeros(len(own) + 1, np.int64)  # scores by the number of values that they exceed
        for score in scores[row]:
            if score > ascending[0]:
                exceeded[np.searchsorted(ascending, score)] += 1
        greater = 0
        for place in range(len(own) - 1, -1, -1):
            greater += exceeded[place + 1]
            out[indptr[row] + order[place]] = greater
    return out


def split_held_out(dataset: Dataset, training: TrainingConfig) -> tuple[Ints, Ints]:
    """Split the training documents into held-out documents and the rest.

    In a dataset with groups (siblings, sites, sessions), whole groups are held out, as for the test set: a held-out
    document with a sibling in training is easier than the documents that are served. Groups larger than `LARGEST_GROUP`
    come last.

    Returns:
        Rows of the held-out documents and of the others, int64, ascending.
    """
    rng, documents = keyed_rng(training.seed, "validation"), len(dataset.train)
    count = round(documents * training.validation_fraction)
    if training.epochs == "auto" and training.validation_fraction:
        count = max(count, min(FEWEST_FOR_AUTO, documents // 10))
    if dataset.groups is None:
        shuffled = rng.permutation(documents)
        return np.sort(shuffled[:count]), np.sort(shuffled[count:])
    sizes = np.bincount(dataset.groups)
    order = rng.permutation(len(sizes))
    order = order[np.argsort(sizes[order] > max(1, LARGEST_GROUP * count), kind="stable")]
    held_out = choose_whole_groups(dataset.groups, order, count)
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


class HeldOutLoss:
    """Mean negative log-likelihood of one label per held-out document, the bandit's feedback `heldout_loss`.

    The sample of documents and labels stays the same: a new one would change the loss by more than a window of training
    does. The task loss would not do: a triplet loss is 0 where the margin is kept.

    Args:
        problem: the held-out documents.
        base: ranks labels (with its offsets, if it has any).
        temperature: of the softmax over the labels of the sample.
        embed: text numbers -> float32 [n, D].
        roles: "documents" and "labels" -> text number of each item.
        device: where the base's parameters are.
    """

    def __init__(
        self,
        problem: LabelProblem,
        base: BaseAlgorithm,
        temperature: float,
        embed: Callable[[Ints], Vectors],
        roles: Mapping[str, Ints],
        device: torch.device,
    ) -> None:
        self.problem, self.base, self.temperature, self.embed = problem, base, temperature, embed
        self.roles, self.device = roles, device

    @functools.cached_property
    def _sampler(self) -> StepSampler:
        # built on first use: the pairs of all labels take hundreds of megabytes
        in_batch = BaseAlgorithm(self.problem, self.base.settings, self.base.triplet)
        return StepSampler(in_batch, self.problem.batch_size, self.problem.seed)

    @torch.no_grad()
    def __call__(self) -> float:
        """The loss of the encoder as it is, without dropout."""
        step = self._sampler.step(self._sampler.epoch_order(0), 0, 0)
        documents = self.embed(self.roles["documents"][step.documents])
        labels = self.embed(self.roles["labels"][step.labels])
        positive, masked = torch.from_numpy(step.positive), torch.from_numpy(step.mask)
        z_LD = self.base.label_vectors(torch.from_numpy(labels).to(self.device), step.labels).cpu()
        scores_BL = torch.from_numpy(documents) @ z_LD.T / self.temperature
        masked[torch.arange(len(positive)), positive] = False
        return float(nn.functional.cross_entropy(scores_BL.masked_fill(masked, -torch.inf), positive))
