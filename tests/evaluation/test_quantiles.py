"""Bins of labels and metrics per bin."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.evaluation.metrics import evaluate, flat, rank
from ramen.evaluation.quantiles import by_bin, equi_volume_bins, head_torso_tail, slices

STEPS = [10, 6, 5, 4, 3, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (STEPS, [[], [0], [1], [2], list(range(3, 11))]),
        ([100, 3, 2, 1], [[], [0], [1, 2, 3]]),
    ],
)
def test_bins_are_golden(frequency: list[int], expected: list[list[int]]) -> None:
    assert [labels.tolist() for labels in equi_volume_bins(np.array(frequency), 5)] == expected


@pytest.mark.parametrize("seed", range(5))
def test_bins_follow_the_rule_label_by_label(seed: int) -> None:
    rng = np.random.default_rng(seed)
    frequency, q = rng.zipf(1.6, 200).clip(max=400) - 1, int(rng.integers(1, 7))
    order, bins, volume = np.argsort(-frequency, kind="stable"), [[]], 0
    for label in order:
        if volume + frequency[label] > frequency.sum() // q and len(bins) < q:
            bins.append([])
            volume = 0
        bins[-1].append(label)
        volume += frequency[label]
    expected = [list(labels) for labels in bins]
    assert [labels.tolist() for labels in equi_volume_bins(frequency, q)] == expected


@pytest.mark.parametrize("frequency", [[100, 3, 2, 1], [1, 1, 1], [5, 0, 0, 5, 9], STEPS, [0, 1, 1000, 1000]])
def test_head_torso_tail_are_never_empty_with_three_trained_labels(frequency: list[int]) -> None:
    groups = head_torso_tail(np.array(frequency))
    assert all(len(labels) for labels in groups.values())
    together = np.concatenate(list(groups.values()))
    assert sorted(together) == list(range(len(frequency)))
    assert (np.diff(np.array(frequency)[together]) <= 0).all()


def test_head_torso_tail_hold_a_third_each_where_labels_are_small() -> None:
    frequency = np.random.default_rng(0).integers(1, 20, 3000)
    shares = [frequency[labels].sum() / frequency.sum() for labels in head_torso_tail(frequency).values()]
    np.testing.assert_allclose(shares, 1 / 3, atol=0.002)


def test_contributions_add_up_and_label_recall_is_within_the_bin() -> None:
    rng = np.random.default_rng(3)
    dense = (rng.random((50, 120)) < 0.05).astype(float)
    dense[:, 7] = 0
    y = sp.csr_matrix(dense)
    order, inv_p, frequency = rank(rng.random((50, 120)), 100), rng.random(120) + 1, rng.integers(0, 30, 120)
    bins = head_torso_tail(frequency)
    table = by_bin(order, y, inv_p, frequency, bins)
    for key, whole in flat(evaluate(order, y, inv_p)).items():
        assert sum(row[key] for row in table.values()) == pytest.approx(whole)

    truth, hit = y.toarray(), np.zeros((50, 120))
    np.put_along_axis(hit, order[:, :10], 1, axis=1)
    tested = [label for label in bins["tail"] if truth[:, label].any()]
    by_hand = [(hit[:, label] * truth[:, label]).sum() / truth[:, label].sum() for label in tested]
    assert table["tail"]["label_r_at_10"] == pytest.approx(100 * np.mean(by_hand))
    assert table["tail"]["label_fn_at_10"] == pytest.approx(100 * sum(1 - r for r in by_hand) / 120)
    assert table["tail"]["tested_labels"] == len(tested)
    assert sum(row["labels"] for row in table.values()) == 120


def test_slice_keys_are_prefixed_and_facts_stay_out() -> None:
    keys = slices({"tail": {"labels": 3, "mean_documents": 1.0, "p_at_1": 2.0, "label_r_at_100": 4.0}})
    assert keys == {"tail/p_at_1": 2.0, "tail/label_r_at_100": 4.0}


def test_an_untested_bin_has_no_label_recall() -> None:
    y = sp.csr_matrix(np.array([[1.0, 0.0]]))
    rows = by_bin(rank(np.array([[0.5, 0.1]]), 10), y, np.ones(2), np.array([2, 1]), {"a": [0], "b": [1]})  # type: ignore[dict-item]
    assert rows["a"]["label_r_at_10"] == 100.0
    assert "label_r_at_10" not in rows["b"]
