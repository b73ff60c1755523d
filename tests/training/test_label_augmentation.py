"""Label augmentation (AugGT): labels that share an anchor with a document become true, up to a limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from on_disk import make_graph

from ramen.data.dataset import Side
from ramen.graph.metadata import Graph
from ramen.training.label_augmentation import HUB_EDGES, MAX_NEW_LABELS, augment_labels


def make_graphs(documents: np.ndarray, labels: np.ndarray) -> dict[Side, Graph]:
    return {Side.DOCUMENT: make_graph(sp.csr_matrix(documents)), Side.LABEL: make_graph(sp.csr_matrix(labels))}


def empty(rows: int, columns: int) -> sp.csr_matrix:
    return sp.csr_matrix((rows, columns), dtype=np.float32)


def pairs_of(matrix: sp.csr_matrix) -> set[tuple[int, int]]:
    return {*zip(*matrix.nonzero(), strict=True)}


TOY = make_graphs(np.array([[1, 0], [0, 1]]), np.array([[1, 1], [0, 0], [0, 1]]))


def test_labels_that_share_an_anchor_are_added() -> None:
    assert pairs_of(augment_labels(empty(2, 3), empty(2, 3), {"toy": TOY})) == {(0, 0), (1, 0), (1, 2)}
    y = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 0]], np.float32))
    np.testing.assert_array_equal(augment_labels(y, empty(2, 3), {"toy": TOY}).toarray(), [[1, 1, 0], [1, 0, 1]])


def test_ignored_pairs_and_edges_of_the_walk_add_no_label() -> None:
    ignored = sp.csr_matrix(np.array([[0, 0, 0], [1, 0, 0]], np.float32))  # document 1 is label 0
    assert pairs_of(augment_labels(empty(2, 3), ignored, {"toy": TOY})) == {(0, 0), (1, 2)}
    walked = TOY | {Side.LABEL: replace(TOY[Side.LABEL], original=np.array([True, True, False]))}
    assert pairs_of(augment_labels(empty(2, 3), ignored, {"toy": walked})) == {(0, 0)}


def test_hubs_are_skipped_and_the_number_of_new_labels_is_limited() -> None:
    rows = HUB_EDGES + 5
    hub = make_graphs(np.ones((rows, 1)), np.ones((3, 1)))
    assert not augment_labels(empty(rows, 3), empty(rows, 3), {"hub": hub}).nnz
    many = make_graphs(np.array([[1, 1]]), np.stack([np.ones(30), np.arange(30) >= 25], axis=1))
    added = augment_labels(empty(1, 30), empty(1, 30), {"many": many})
    assert added.nnz == MAX_NEW_LABELS and set(range(25, 30)) <= set(added.indices), "labels with most shared anchors"
