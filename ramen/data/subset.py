"""Deterministic choice of documents by keyed hash, and the problem that remains of a choice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import AnchorSet, Dataset, Texts, whole_groups


def share(name: str, *, seed: int, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: blake2b keyed by seed and purpose."""
    key = f"{purpose}:{seed}".encode()
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") / 2**64


def choose(groups: Sequence[str], limit: int, *, seed: int) -> NDArray[np.bool_]:
    """Which items to keep so that at most `limit` remain; items of one group stay or go together.

    Groups are taken in the order of their hash; one that no longer fits is passed over.

    Args:
        groups: group of each item.
        limit: largest number of items; 0 keeps all.
        seed: key of the hash.
    """
    if not limit or len(groups) <= limit:
        return np.ones(len(groups), bool)
    names, group = np.unique(np.array(groups, dtype=object).astype(str), return_inverse=True)
    order = sorted(range(len(names)), key=lambda i: share(str(names[i]), seed=seed, purpose="subset"))
    return whole_groups(group, order, limit)


def restrict(problem: Dataset, train: NDArray[np.bool_], test: NDArray[np.bool_]) -> Dataset:
    """The problem with only the chosen documents, the labels these have, and the anchors these and the labels have.

    Args:
        problem: the whole problem.
        train, test: which documents stay, bool [N] and [N'].
    """
    y_train, y_test = problem.y_train[train], problem.y_test[test]
    labels = _used(y_train, y_test)
    sets = {name: _restrict_anchors(anchors, train, test, labels) for name, anchors in problem.anchor_sets.items()}
    return replace(
        problem,
        train=pick(problem.train, train),
        test=pick(problem.test, test),
        labels=pick(problem.labels, labels),
        y_train=y_train[:, labels],
        y_test=y_test[:, labels],
        filter_train=problem.filter_train[train][:, labels],
        filter_test=problem.filter_test[test][:, labels],
        anchor_sets=sets,
        groups=None if problem.groups is None else problem.groups[train],
        test_groups=None if problem.test_groups is None else problem.test_groups[test],
        files={},
    )


def hide_labels(problem: Dataset, fraction: float, *, seed: int) -> Dataset:
    """The zero-shot problem: a random share of the labels unseen in training, and alone to be found at test.

    Unseen labels lose their training pairs and their graph edges; their texts stay. Test documents without an unseen
    label are dropped, pairs with seen labels do not count, and only unseen labels compete.

    Args:
        problem: the whole problem.
        fraction: share of the labels, drawn by hash.
        seed: key of the hash.
    """
    draws = np.array([share(uid, seed=seed, purpose="unseen") for uid in problem.labels.uids])
    unseen = draws < fraction
    seen = sp.diags((~unseen).astype(np.float32)).tocsr()
    hidden = sp.diags(unseen.astype(np.float32)).tocsr()
    y_test = _nonzero(problem.y_test @ hidden)
    kept = np.diff(y_test.indptr) > 0
    sets = {
        name: replace(
            anchors,
            labels=_nonzero(seen @ anchors.labels),
            test=None if anchors.test is None else anchors.test[kept],
        )
        for name, anchors in problem.anchor_sets.items()
    }
    return replace(
        problem,
        test=pick(problem.test, kept),
        y_train=_nonzero(problem.y_train @ seen),
        y_test=y_test[kept],
        filter_train=_nonzero(problem.filter_train @ seen),
        filter_test=problem.filter_test[kept],
        test_groups=None if problem.test_groups is None else problem.test_groups[kept],
        candidates=np.flatnonzero(unseen),
        anchor_sets=sets,
        files={},
    )


def _nonzero(matrix: sp.csr_matrix) -> sp.csr_matrix:
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def pick(texts: Texts, keep: NDArray[np.bool_]) -> Texts:
    """The chosen rows of a list of texts."""
    return texts.at(np.flatnonzero(keep))


def select_anchors(anchors: AnchorSet, keep: NDArray[np.bool_]) -> AnchorSet:
    """The anchor set with only the chosen anchors, bool [M]."""
    edges = None if anchors.test is None else anchors.test[:, keep]
    return AnchorSet(pick(anchors.texts, keep), anchors.train[:, keep], anchors.labels[:, keep], edges)


def _restrict_anchors(
    anchors: AnchorSet, train: NDArray[np.bool_], test: NDArray[np.bool_], labels: NDArray[np.bool_]
) -> AnchorSet:
    chosen = replace(
        anchors,
        train=anchors.train[train],
        labels=anchors.labels[labels],
        test=None if anchors.test is None else anchors.test[test],
    )
    return select_anchors(chosen, _used(chosen.train, chosen.labels))


def _used(*matrices: sp.csr_matrix) -> NDArray[np.bool_]:
    """Columns with an entry in any of the matrices."""
    used = np.zeros(matrices[0].shape[1], bool)
    for matrix in matrices:
        used[matrix.indices] = True
    return used
