"""Mining of hard negatives: the nearest labels of a document, over all labels, that are not true."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ramen.base.protocol import BaseAlgorithm, Embed, LabelProblem, Vectors, every
from ramen.retrieval import ExactSearch
from ramen.sampling import Ints, isin_sorted

SHORTLIST = 100
"""Nearest negatives per document from which mined ones are sampled (DEXML)."""
CELLS = 1 << 22
"""Labels retrieved at a time, over all documents of a block (bounds memory)."""


def shortlists(problem: LabelProblem, documents: Vectors, labels: Vectors, size: int) -> NDArray[np.int32]:
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
    labels_of = np.bincount(problem.label_texts, minlength=known.shape[1])
    excluded = (known @ labels_of).astype(np.int64)  # known labels per document, which retrieval must exceed
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
        negative = ~_known(problem, rows, ids)
        place = np.cumsum(negative, axis=1) - 1
        negative &= place < size
        row, column = np.nonzero(negative)
        nearest[rows[row], place[row, column]] = ids[row, column]
    return nearest


def _known(problem: LabelProblem, rows: Ints, ids: Ints) -> NDArray[np.bool_]:
    """Return bool [R, K]: `ids` whose texts are known for their row."""
    known, number = problem.known_texts, np.arange(len(rows))
    count = known.shape[1]
    stored = np.repeat(number, np.diff(known.indptr)[rows]) * count + known[rows].indices
    return isin_sorted(stored, number[:, None] * count + problem.label_texts[ids])


def drawn_from(shortlist: NDArray[np.int32], numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    """Sample labels from shortlists by uniform numbers.

    Args:
        shortlist: int32 [R, S], padded with -1.
        numbers: float64 [R, K] in [0, 1).

    Returns:
        int32 [R, K] labels of the same row, -1 for rows without a label.
    """
    filled = (shortlist >= 0).sum(1, keepdims=True)
    return np.take_along_axis(shortlist, (numbers * filled).astype(np.int64), axis=1)


class Mining(BaseAlgorithm):
    """A base algorithm with a shortlist of mined negatives per document, refreshed every few epochs.

    All true labels are excluded from a shortlist, not only the sampled positive: documents have several, and the loss
    would push the others away.
    """

    shortlist: NDArray[np.int32] | None = None
    """int32 [N, S], -1 = none."""

    def refresh_due(self, epoch: int) -> bool:
        settings = self.settings
        return settings.mining.negatives > 0 and every(epoch, settings.refresh_from, settings.refresh_every)

    def refresh(self, epoch: int, embed: Embed) -> None:
        self.shortlist = shortlists(self.problem, embed("documents"), embed("labels"), SHORTLIST)

    def negatives(self, documents: Ints, rng: np.random.Generator) -> Ints:
        # drawn before the first refresh too, so that a refresh changes no other draw
        drawn = rng.random((len(documents), self.settings.mining.negatives))
        if self.shortlist is None:
            return np.zeros(0, np.int64)
        chosen = drawn_from(self.shortlist[documents], drawn).ravel()
        return np.asarray(chosen[chosen >= 0], np.int64)

    def state(self) -> dict[str, NDArray[np.generic]]:
        return {} if self.shortlist is None else {"shortlist": self.shortlist}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        self.shortlist = state.get("shortlist")  # type: ignore[assignment]
