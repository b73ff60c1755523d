"""Mining of hard negatives: the nearest labels of a document, over all labels, that are not true."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ramen.base.protocol import BaseAlgorithm, Embed, LabelProblem, Vectors, is_due
from ramen.retrieval import ExactSearch
from ramen.sampling import Ints, isin_sorted

SHORTLIST = 100
"""Nearest negatives per document from which mined ones are sampled (DEXML)."""
CELLS = 1 << 22
"""Labels retrieved at a time, over all documents of a block (bounds memory)."""


def mine_shortlists(problem: LabelProblem, documents: Vectors, labels: Vectors, size: int) -> NDArray[np.int32]:
    """Return the nearest negatives of each document (`LabelProblem.known_texts`) among the labels seen in training.

    Args:
        problem: documents and their known labels.
        documents: float32 [N, D].
        labels: float32 [L, D], the vectors by which labels are ranked.
        size: S, negatives per document.

    Returns:
        int32 [N, S] labels, nearest first, padded with -1; documents without a label have none.
    """
    known = problem.known_texts
    labels_per_text = np.bincount(problem.label_texts, minlength=known.shape[1])
    excluded = (known @ labels_per_text).astype(np.int64)  # known labels per document: retrieval must go deeper
    # documents of similar depth share a block: a few have thousands of known labels
    order = problem.documents[np.argsort(-excluded[problem.documents], kind="stable")]
    nearest = np.full((problem.y.shape[0], size), -1, np.int32)
    exact = ExactSearch(labels, problem.labels if len(problem.unseen) else None)
    start = 0
    while start < len(order):
        depth = min(size + int(excluded[order[start]]), len(problem.labels))
        rows = order[start : start + max(1, CELLS // depth)]
        start += len(rows)
        ids, _ = exact.search(documents[rows], depth)
        negative = ~_is_known(problem, rows, ids)
        rank = np.cumsum(negative, axis=1) - 1
        negative &= rank < size
        row, column = np.nonzero(negative)
        nearest[rows[row], rank[row, column]] = ids[row, column]
    return nearest


def _is_known(problem: LabelProblem, rows: Ints, ids: Ints) -> NDArray[np.bool_]:
    """Return bool [R, K]: `ids` whose texts are known for their row."""
    known, row = problem.known_texts, np.arange(len(rows))
    texts = known.shape[1]
    known_keys = np.repeat(row, np.diff(known.indptr)[rows]) * texts + known[rows].indices
    return isin_sorted(known_keys, row[:, None] * texts + problem.label_texts[ids])


def sample_shortlists(shortlist: NDArray[np.int32], numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    """Sample labels from shortlists by uniform numbers.

    Args:
        shortlist: int32 [R, S], padded with -1.
        numbers: float64 [R, K] in [0, 1).

    Returns:
        int32 [R, K] labels of the same row, -1 for rows without a label.
    """
    lengths = (shortlist >= 0).sum(1, keepdims=True)
    return np.take_along_axis(shortlist, (numbers * lengths).astype(np.int64), axis=1)


class Mining(BaseAlgorithm):
    """A base algorithm with a shortlist of mined negatives per document, refreshed every few epochs.

    All true labels are excluded from a shortlist, not only the sampled positive: documents have several, and the loss
    would push the others away.
    """

    shortlist: NDArray[np.int32] | None = None
    """int32 [N, S], padded with -1; None before the first refresh."""

    def refresh_due(self, epoch: int) -> bool:
        settings = self.settings
        return settings.mining.negatives > 0 and is_due(epoch, settings.refresh_from, settings.refresh_every)

    def refresh(self, epoch: int, embed: Embed) -> None:
        self.shortlist = mine_shortlists(self.problem, embed("documents"), embed("labels"), SHORTLIST)

    def negatives(self, documents: Ints, rng: np.random.Generator) -> Ints:
        # consumed before the first refresh too, so that a refresh changes no other draw
        numbers = rng.random((len(documents), self.settings.mining.negatives))
        if self.shortlist is None:
            return np.zeros(0, np.int64)
        sampled = sample_shortlists(self.shortlist[documents], numbers).ravel()
        return np.asarray(sampled[sampled >= 0], np.int64)

    def state(self) -> dict[str, NDArray[np.generic]]:
        return {} if self.shortlist is None else {"shortlist": self.shortlist}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        self.shortlist = state.get("shortlist")  # type: ignore[assignment]
