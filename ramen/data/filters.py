"""Pairs that must not count because document and label are the same item, or because training gives the answer away.

Two rules, those by which the published filter files were made (methods: pyxclib's misc tools):

- self pair: a document and the label that is the same item. The encoder gives both the same vector, so without a filter
  the label is the first answer for its own document. A self pair that is a true pair stays;
- reciprocal pair: a test document A and a label B, where B is also a training document with the label A. The training
  pair (B, A) gives the answer away, so B is filtered for A whether it is true or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import PLACEHOLDER, Dataset, Texts
from ramen.data.identity import shared_uids
from ramen.data.sparse import binary, without

FilterRule = Literal["auto", "files", "none"]
Identity = Literal["uid", "text"]
IDENTIFYING = 0.01
"""Uids identify items across documents and labels if this share of the smaller list is in both; fewer is chance."""


@dataclass(frozen=True)
class FilterCounts:
    """Filtered pairs by origin; a pair of two origins counts for both.

    Attributes:
        identity: by what a document is recognised as a label; "" = none is a label, or `data.filter_self` is not auto.
        files: training and test pairs named by the source.
        self_pairs: training and test documents' pairs with themselves.
        reciprocal: test pairs.
    """

    identity: Identity | Literal[""] = ""
    files: int = 0
    self_pairs: int = 0
    reciprocal: int = 0

    def __str__(self) -> str:
        by = f" (same {self.identity})" if self.identity else ""
        return f"{self.self_pairs:,} self{by}, {self.reciprocal:,} reciprocal, {self.files:,} named by the source"


def apply_rule(problem: Dataset, rule: FilterRule) -> tuple[Dataset, FilterCounts]:
    """The problem with the filters that `data.filter_self` asks for.

    Args:
        problem: with the filters that its source names.
        rule: "auto" adds self and reciprocal pairs; "files" keeps what the source names; "none" filters nothing.
    """
    if rule == "none":
        empty = {f"filter_{part}": sp.csr_matrix(getattr(problem, f"y_{part}").shape, dtype=np.float32)
                 for part in ("train", "test")}  # fmt: skip
        return replace(problem, **empty), FilterCounts()
    files = int(problem.filter_train.nnz + problem.filter_test.nnz)
    if rule == "files":
        return problem, FilterCounts(files=files)
    identity = identify(problem)
    own_train, own_test = (same_items(part, problem.labels, identity) for part in (problem.train, problem.test))
    self_train, self_test = without(own_train, problem.y_train), without(own_test, problem.y_test)
    reciprocal = reciprocal_pairs(own_test, problem.y_train, own_train)
    counts = FilterCounts(
        identity if own_train.nnz or own_test.nnz else "",
        files,
        int(self_train.nnz + self_test.nnz),
        int(without(reciprocal, own_test).nnz),
    )
    filtered = replace(
        problem,
        filter_train=_union(problem.filter_train, self_train),
        filter_test=_union(problem.filter_test, self_test, reciprocal),
        own_labels=own_train,
    )
    return filtered, counts


def identify(problem: Dataset) -> Identity:
    """Whether uids tell which documents are labels too; else their texts do."""
    documents = Texts(problem.train.uids + problem.test.uids, problem.train.names + problem.test.names)
    labels = Texts(problem.labels.uids, problem.labels.names)
    fewest = max(1.0, IDENTIFYING * min(len(documents), len(labels)))
    return "uid" if len(shared_uids(documents, labels)) >= fewest else "text"


def same_items(documents: Texts, labels: Texts, identity: Identity) -> sp.csr_matrix:
    """Which labels are the document itself: CSR documents x labels, ones.

    Args:
        documents, labels: two lists of items.
        identity: "uid", or "text": the title, or the text where there are no titles; labels that differ in case and
            spaces alone count where none is written exactly so.
    """
    if identity == "uid":
        rows = _matches(documents.uids, labels.uids)
    else:
        exact = _matches(*([_spaced(name) for name in texts.names] for texts in (documents, labels)))
        loose = _matches(*([_spaced(name).casefold() for name in texts.names] for texts in (documents, labels)))
        rows = [found or others for found, others in zip(exact, loose, strict=True)]
    indptr = np.cumsum([0, *map(len, rows)])
    columns = np.fromiter((column for row in rows for column in row), np.int32, int(indptr[-1]))
    shape = (len(documents), len(labels))
    return sp.csr_matrix((np.ones(len(columns), np.float32), columns, indptr), shape=shape)


def _matches(keys: Sequence[str], others: Sequence[str]) -> list[list[int]]:
    """Places of each key among others; none of an empty key."""
    place: dict[str, list[int]] = {}
    for number, key in enumerate(others):
        if key:
            place.setdefault(key, []).append(number)
    return [place.get(key, []) for key in keys]


def _spaced(name: str) -> str:
    """A name with single spaces; "" for a text that is missing."""
    return "" if name == PLACEHOLDER else " ".join(name.split())


def reciprocal_pairs(own: sp.csr_matrix, y_train: sp.csr_matrix, own_train: sp.csr_matrix) -> sp.csr_matrix:
    """Labels whose training documents name the document as their label: CSR documents x L.

    Args:
        own: CSR documents x L, of `same_items`.
        y_train: CSR N x L, the training pairs.
        own_train: CSR N x L, of `same_items`.
    """
    return binary((own @ y_train.T.tocsr()) @ own_train)


def heldout_filter(problem: Dataset, held_out: NDArray[np.int64]) -> sp.csr_matrix:
    """The training filter with, for held-out documents, the reciprocal pairs of the documents that are trained on.

    Held-out documents then compete as test documents do.

    Args:
        problem: with its filters.
        held_out: int64, rows of the training matrix.

    Returns:
        CSR N x L, ones.
    """
    if problem.own_labels is None or not len(held_out):
        return problem.filter_train
    trained = np.ones(len(problem.train), np.float32)
    trained[held_out] = 0
    rows = sp.diags(1 - trained).tocsr() @ problem.own_labels
    return _union(problem.filter_train, reciprocal_pairs(rows, sp.diags(trained) @ problem.y_train, problem.own_labels))


def _union(*matrices: sp.csr_matrix) -> sp.csr_matrix:
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return binary(total)
