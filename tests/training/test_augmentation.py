"""AugGT: shared anchors as ground truth, with caps."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from ramen.data.dataset import AnchorSet, Texts
from ramen.training.augmentation import HUB, MOST_NEW, augmented


def anchors(train: np.ndarray, labels: np.ndarray) -> AnchorSet:
    names = [f"a{i}" for i in range(train.shape[1])]
    return AnchorSet(
        Texts(names, names), sp.csr_matrix(train, dtype=np.float32), sp.csr_matrix(labels, dtype=np.float32)
    )


def test_golden_pairs() -> None:
    toy = anchors(np.array([[1, 0], [0, 1]]), np.array([[1, 1], [0, 0], [0, 1]]))
    none = sp.csr_matrix((2, 3), dtype=np.float32)
    found = augmented(none, {"toy": toy})
    assert {*zip(*found.nonzero(), strict=True)} == {(0, 0), (1, 0), (1, 2)}
    y = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 0]], np.float32))
    np.testing.assert_array_equal(augmented(y, {"toy": toy}).toarray(), [[1, 1, 0], [1, 0, 1]])


def test_hubs_are_passed_over_and_new_pairs_are_capped() -> None:
    rows = HUB + 5
    hub = anchors(np.ones((rows, 1)), np.ones((3, 1)))
    assert not augmented(sp.csr_matrix((rows, 3), dtype=np.float32), {"hub": hub}).nnz
    many = anchors(np.array([[1, 1]]), np.stack([np.ones(30), np.arange(30) >= 25], axis=1))
    found = augmented(sp.csr_matrix((1, 30), dtype=np.float32), {"many": many})
    assert found.nnz == MOST_NEW and set(range(25, 30)) <= set(found.indices), "the most shared anchors first"
