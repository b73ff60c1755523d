"""Held-out documents: which they are, and how labels are ranked for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ramen.config import TrainingConfig
from ramen.data.dataset import Dataset
from ramen.data.subset import hide_labels
from ramen.training.heldout import HeldOut, split_held_out


def test_held_out_documents_are_a_share_of_all_documents(tiny_dataset: Dataset) -> None:
    held_out, training_rows = split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))
    assert len(held_out) == 6 and len(training_rows) == 54 and not set(held_out) & set(training_rows)


def test_groups_are_held_out_whole(tiny_dataset: Dataset) -> None:
    groups = np.repeat([0, 1, 2, 3, 4], [12, 4, 4, 20, 20])
    dataset = replace(tiny_dataset, groups=groups)
    selections = set()
    for seed in range(5):
        held_out, rest = split_held_out(dataset, TrainingConfig(validation_fraction=0.2, seed=seed))
        assert not set(groups[held_out]) & set(groups[rest]) and sorted([*held_out, *rest]) == list(range(60))
        assert len(held_out) in (8, 12), "12 documents at most: one group of 12 or two of 4; groups of 20 never fit"
        selections.add(tuple(held_out))
    assert len(selections) == 2, "the selection depends on the seed"


def test_large_groups_are_held_out_last(tiny_dataset: Dataset) -> None:
    groups = np.concatenate([np.repeat([0, 1], 20), np.arange(2, 22)])
    dataset = replace(tiny_dataset, groups=groups)
    for seed in range(10):
        held_out, _ = split_held_out(dataset, TrainingConfig(validation_fraction=0.2, seed=seed))
        assert len(held_out) == 12 and groups[held_out].min() > 1, "the 20 documents of small groups suffice"
    only_large = replace(dataset, groups=np.repeat([0, 1, 2], 20))
    assert len(split_held_out(only_large, TrainingConfig(validation_fraction=0.4))[0]) == 20


def test_sample_of_held_out_documents_is_ranked_as_by_numpy(tiny_dataset: Dataset) -> None:
    rng = np.random.default_rng(0)
    labels = rng.standard_normal((30, 8)).astype(np.float32)
    rows = np.arange(3, 43)
    held_out = HeldOut.of(tiny_dataset, rows, tiny_dataset.filter_train)
    assert held_out.evenly_spaced(40) is held_out
    sample = held_out.evenly_spaced(10)
    assert len({*sample.rows}) == 10 and {*sample.rows} < {*rows}
    documents = rng.standard_normal((len(sample), 8)).astype(np.float32)
    documents[:5] = 9 * labels[tiny_dataset.y_train[sample.rows[:5]].toarray().argmax(1)]
    scores = np.where(tiny_dataset.filter_train[sample.rows].toarray() > 0, -np.inf, documents @ labels.T)
    hits = tiny_dataset.y_train[sample.rows].toarray()[np.arange(10), scores.argmax(1)]
    assert sample.quality(documents, labels).p_at_1 == pytest.approx(100 * hits.mean())
    assert hits.sum() >= 5


def test_unseen_labels_are_not_ranked(tiny_dataset: Dataset) -> None:
    dataset = hide_labels(tiny_dataset, 0.3, seed=1)
    rows = np.flatnonzero(np.diff(dataset.y_train.indptr))
    documents = np.eye(30, dtype=np.float32)[dataset.y_train[rows].argmax(1).A1]
    labels = np.eye(30, dtype=np.float32)
    labels[dataset.unseen] = 2.0  # the highest score for every document
    assert HeldOut.of(dataset, rows, dataset.filter_train).quality(documents, labels).p_at_1 == 100.0


def test_ignored_pairs_are_no_positives(tiny_dataset: Dataset) -> None:
    y, ignored = tiny_dataset.y_train, tiny_dataset.y_train.copy().tolil()
    ignored[1:] = 0
    dataset = replace(tiny_dataset, filter_train=ignored.tocsr())
    assert y[0].nnz and not dataset.positives[0].nnz
    np.testing.assert_array_equal(dataset.positives[1:].toarray(), y[1:].toarray())
