"""AugGT: shared anchors as ground truth, with caps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from on_disk import make_graph

from ramen.graph.metadata import Graph
from ramen.training.label_augmentation import HUB_EDGES, MAX_NEW_LABELS, augment_labels


def anchors(train: np.ndarray, labels: np.ndarray) -> dict[str, Graph]:
    return {"train": make_graph(sp.csr_matrix(train)), "labels": make_graph(sp.csr_matrix(labels))}


def nothing(rows: int, columns: int) -> sp.csr_matrix:
    return sp.csr_matrix((rows, columns), dtype=np.float32)


def test_golden_pairs() -> None:
    toy = anchors(np.array([[1, 0], [0, 1]]), np.array([[1, 1], [0, 0], [0, 1]]))
    found = augment_labels(nothing(2, 3), nothing(2, 3), {"toy": toy})
    assert {*zip(*found.nonzero(), strict=True)} == {(0, 0), (1, 0), (1, 2)}
    y = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 0]], np.float32))
    np.testing.assert_array_equal(augment_labels(y, nothing(2, 3), {"toy": toy}).toarray(), [[1, 1, 0], [1, 0, 1]])


def test_ignored_pairs_and_walked_edges_make_no_truth() -> None:
    toy = anchors(np.array([[1, 0], [0, 1]]), np.array([[1, 1], [0, 0], [0, 1]]))
    own = sp.csr_matrix(np.array([[0, 0, 0], [1, 0, 0]], np.float32))  # document 1 is label 0
    found = augment_labels(nothing(2, 3), own, {"toy": toy})
    assert {*zip(*found.nonzero(), strict=True)} == {(0, 0), (1, 2)}
    toy["labels"] = replace(toy["labels"], original=np.array([True, True, False]))
    found = augment_labels(nothing(2, 3), own, {"toy": toy})
    assert {*zip(*found.nonzero(), strict=True)} == {(0, 0)}


def test_hubs_are_passed_over_and_new_pairs_are_capped() -> None:
    rows = HUB_EDGES + 5
    hub = anchors(np.ones((rows, 1)), np.ones((3, 1)))
    assert not augment_labels(nothing(rows, 3), nothing(rows, 3), {"hub": hub}).nnz
    many = anchors(np.array([[1, 1]]), np.stack([np.ones(30), np.arange(30) >= 25], axis=1))
    found = augment_labels(nothing(1, 30), nothing(1, 30), {"many": many})
    assert found.nnz == MAX_NEW_LABELS and set(range(25, 30)) <= set(found.indices), "the most shared anchors first"
