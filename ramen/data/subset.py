"""Deterministic subsets of a dataset, drawn by keyed hashes: fewer documents, or hidden labels (zero-shot)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import AnchorSet, Dataset, Texts, choose_whole_groups


def hash_fraction(name: str, *, seed: int, purpose: str) -> float:
    """Return a number in [0, 1) that depends only on the arguments: blake2b keyed by seed and purpose."""
    key = f"{purpose}:{seed}".encode()
    digest = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") / 2**64


def choose_documents(groups: Sequence[str], limit: int, *, seed: int) -> NDArray[np.bool_]:
    """Return which documents to keep, bool [n], so that whole groups are kept and at most `limit` documents.

    Groups are taken in the order of their hash; a group that no longer fits is skipped.

    Args:
        groups: group of each document.
        limit: largest number of documents; 0 = keep all.
        seed: key of the hash.
    """
    if not limit or len(groups) <= limit:
        return np.ones(len(groups), bool)
    names, group = np.unique(np.array(groups, dtype=object).astype(str), return_inverse=True)
    order = sorted(range(len(names)), key=lambda i: hash_fraction(str(names[i]), seed=seed, purpose="subset"))
    return choose_whole_groups(group, order, limit)


def restrict(dataset: Dataset, train: NDArray[np.bool_], test: NDArray[np.bool_]) -> Dataset:
    """Return the dataset with only the chosen documents, their labels, and the anchors of both.

    Args:
        dataset: the whole dataset.
        train, test: documents to keep, bool [N] and [N'].
    """
    y_train, y_test = dataset.y_train[train], dataset.y_test[test]
    labels = _used_columns(y_train, y_test)
    sets = {name: _restrict_anchors(anchors, train, test, labels) for name, anchors in dataset.anchor_sets.items()}
    return replace(
        dataset,
        train=select_texts(dataset.train, train),
        test=select_texts(dataset.test, test),
        labels=select_texts(dataset.labels, labels),
        y_train=y_train[:, labels],
        y_test=y_test[:, labels],
        filter_train=dataset.filter_train[train][:, labels],
        filter_test=dataset.filter_test[test][:, labels],
        anchor_sets=sets,
        groups=None if dataset.groups is None else dataset.groups[train],
        test_groups=None if dataset.test_groups is None else dataset.test_groups[test],
        files={},
    )


def hide_labels(dataset: Dataset, fraction: float, *, seed: int) -> Dataset:
    """Return the zero-shot dataset: a random share of the labels is unseen in training and ranked alone at test.

    Unseen labels lose their training pairs and their graph edges, but keep their texts. Test documents without an
    unseen label are dropped, and so are test pairs with seen labels.

    Args:
        dataset: the whole dataset.
        fraction: share of the labels to hide, drawn by hash.
        seed: key of the hash.
    """
    draws = np.array([hash_fraction(uid, seed=seed, purpose="unseen") for uid in dataset.labels.uids])
    unseen = draws < fraction
    seen = sp.diags((~unseen).astype(np.float32)).tocsr()
    hidden = sp.diags(unseen.astype(np.float32)).tocsr()
    y_test = _drop_zeros(dataset.y_test @ hidden)
    kept = np.diff(y_test.indptr) > 0
    sets = {
        name: replace(
            anchors,
            labels=_drop_zeros(seen @ anchors.labels),
            test=None if anchors.test is None else anchors.test[kept],
        )
        for name, anchors in dataset.anchor_sets.items()
    }
    return replace(
        dataset,
        test=select_texts(dataset.test, kept),
        y_train=_drop_zeros(dataset.y_train @ seen),
        y_test=y_test[kept],
        filter_train=_drop_zeros(dataset.filter_train @ seen),
        filter_test=dataset.filter_test[kept],
        test_groups=None if dataset.test_groups is None else dataset.test_groups[kept],
        candidates=np.flatnonzero(unseen),
        anchor_sets=sets,
        files={},
    )


def _drop_zeros(matrix: sp.csr_matrix) -> sp.csr_matrix:
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def select_texts(texts: Texts, keep: NDArray[np.bool_]) -> Texts:
    """Return the items to keep, bool [n]."""
    return texts.select(np.flatnonzero(keep))


def select_anchors(anchors: AnchorSet, keep: NDArray[np.bool_]) -> AnchorSet:
    """Return the anchor set with only the anchors to keep, bool [M]."""
    edges = None if anchors.test is None else anchors.test[:, keep]
    return AnchorSet(select_texts(anchors.texts, keep), anchors.train[:, keep], anchors.labels[:, keep], edges)


def _restrict_anchors(
    anchors: AnchorSet, train: NDArray[np.bool_], test: NDArray[np.bool_], labels: NDArray[np.bool_]
) -> AnchorSet:
    chosen = replace(
        anchors,
        train=anchors.train[train],
        labels=anchors.labels[labels],
        test=None if anchors.test is None else anchors.test[test],
    )
    return select_anchors(chosen, _used_columns(chosen.train, chosen.labels))


def _used_columns(*matrices: sp.csr_matrix) -> NDArray[np.bool_]:
    """Return the columns with an entry in any of the matrices, bool [columns]."""
    used = np.zeros(matrices[0].shape[1], bool)
    for matrix in matrices:
        used[matrix.indices] = True
    return used
