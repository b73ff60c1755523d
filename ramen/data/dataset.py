"""The problem as one object with named matrices, and its form on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import listed_files
from ramen.data.sparse import without
from ramen.errors import ArtifactError
from ramen.files import RERUN, read_array, read_csr, read_texts, read_titles, write_csr, write_texts

PLACEHOLDER = "[EMPTY]"
"""Text of a document or label that has none, so that pooling has a token to pool."""


CANDIDATES_FILE = "candidates.npy"
GROUPS_FILE = "groups.npy"
OWN_LABELS_FILE = "filters/own_labels.npz"
TEST_GROUPS_FILE = "test_groups.npy"


@dataclass(frozen=True)
class Texts:
    """A numbered list of texts: `uids[i]` and `texts[i]` belong to item i of every matrix.

    Attributes:
        uids: identifiers.
        texts: what the encoder reads.
        titles: what the items are called, where their texts go on after it; None = the texts are titles.
    """

    uids: list[str]
    texts: list[str]
    titles: list[str] | None = None

    def __post_init__(self) -> None:
        assert len(self.uids) == len(self.texts) == len(self.names)

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def names(self) -> list[str]:
        """By which an item is recognised in another list: its title, or its text."""
        return self.texts if self.titles is None else self.titles

    def at(self, rows: Iterable[int]) -> Texts:
        """Some items, in the order of `rows`."""
        rows = list(rows)
        titles = None if self.titles is None else [self.titles[i] for i in rows]
        return Texts([self.uids[i] for i in rows], [self.texts[i] for i in rows], titles)

    @classmethod
    def read(cls, path: Path) -> Texts:
        """Read a Parquet file of `uid`, `text` and, where there are some, `title`."""
        return cls(*read_texts(path), read_titles(path))

    def write(self, path: Path) -> None:
        """Write a Parquet file of `uid`, `text` and, where there are some, `title`."""
        write_texts(path, self.uids, self.texts, self.titles)


@dataclass(frozen=True)
class AnchorSet:
    """One kind of anchor with its raw edges.

    Attributes:
        texts: M anchors.
        train: training document -> anchor, CSR N x M.
        labels: label -> anchor, CSR L x M.
        test: test document -> anchor, CSR N' x M, ground truth that only oracle experiments may hold; `Problem.read`
            never loads it.
    """

    texts: Texts
    train: sp.csr_matrix
    labels: sp.csr_matrix
    test: sp.csr_matrix | None = None


@dataclass(frozen=True)
class Dataset:
    """An extreme-classification problem.

    Attributes:
        train, test: N and N' documents.
        labels: L labels; the label universe is the same at training and test time.
        y_train, y_test: document -> label, CSR N x L and N' x L, values 1.0; empty rows stay.
        filter_train, filter_test: pairs that do not count: ignored as negatives in training, removed from the
            predictions in evaluation; CSR of the same shapes.
        anchor_sets: name -> anchors, in alphabetical order.
        candidates: int64, ascending: the labels that compete at test (zero-shot); None = all.
        groups: int64 [N], the group of each training document where test documents were set aside by whole groups
            (siblings, sites, sessions), so that held-out ones are too; None = each document is its own.
        own_labels: CSR N x L, the label that a training document is itself (see `filters`); None = self pairs are not
            filtered.
        test_groups: int64 [N'], the group of each test document, by which standard errors are clustered; numbered
            separately from `groups`; None = each document is its own group.
        files: part, named as in `statistics.text_lists` and `relations` -> the user's file that it was read from, for
            messages; only where row i of the one is row i of the other. Not written.
    """

    train: Texts
    test: Texts
    labels: Texts
    y_train: sp.csr_matrix
    y_test: sp.csr_matrix
    filter_train: sp.csr_matrix
    filter_test: sp.csr_matrix
    anchor_sets: Mapping[str, AnchorSet] = field(default_factory=dict)
    candidates: NDArray[np.int64] | None = None
    groups: NDArray[np.int64] | None = None
    own_labels: sp.csr_matrix | None = None
    test_groups: NDArray[np.int64] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, N', L)."""
        return len(self.train), len(self.test), len(self.labels)

    @property
    def unseen(self) -> NDArray[np.int64]:
        """Labels that training must not see, for they alone compete at test (zero-shot): int64 ascending, else none."""
        return np.zeros(0, np.int64) if self.candidates is None else self.candidates

    @cached_property
    def positives(self) -> sp.csr_matrix:
        """Training pairs to learn from, CSR N x L: the true ones but those that do not count."""
        return without(self.y_train, self.filter_train)

    def write(self, path: Path) -> None:
        """Write all files under `path` (a draft of the artifact `dataset`)."""
        for name in ("train", "test", "labels"):
            getattr(self, name).write(path / "texts" / f"{name}.parquet")
        for name in ("train", "test"):
            write_csr(path / "labels" / f"{name}.npz", getattr(self, f"y_{name}"))
            write_csr(path / "filters" / f"{name}.npz", getattr(self, f"filter_{name}"))
        if self.candidates is not None:
            np.save(path / CANDIDATES_FILE, self.candidates)
        if self.groups is not None:
            np.save(path / GROUPS_FILE, self.groups)
        if self.own_labels is not None:
            write_csr(path / OWN_LABELS_FILE, self.own_labels)
        if self.test_groups is not None:
            np.save(path / TEST_GROUPS_FILE, self.test_groups)
        for name, anchors in self.anchor_sets.items():
            folder = path / "anchors" / name
            anchors.texts.write(folder / "texts.parquet")
            write_csr(folder / "train.npz", anchors.train)
            write_csr(folder / "labels.npz", anchors.labels)
            if anchors.test is not None:
                write_csr(folder / "test.npz", anchors.test)

    @classmethod
    def read(cls, path: Path, anchors: bool = True) -> Dataset:
        """Read what `write` wrote, test edges of the anchors excepted, or all of the anchors.

        Raises:
            ArtifactError: a file is missing or damaged, or does not fit the others.
        """
        train, test, labels = (Texts.read(path / "texts" / f"{name}.parquet") for name in ("train", "test", "labels"))
        documents, width = {"train": len(train), "test": len(test)}, len(labels)
        matrices = {
            f"{field}_{name}": read_csr(path / folder / f"{name}.npz", (rows, width))
            for field, folder in (("y", "labels"), ("filter", "filters"))
            for name, rows in documents.items()
        }
        own = path / OWN_LABELS_FILE
        candidates = _read_optional(path / CANDIDATES_FILE)
        if candidates is not None and (np.diff(candidates, prepend=-1, append=width) <= 0).any():
            raise ArtifactError(f"{path / CANDIDATES_FILE}: not ascending numbers below {width:,}; {RERUN}")
        return cls(
            train,
            test,
            labels,
            **matrices,
            anchor_sets={
                name: _read_anchors(path / "anchors" / name, len(train), width)
                for name in (anchor_set_names(path) if anchors else ())
            },
            candidates=candidates,
            groups=_read_groups(path / GROUPS_FILE, len(train)),
            own_labels=read_csr(own, (len(train), width)) if own.is_file() else None,
            test_groups=_read_groups(path / TEST_GROUPS_FILE, len(test)),
        )


def _read_anchors(folder: Path, documents: int, labels: int) -> AnchorSet:
    """Read an anchor set without its test edges. Raises ArtifactError if a file is missing or does not fit."""
    texts = Texts.read(folder / "texts.parquet")
    sides = (read_csr(folder / f"{side}.npz", (rows, len(texts))) for side, rows in
             (("train", documents), ("labels", labels)))  # fmt: skip
    return AnchorSet(texts, *sides)


def _read_groups(file: Path, items: int) -> NDArray[np.int64] | None:
    groups = _read_optional(file, items)
    if groups is not None and items and groups.min() < 0:
        raise ArtifactError(f"{file}: a group is below 0; {RERUN}")
    return groups


def whole_groups(groups: NDArray[Any], order: Iterable[int], limit: int) -> NDArray[np.bool_]:
    """Which items to take so that at most `limit` are taken, groups whole; one that no longer fits is passed over.

    Args:
        groups: int [n], the group of each item.
        order: numbers of the groups, in which they are asked for.
        limit: largest number of items.
    """
    sizes, left = np.bincount(groups), limit
    taken = np.zeros(len(sizes), bool)
    for group in order:
        if sizes[group] <= left:
            taken[group] = True
            left -= int(sizes[group])
    return np.asarray(taken[groups])


def _read_optional(file: Path, items: int | None = None) -> NDArray[np.int64] | None:
    """Whole numbers of an .npy file, one per item; None if there is no such file."""
    return np.asarray(read_array(file, "iu", (items,)), np.int64) if file.exists() else None


def anchor_set_names(path: Path) -> list[str]:
    """Names of a dataset's anchor sets, in alphabetical order, without reading them.

    Folders that the dataset's manifest does not list are no anchor sets.
    """
    parts = [name.split("/") for name in listed_files(path)]
    return sorted(part[1] for part in parts if len(part) == 3 and part[0] == "anchors" and part[2] == "texts.parquet")


def read_test_edges(path: Path, name: str) -> sp.csr_matrix | None:
    """Test document -> anchor of a set, CSR N' x M, None if the source had none: for analyses, never for training."""
    file = path / "anchors" / name / "test.npz"
    return read_csr(file) if file.is_file() else None
