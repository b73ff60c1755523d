"""Self pairs and reciprocal pairs are filtered, and no other pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.data.dataset import PLACEHOLDER, Dataset, Texts
from ramen.data.filters import apply_filter_rule, heldout_filter

PAGES = ["Apple", "Pear", "Plum", "Quince", "Medlar", "Sloe"]


def csr(rows: Sequence[Sequence[int]], columns: int) -> sp.csr_matrix:
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([column for row in rows for column in row], np.int32)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), columns))


def make_texts(names: Sequence[str], uids: Sequence[str] | None = None, titles: Sequence[str] | None = None) -> Texts:
    uids = names if uids is None else uids
    return Texts([f"id-{uid}" for uid in uids], list(names), None if titles is None else list(titles))


def make_see_also(kind: str = "uid") -> Dataset:
    """Make a dataset of pages: 0-2 train, 3-4 test, all six are labels. 1 links to test page 3, 2 to itself, 4 to 1."""
    train, test, labels = PAGES[:3], PAGES[3:5], PAGES
    made = {
        name: make_texts(part, None if kind == "uid" else [f"{name}{i}" for i in range(len(part))])
        for name, part in (("train", train), ("test", test), ("labels", labels))
    }
    y_train, y_test = csr([[1], [3, 4], [0, 2]], 6), csr([[5], [1]], 6)
    return Dataset(made["train"], made["test"], made["labels"], y_train, y_test, csr([[]] * 3, 6), csr([[]] * 2, 6))


def pair_set(matrix: sp.csr_matrix) -> set[tuple[int, int]]:
    return {(int(row), int(column)) for row, column in zip(*matrix.nonzero(), strict=True)}


@pytest.mark.parametrize("kind", ["uid", "text"])
def test_auto_filters_self_and_reciprocal_pairs(kind: str) -> None:
    found, counts = apply_filter_rule(make_see_also(kind), "auto")
    assert pair_set(found.filter_train) == {(0, 0), (1, 1)}, "the self pair of page 2 is true and kept"
    assert pair_set(found.filter_test) == {(0, 3), (1, 4), (0, 1), (1, 1)}, "page 1 has both test pages as labels"
    assert (counts.identity, counts.self_pairs, counts.reciprocal, counts.files) == (kind, 4, 2, 0)
    assert pair_set(found.y_test) == {(0, 5), (1, 1)}, "the ground truth keeps a filtered pair, as pyxclib does"


def test_auto_keeps_source_pairs_and_rules_can_be_switched_off() -> None:
    dataset = replace(make_see_also(), filter_test=csr([[0], []], 6))
    assert pair_set(apply_filter_rule(dataset, "auto")[0].filter_test) == {(0, 0), (0, 3), (1, 4), (0, 1), (1, 1)}
    files, counts = apply_filter_rule(dataset, "files")
    assert pair_set(files.filter_test) == {(0, 0)} and not files.filter_train.nnz and counts.files == 1
    none, counts = apply_filter_rule(dataset, "none")
    assert not none.filter_test.nnz and not none.filter_train.nnz and counts.files == 0
    assert files.own_labels is None and none.own_labels is None


def test_equal_texts_with_different_uids_are_different_items() -> None:
    labels = make_texts(["Mercury", *PAGES], ["planet", *PAGES])
    train = make_texts(["Mercury", "Apple"], ["metal", "Apple"])
    y_train, y_test = csr([[1], [2]], 7), csr([[3]], 7)
    dataset = Dataset(train, make_texts(["other"]), labels, y_train, y_test, csr([[], []], 7), csr([[]], 7))
    assert pair_set(apply_filter_rule(dataset, "auto")[0].filter_train) == {(1, 1)}


def test_items_match_by_title_ignoring_case_and_whitespace() -> None:
    train = make_texts(
        ["Apple  a fruit", PLACEHOLDER, "gls:  models"], ["t0", "t1", "t2"], [" APPLE", PLACEHOLDER, "gls:  x"]
    )
    labels = make_texts(["Apple", "apple", PLACEHOLDER, "Gls: x", "gls: x"], ["l0", "l1", "l2", "l3", "l4"])
    dataset = Dataset(
        train, make_texts(["x"], ["s0"]), labels, csr([[2]] * 3, 5), csr([[3]], 5), csr([[]] * 3, 5), csr([[]], 5)
    )
    found = pair_set(apply_filter_rule(dataset, "auto")[0].filter_train)
    assert found == {(0, 0), (0, 1), (2, 4)}, "both labels of that name match; an exact match takes precedence"


def test_data_without_self_or_reciprocal_pairs_is_unchanged(tiny_dataset: Dataset) -> None:
    uids = [f"other-{i}" for i in range(len(tiny_dataset.train))]
    names = [f"a note: {text}" for text in tiny_dataset.train.texts]
    dataset = replace(tiny_dataset, train=Texts(uids, names))
    found, counts = apply_filter_rule(dataset, "auto")
    assert pair_set(found.filter_train) == pair_set(dataset.filter_train)
    assert pair_set(found.filter_test) == pair_set(dataset.filter_test)
    assert counts.identity == "" and counts.self_pairs == counts.reciprocal == 0


def test_held_out_documents_are_filtered_like_test_documents() -> None:
    """Documents 0 and 2 have each other as labels; 0 is held out, so the pair of 2 leaks the pair of 0."""
    names = PAGES[:4]
    y_train, y_test = csr([[2], [3], [0], [1]], 4), csr([[1]], 4)
    train, test, labels = make_texts(names), make_texts(["x"]), make_texts(names)
    dataset = Dataset(train, test, labels, y_train, y_test, csr([[]] * 4, 4), csr([[]], 4))
    dataset, _ = apply_filter_rule(dataset, "auto")
    self_pairs = {(i, i) for i in range(4)}
    assert pair_set(heldout_filter(dataset, np.array([0]))) == self_pairs | {(0, 2)}
    assert pair_set(heldout_filter(dataset, np.array([0, 2]))) == self_pairs, "neither is trained on"
    assert pair_set(heldout_filter(dataset, np.array([], np.int64))) == self_pairs
