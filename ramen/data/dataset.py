"""The dataset: texts, label matrices and anchor sets, in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import list_files
from ramen.data.sparse import without
from ramen.errors import ArtifactError
from ramen.files import RERUN, read_array, read_csr, read_texts, read_titles, write_csr, write_texts

PLACEHOLDER = "[EMPTY]"
"""Replaces an empty text of a document or label, so that pooling has at least one token."""

CANDIDATES_FILE = "candidates.npy"
GROUPS_FILE = "groups.npy"
OWN_LABELS_FILE = "filters/own_labels.npz"
TEST_GROUPS_FILE = "test_groups.npy"


class Side(StrEnum):
    """The two sides of an anchor set: training documents (graph G_XA) and labels (graph G_ZA).

    The value is the side's name in file names, counts and random streams.
    """

    DOCUMENT = "train"
    LABEL = "labels"

    @property
    def item(self) -> Literal["document", "label"]:
        """An item of the side, as in the name of a regulariser: "document" or "label"."""
        return "document" if self is Side.DOCUMENT else "label"

    @property
    def role(self) -> Literal["documents", "labels"]:
        """Role of the side's texts in a `TextTable`: "documents" or "labels"."""
        return "documents" if self is Side.DOCUMENT else "labels"


@dataclass(frozen=True)
class Texts:
    """A numbered list of texts: `uids[i]` and `texts[i]` belong to item i of every matrix.

    Attributes:
        uids: identifiers.
        texts: input of the encoder.
        titles: names of the items if `texts` hold more than the names; None = `texts` are the names.
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
        """Titles, or texts if there are no titles: what identifies an item in another list."""
        return self.texts if self.titles is None else self.titles

    def select(self, rows: Iterable[int]) -> Texts:
        """Return the items at `rows`, in that order."""
        rows = list(rows)
        titles = None if self.titles is None else [self.titles[i] for i in rows]
        return Texts([self.uids[i] for i in rows], [self.texts[i] for i in rows], titles)

    @classmethod
    def read(cls, path: Path) -> Texts:
        """Read a Parquet file with the columns `uid`, `text` and, optionally, `title`."""
        return cls(*read_texts(path), read_titles(path))

    def write(self, path: Path) -> None:
        """Write a Parquet file with the columns `uid`, `text` and, if there are titles, `title`."""
        write_texts(path, self.uids, self.texts, self.titles)


@dataclass(frozen=True)
class AnchorSet:
    """Anchors of one kind and their edges before cleaning and walks.

    Attributes:
        texts: M anchors.
        train: training document -> anchor, CSR N x M.
        labels: label -> anchor, CSR L x M.
        test: test document -> anchor, CSR N' x M. Ground truth for oracle experiments only: `Dataset.read` never
            loads it.
    """

    texts: Texts
    train: sp.csr_matrix
    labels: sp.csr_matrix
    test: sp.csr_matrix | None = None


@dataclass(frozen=True)
class Dataset:
    """An extreme-classification dataset.

    Attributes:
        train, test: N and N' documents.
        labels: L labels, the same set at training and test time.
        y_train, y_test: document -> label, CSR N x L and N' x L, values 1.0. Rows may be empty.
        filter_train, filter_test: ignored pairs, CSR of the same shapes: not sampled as negatives in training, removed
            from the predictions in evaluation.
        anchor_sets: name -> anchors, in alphabetical order.
        candidates: int64, ascending: the only labels that are ranked at test (zero-shot); None = all labels.
        groups: int64 [N], group of each training document (its source package, site, session) if whole groups were
            set aside for testing; held-out documents are then split off by group too. None = one group per document.
        own_labels: CSR N x L, the label that is the same item as the training document (see `filters`); None = self
            pairs are not filtered.
        test_groups: int64 [N'], group of each test document, numbered independently of `groups`: clusters for standard
            errors. None = one group per document.
        files: part (named as in `statistics.iter_texts` and `iter_matrices`) -> the user's file that it was read from,
            for messages; only if row i of the part is row i of the file. Not written to disk.
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
        """Labels hidden from training, the only ones ranked at test (zero-shot): int64, ascending; else empty."""
        return np.zeros(0, np.int64) if self.candidates is None else self.candidates

    @cached_property
    def positives(self) -> sp.csr_matrix:
        """Training pairs without the filtered ones, CSR N x L."""
        return without(self.y_train, self.filter_train)

    def write(self, path: Path) -> None:
        """Write all files under `path`, the draft of a `dataset` artifact."""
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
        """Read the files of `write`, except the anchors' test edges.

        Args:
            path: folder of the artifact.
            anchors: whether to read the anchor sets.

        Raises:
            ArtifactError: a file is missing, damaged, or inconsistent with the others.
        """
        train, test, labels = (Texts.read(path / "texts" / f"{name}.parquet") for name in ("train", "test", "labels"))
        documents, label_count = {"train": len(train), "test": len(test)}, len(labels)
        matrices = {
            f"{prefix}_{name}": read_csr(path / folder / f"{name}.npz", (rows, label_count))
            for prefix, folder in (("y", "labels"), ("filter", "filters"))
            for name, rows in documents.items()
        }
        own_labels_file = path / OWN_LABELS_FILE
        candidates = _read_optional(path / CANDIDATES_FILE)
        if candidates is not None and (np.diff(candidates, prepend=-1, append=label_count) <= 0).any():
            raise ArtifactError(f"{path / CANDIDATES_FILE}: expected ascending numbers below {label_count:,}; {RERUN}")
        return cls(
            train,
            test,
            labels,
            **matrices,
            anchor_sets={
                name: _read_anchors(path / "anchors" / name, len(train), label_count)
                for name in (anchor_set_names(path) if anchors else ())
            },
            candidates=candidates,
            groups=_read_groups(path / GROUPS_FILE, len(train)),
            own_labels=read_csr(own_labels_file, (len(train), label_count)) if own_labels_file.is_file() else None,
            test_groups=_read_groups(path / TEST_GROUPS_FILE, len(test)),
        )


def _read_anchors(folder: Path, documents: int, labels: int) -> AnchorSet:
    """Read an anchor set without its test edges. Raises ArtifactError if a file is missing or inconsistent."""
    texts = Texts.read(folder / "texts.parquet")
    train = read_csr(folder / "train.npz", (documents, len(texts)))
    return AnchorSet(texts, train, read_csr(folder / "labels.npz", (labels, len(texts))))


def _read_groups(file: Path, items: int) -> NDArray[np.int64] | None:
    groups = _read_optional(file, items)
    if groups is not None and items and groups.min() < 0:
        raise ArtifactError(f"{file}: group numbers must not be negative, found {groups.min()}; {RERUN}")
    return groups


def choose_whole_groups(groups: NDArray[Any], order: Iterable[int], limit: int) -> NDArray[np.bool_]:
    """Return which items to take, bool [n], so that whole groups are taken and at most `limit` items.

    Groups are taken in the given order; a group that no longer fits is skipped.

    Args:
        groups: int [n], group of each item.
        order: group numbers.
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
    """Read the integers of an .npy file, one per item; None if the file does not exist."""
    return np.asarray(read_array(file, "iu", (items,)), np.int64) if file.exists() else None


def anchor_set_names(path: Path) -> list[str]:
    """Return the names of the anchor sets that a dataset's manifest lists, in alphabetical order."""
    parts = [name.split("/") for name in list_files(path)]
    return sorted(part[1] for part in parts if len(part) == 3 and part[0] == "anchors" and part[2] == "texts.parquet")


def read_test_edges(path: Path, name: str) -> sp.csr_matrix | None:
    """Read the edges test document -> anchor of a set, CSR N' x M; None if the source had none.

    For analyses only, never for training.
    """
    file = path / "anchors" / name / "test.npz"
    return read_csr(file) if file.is_file() else None
