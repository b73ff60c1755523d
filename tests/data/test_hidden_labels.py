"""Zero-shot: hidden labels are absent from training pairs and graphs, and only they are ranked at test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.config import WalkConfig
from ramen.data.dataset import AnchorSet, Dataset
from ramen.data.subset import hide_labels
from ramen.graph.build import build_set
from ramen.retrieval import search


@pytest.fixture
def hidden(tiny_dataset: Dataset) -> Dataset:
    return hide_labels(tiny_dataset, 0.3, seed=1)


def test_hidden_labels_lose_pairs_and_edges_but_keep_texts(tiny_dataset: Dataset, hidden: Dataset) -> None:
    unseen = hidden.candidates
    assert unseen is not None and 3 <= len(unseen) <= 15
    assert not hidden.y_train[:, unseen].nnz and not hidden.filter_train[:, unseen].nnz
    seen = np.setdiff1d(np.arange(30), unseen)
    np.testing.assert_array_equal(hidden.y_train[:, seen].toarray(), tiny_dataset.y_train[:, seen].toarray())
    for name, anchors in hidden.anchor_sets.items():
        assert not anchors.labels[unseen].nnz
        np.testing.assert_array_equal(
            anchors.labels[seen].toarray(), tiny_dataset.anchor_sets[name].labels[seen].toarray()
        )
    assert hidden.labels.texts == tiny_dataset.labels.texts


def test_built_graphs_have_no_hidden_label(tiny_dataset: Dataset) -> None:
    """If anchors are labels (hyperlinks), a document's link to a hidden label would reveal the hidden pair."""
    pairs = tiny_dataset.y_train
    links = AnchorSet(tiny_dataset.labels, pairs, sp.csr_matrix(pairs.T @ pairs, dtype=np.float32))
    hidden = hide_labels(replace(tiny_dataset, anchor_sets={"links": links}), 0.3, seed=1)
    built = build_set(
        hidden.anchor_sets["links"],
        WalkConfig(),
        documents=hidden.train,
        labels=hidden.labels,
        test=hidden.test,
        y_train=hidden.y_train,
        unseen=hidden.unseen,
    )
    for graph in built.graphs.values():
        assert graph.num_edges and not graph.csr()[:, hidden.unseen].nnz
    assert not built.graphs["labels"].csr()[hidden.unseen].nnz
    assert built.counts["unseen_anchors"] == len(hidden.unseen)


def test_test_documents_keep_only_hidden_labels(tiny_dataset: Dataset, hidden: Dataset) -> None:
    whole = tiny_dataset.y_test.toarray()
    unseen = np.zeros(30, bool)
    unseen[hidden.candidates] = True
    rows = np.flatnonzero(whole[:, unseen].any(1))
    assert hidden.test.uids == [tiny_dataset.test.uids[i] for i in rows]
    np.testing.assert_array_equal(hidden.y_test.toarray(), whole[rows] * unseen)


def test_hidden_labels_depend_on_seed_are_nested_and_round_trip(tiny_dataset: Dataset, tmp_path: Path) -> None:
    draws = ((0.3, 1), (0.5, 1), (0.3, 2))
    small, large, other = (hide_labels(tiny_dataset, share, seed=seed).candidates for share, seed in draws)
    assert set(small) <= set(large) and set(small) != set(other)
    hide_labels(tiny_dataset, 0.3, seed=1).write(tmp_path)
    np.testing.assert_array_equal(Dataset.read(tmp_path).candidates, small)
    tiny_dataset.write(tmp_path / "plain")
    plain = Dataset.read(tmp_path / "plain")
    assert plain.candidates is None and plain.groups is None and plain.test_groups is None, "the files are optional"


def test_search_returns_only_candidates() -> None:
    rng = np.random.default_rng(0)
    documents, labels = (rng.standard_normal((n, 4)).astype(np.float32) for n in (5, 20))
    candidates = np.array([2, 3, 11, 17])
    found, scores = search(documents, labels, 6, candidates=candidates)
    expected = candidates[np.argsort(-documents @ labels[candidates].T, axis=1)]
    np.testing.assert_array_equal(found[:, :4], expected)
    assert (found[:, 4:] == 20).all() and np.isneginf(scores[:, 4:]).all()
