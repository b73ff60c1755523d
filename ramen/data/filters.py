"""Filters: document-label pairs to ignore in training and evaluation.

Two rules, those of the published filter files (pyxclib's misc tools):

- self pair: a document and the label that is the same item. Both get the same vector, so without a filter the label
  ranks first for its document. A self pair that is a true pair is kept.
- reciprocal pair: a test document A and a label B, where B is also a training document with the label A. The training
  pair (B, A) leaks the answer, so B is filtered for A even if the pair is true.
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
from ramen.data.sparse import to_binary, without

FilterRule = Literal["auto", "files", "none"]
Identity = Literal["uid", "text"]
MIN_SHARED_UIDS = 0.01
"""Uids identify items if at least this share of the smaller list is in both lists; fewer matches are coincidence."""


@dataclass(frozen=True)
class FilterCounts:
    """Number of filtered pairs by origin; a pair with two origins counts for both.

    Attributes:
        identity: what matches documents to labels; "" = no document is a label, or `data.filter_self` is not auto.
        files: training and test pairs from the source's filter files.
        self_pairs: self pairs of training and test documents.
        reciprocal: reciprocal pairs of test documents.
    """

    identity: Identity | Literal[""] = ""
    files: int = 0
    self_pairs: int = 0
    reciprocal: int = 0

    def __str__(self) -> str:
        match = f" (same {self.identity})" if self.identity else ""
        return f"{self.self_pairs:,} self{match}, {self.reciprocal:,} reciprocal, {self.files:,} from the source"


def apply_filter_rule(dataset: Dataset, rule: FilterRule) -> tuple[Dataset, FilterCounts]:
    """Return the dataset with the filters of `data.filter_self`, and their counts.

    Args:
        dataset: with the filters of its source.
        rule: "auto" adds self and reciprocal pairs; "files" keeps the source's filters; "none" removes all filters.
    """
    if rule == "none":
        empty = {f"filter_{part}": sp.csr_matrix(getattr(dataset, f"y_{part}").shape, dtype=np.float32)
                 for part in ("train", "test")}  # fmt: skip
        return replace(dataset, **empty), FilterCounts()
    files = int(dataset.filter_train.nnz + dataset.filter_test.nnz)
    if rule == "files":
        return dataset, FilterCounts(files=files)
    identity = choose_identity(dataset)
    own_train, own_test = (match_items(part, dataset.labels, identity) for part in (dataset.train, dataset.test))
    self_train, self_test = without(own_train, dataset.y_train), without(own_test, dataset.y_test)
    reciprocal = find_reciprocal_pairs(own_test, dataset.y_train, own_train)
    counts = FilterCounts(
        identity if own_train.nnz or own_test.nnz else "",
        files,
        int(self_train.nnz + self_test.nnz),
        int(without(reciprocal, own_test).nnz),
    )
    filtered = replace(
        dataset,
        filter_train=_union(dataset.filter_train, self_train),
        filter_test=_union(dataset.filter_test, self_test, reciprocal),
        own_labels=own_train,
    )
    return filtered, counts


def choose_identity(dataset: Dataset) -> Identity:
    """Return "uid" if uids match documents to labels, else "text"."""
    documents = Texts(dataset.train.uids + dataset.test.uids, dataset.train.names + dataset.test.names)
    labels = Texts(dataset.labels.uids, dataset.labels.names)
    needed = max(1.0, MIN_SHARED_UIDS * min(len(documents), len(labels)))
    return "uid" if len(shared_uids(documents, labels)) >= needed else "text"


def match_items(documents: Texts, labels: Texts, identity: Identity) -> sp.csr_matrix:
    """Return the labels that are the same item as a document: CSR documents x labels, ones.

    Args:
        documents, labels: the items to match.
        identity: "uid", or "text" = title, or text if there are no titles. Names match up to whitespace; if no label
            matches, case is ignored too.
    """
    if identity == "uid":
        rows = _find_keys(documents.uids, labels.uids)
    else:
        exact = _find_keys(*([_normalise_name(name) for name in texts.names] for texts in (documents, labels)))
        loose = _find_keys(
            *([_normalise_name(name).casefold() for name in texts.names] for texts in (documents, labels))
        )
        rows = [exact_match or loose_match for exact_match, loose_match in zip(exact, loose, strict=True)]
    indptr = np.cumsum([0, *map(len, rows)])
    columns = np.fromiter((column for row in rows for column in row), np.int32, int(indptr[-1]))
    shape = (len(documents), len(labels))
    return sp.csr_matrix((np.ones(len(columns), np.float32), columns, indptr), shape=shape)


def _find_keys(keys: Sequence[str], others: Sequence[str]) -> list[list[int]]:
    """Return the positions of each key in `others`; none for an empty key."""
    positions: dict[str, list[int]] = {}
    for number, key in enumerate(others):
        if key:
            positions.setdefault(key, []).append(number)
    return [positions.get(key, []) for key in keys]


def _normalise_name(name: str) -> str:
    """Collapse whitespace; "" for a placeholder."""
    return "" if name == PLACEHOLDER else " ".join(name.split())


def find_reciprocal_pairs(own: sp.csr_matrix, y_train: sp.csr_matrix, own_train: sp.csr_matrix) -> sp.csr_matrix:
    """Return the labels that are training documents labelled with the document: CSR documents x L.

    Args:
        own: CSR documents x L, from `match_items`.
        y_train: CSR N x L, the training pairs.
        own_train: CSR N x L, from `match_items`.
    """
    return to_binary((own @ y_train.T.tocsr()) @ own_train)


def heldout_filter(dataset: Dataset, held_out: NDArray[np.int64]) -> sp.csr_matrix:
    """Return the training filter plus the held-out documents' reciprocal pairs with the remaining documents.

    Held-out documents are then ranked under the same conditions as test documents.

    Args:
        dataset: with its filters.
        held_out: int64, rows of the training matrix.

    Returns:
        CSR N x L, ones.
    """
    if dataset.own_labels is None or not len(held_out):
        return dataset.filter_train
    trained = np.ones(len(dataset.train), np.float32)
    trained[held_out] = 0
    own = sp.diags(1 - trained).tocsr() @ dataset.own_labels
    reciprocal = find_reciprocal_pairs(own, sp.diags(trained) @ dataset.y_train, dataset.own_labels)
    return _union(dataset.filter_train, reciprocal)


def _union(*matrices: sp.csr_matrix) -> sp.csr_matrix:
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return to_binary(total)
