"""Self pairs and reciprocal pairs: planted ones are found, nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.data.dataset import PLACEHOLDER, Dataset, Texts
from ramen.data.filters import apply_rule, heldout_filter

PAGES = ["Apple", "Pear", "Plum", "Quince", "Medlar", "Sloe"]


def csr(rows: Sequence[Sequence[int]], columns: int) -> sp.csr_matrix:
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([column for row in rows for column in row], np.int32)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), columns))


def texts(names: Sequence[str], uids: Sequence[str] | None = None, titles: Sequence[str] | None = None) -> Texts:
    uids = names if uids is None else uids
    return Texts([f"id-{uid}" for uid in uids], list(names), None if titles is None else list(titles))


def see_also(kind: str = "uid") -> Dataset:
    """Pages 0-2 train, 3-4 test, all six are labels. Page 1 names test page 3; page 2 names itself; 4 names 1."""
    train, test, labels = PAGES[:3], PAGES[3:5], PAGES
    made = {
        name: texts(part, None if kind == "uid" else [f"{name}{i}" for i in range(len(part))])
        for name, part in (("train", train), ("test", test), ("labels", labels))
    }
    y_train, y_test = csr([[1], [3, 4], [0, 2]], 6), csr([[5], [1]], 6)
    return Dataset(made["train"], made["test"], made["labels"], y_train, y_test, csr([[]] * 3, 6), csr([[]] * 2, 6))


def pairs(matrix: sp.csr_matrix) -> set[tuple[int, int]]:
    return {(int(row), int(column)) for row, column in zip(*matrix.nonzero(), strict=True)}


@pytest.mark.parametrize("kind", ["uid", "text"])
def test_auto_filters_self_and_reciprocal_pairs(kind: str) -> None:
    found, counts = apply_rule(see_also(kind), "auto")
    assert pairs(found.filter_train) == {(0, 0), (1, 1)}, "page 2 names itself: a true pair stays"
    assert pairs(found.filter_test) == {(0, 3), (1, 4), (0, 1), (1, 1)}, "page 1 names both test pages"
    assert (counts.identity, counts.self_pairs, counts.reciprocal, counts.files) == (kind, 4, 2, 0)
    assert pairs(found.y_test) == {(0, 5), (1, 1)}, "the ground truth keeps a filtered pair, as pyxclib does"


def test_source_pairs_are_kept_and_rules_switch() -> None:
    problem = replace(see_also(), filter_test=csr([[0], []], 6))
    assert pairs(apply_rule(problem, "auto")[0].filter_test) == {(0, 0), (0, 3), (1, 4), (0, 1), (1, 1)}
    files, counts = apply_rule(problem, "files")
    assert pairs(files.filter_test) == {(0, 0)} and not files.filter_train.nnz and counts.files == 1
    none, counts = apply_rule(problem, "none")
    assert not none.filter_test.nnz and not none.filter_train.nnz and counts.files == 0
    assert files.own_labels is None and none.own_labels is None


def test_equal_texts_of_other_uids_are_other_items() -> None:
    labels = texts(["Mercury", *PAGES], ["planet", *PAGES])
    train = texts(["Mercury", "Apple"], ["metal", "Apple"])
    y_train, y_test = csr([[1], [2]], 7), csr([[3]], 7)
    problem = Dataset(train, texts(["other"]), labels, y_train, y_test, csr([[], []], 7), csr([[]], 7))
    assert pairs(apply_rule(problem, "auto")[0].filter_train) == {(1, 1)}


def test_texts_match_by_title_regardless_of_case_and_spaces() -> None:
    train = texts(
        ["Apple  a fruit", PLACEHOLDER, "gls:  models"], ["t0", "t1", "t2"], [" APPLE", PLACEHOLDER, "gls:  x"]
    )
    labels = texts(["Apple", "apple", PLACEHOLDER, "Gls: x", "gls: x"], ["l0", "l1", "l2", "l3", "l4"])
    problem = Dataset(
        train, texts(["x"], ["s0"]), labels, csr([[2]] * 3, 5), csr([[3]], 5), csr([[]] * 3, 5), csr([[]], 5)
    )
    found = pairs(apply_rule(problem, "auto")[0].filter_train)
    assert found == {(0, 0), (0, 1), (2, 4)}, "both labels of that name; one that is written exactly so comes first"


def test_data_without_such_pairs_are_untouched(tiny_problem: Dataset) -> None:
    uids = [f"other-{i}" for i in range(len(tiny_problem.train))]
    names = [f"a note: {text}" for text in tiny_problem.train.texts]
    problem = replace(tiny_problem, train=Texts(uids, names))
    found, counts = apply_rule(problem, "auto")
    assert pairs(found.filter_train) == pairs(problem.filter_train)
    assert pairs(found.filter_test) == pairs(problem.filter_test)
    assert counts.identity == "" and counts.self_pairs == counts.reciprocal == 0


def test_held_out_documents_compete_as_test_documents_do() -> None:
    """Documents 0 and 2 name each other; 0 is held out, so the pair of 2 gives away that of 0."""
    names = PAGES[:4]
    y_train = csr([[2], [3], [0], [1]], 4)
    problem = Dataset(texts(names), texts(["x"]), texts(names), y_train, csr([[1]], 4), csr([[]] * 4, 4), csr([[]], 4))
    problem, _ = apply_rule(problem, "auto")
    self_pairs = {(i, i) for i in range(4)}
    assert pairs(heldout_filter(problem, np.array([0]))) == self_pairs | {(0, 2)}
    assert pairs(heldout_filter(problem, np.array([0, 2]))) == self_pairs, "neither is trained on"
    assert pairs(heldout_filter(problem, np.array([], np.int64))) == self_pairs
