"""Bins of labels and metrics per bin."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.evaluation.metrics import compute_metrics, flat, rank_scores
from ramen.evaluation.quantiles import equi_volume_bins, flatten_bins, head_torso_tail, metrics_by_bin

FREQUENCIES = [10, 6, 5, 4, 3, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (FREQUENCIES, [[], [0], [1], [2], list(range(3, 11))]),
        ([100, 3, 2, 1], [[], [0], [1, 2, 3]]),
    ],
)
def test_bins_match_golden_values(frequency: list[int], expected: list[list[int]]) -> None:
    assert [labels.tolist() for labels in equi_volume_bins(np.array(frequency), 5)] == expected


@pytest.mark.parametrize("seed", range(5))
def test_bins_match_a_label_by_label_implementation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    frequency, q = rng.zipf(1.6, 200).clip(max=400) - 1, int(rng.integers(1, 7))
    order, bins, volume = np.argsort(-frequency, kind="stable"), [[]], 0
    for label in order:
        if volume + frequency[label] > frequency.sum() // q and len(bins) < q:
            bins.append([])
            volume = 0
        bins[-1].append(label)
        volume += frequency[label]
    assert [labels.tolist() for labels in equi_volume_bins(frequency, q)] == bins


@pytest.mark.parametrize("frequency", [[100, 3, 2, 1], [1, 1, 1], [5, 0, 0, 5, 9], FREQUENCIES, [0, 1, 1000, 1000]])
def test_head_torso_tail_are_not_empty_with_three_trained_labels(frequency: list[int]) -> None:
    groups = head_torso_tail(np.array(frequency))
    assert all(len(labels) for labels in groups.values())
    all_labels = np.concatenate(list(groups.values()))
    assert sorted(all_labels) == list(range(len(frequency)))
    assert (np.diff(np.array(frequency)[all_labels]) <= 0).all()


def test_head_torso_tail_hold_a_third_each_if_labels_are_small() -> None:
    frequency = np.random.default_rng(0).integers(1, 20, 3000)
    shares = [frequency[labels].sum() / frequency.sum() for labels in head_torso_tail(frequency).values()]
    np.testing.assert_allclose(shares, 1 / 3, atol=0.002)


def test_bin_contributions_sum_and_label_recall_is_averaged_within_the_bin() -> None:
    rng = np.random.default_rng(3)
    dense = (rng.random((50, 120)) < 0.05).astype(float)
    dense[:, 7] = 0
    y = sp.csr_matrix(dense)
    order, inv_p, frequency = rank_scores(rng.random((50, 120)), 100), rng.random(120) + 1, rng.integers(0, 30, 120)
    bins = head_torso_tail(frequency)
    table = metrics_by_bin(order, y, inv_p, frequency, bins)
    for key, whole in flat(compute_metrics(order, y, inv_p)).items():
        assert sum(row[key] for row in table.values()) == pytest.approx(whole)

    truth, hit = y.toarray(), np.zeros((50, 120))
    np.put_along_axis(hit, order[:, :10], 1, axis=1)
    tested = [label for label in bins["tail"] if truth[:, label].any()]
    expected = [(hit[:, label] * truth[:, label]).sum() / truth[:, label].sum() for label in tested]
    assert table["tail"]["label_r_at_10"] == pytest.approx(100 * np.mean(expected))
    assert table["tail"]["label_fn_at_10"] == pytest.approx(100 * sum(1 - r for r in expected) / 120)
    assert table["tail"]["tested_labels"] == len(tested)
    assert sum(row["labels"] for row in table.values()) == 120


def test_flat_keys_have_the_bin_as_prefix_and_no_counts() -> None:
    keys = flatten_bins({"tail": {"labels": 3, "mean_documents": 1.0, "p_at_1": 2.0, "label_r_at_100": 4.0}})
    assert keys == {"tail/p_at_1": 2.0, "tail/label_r_at_100": 4.0}


def test_bin_without_test_labels_has_no_label_recall() -> None:
    y = sp.csr_matrix(np.array([[1.0, 0.0]]))
    rows = metrics_by_bin(
        rank_scores(np.array([[0.5, 0.1]]), 10), y, np.ones(2), np.array([2, 1]), {"a": [0], "b": [1]}
    )  # type: ignore[dict-item]
    assert rows["a"]["label_r_at_10"] == 100.0
    assert "label_r_at_10" not in rows["b"]
