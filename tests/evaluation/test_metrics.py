"""Metrics against golden values, scikit-learn, and the properties of their definitions."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import ndcg_score, precision_score, recall_score

from ramen.evaluation.metrics import (
    apply_filter,
    compute_metrics,
    flat,
    inverse_propensity,
    label_recall,
    metrics_by_document,
    metrics_by_group,
    rank_scores,
)

# golden values, computed by hand from pyxclib's definitions for 10 training documents and label frequencies 6,3,1,1,0
Y = sp.csr_matrix(np.array([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0]], float))
S = np.array([[0.9, 0.8, 0.1, 0, 0.05], [0.2, 0.1, 0.9, 0, 0.3], [0.5, 0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0, 0.6, 0.5]])
GOLDEN = {
    "p": [0.5, 0.375, 0.333333],
    "n": [0.5, 0.403287, 0.421270],
    "psp": [0.522867, 0.561260, 0.673879],
    "psn": [0.522867, 0.483801, 0.533499],
    "r": [0.208333, 0.291667, 0.416667],
    "fn": [0.722222, 0.611111, 0.444444],
    "psr": [0.369418, 0.408952, 0.563598],
}


def make_training_labels(frequency: list[int], rows: int) -> sp.csr_matrix:
    """Return a matrix whose columns have the given number of ones."""
    dense = np.zeros((rows, len(frequency)))
    for label, count in enumerate(frequency):
        dense[:count, label] = 1
    return sp.csr_matrix(dense)


INV_P = inverse_propensity(make_training_labels([6, 3, 1, 1, 0], 10), 0.55, 1.5)


def make_random_problem(seed: int, rows: int = 40, labels: int = 15) -> tuple[sp.csr_matrix, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = sp.csr_matrix((rng.random((rows, labels)) < 0.2).astype(float))
    scores = rng.permuted(np.tile(np.linspace(-1, 1, labels), (rows, 1)), axis=1)
    return y, scores, 1 + 5 * rng.random(labels)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0.55, 1.5, [1.711852, 1.942771, 2.302585, 2.302585, 2.725134]),
        (0.6, 2.6, [1.772482, 1.999251, 2.302585, 2.302585, 2.583447]),
        (0.5, 0.4, [1.609228, 1.835854, 2.302585, 2.302585, 3.436914]),
    ],
)
def test_inverse_propensity_matches_golden_values(a: float, b: float, expected: list[float]) -> None:
    np.testing.assert_allclose(inverse_propensity(make_training_labels([6, 3, 1, 1, 0], 10), a, b), expected, atol=1e-6)


@pytest.mark.parametrize("metric", GOLDEN)
def test_metrics_match_golden_values(metric: str) -> None:
    np.testing.assert_allclose(compute_metrics(rank_scores(S, 3), Y, INV_P)[metric], GOLDEN[metric], atol=1e-6)


def test_filter_removes_pairs_and_closes_gaps() -> None:
    pair = sp.csr_matrix(([1.0], ([0], [0])), shape=(4, 5))
    order = rank_scores(S, 5)
    labels, scores = apply_filter(order, np.take_along_axis(S, order, 1), pair, 3)
    assert labels[0].tolist() == [1, 2, 4]
    np.testing.assert_allclose(scores[0], [0.8, 0.1, 0.05], rtol=1e-6)
    np.testing.assert_allclose(compute_metrics(labels, Y, INV_P)["p"], [0.25, 0.375, 0.25], atol=1e-6)


def test_filtering_before_the_cut_differs_from_filtering_after() -> None:
    pair = sp.csr_matrix(([1.0], ([3], [0])), shape=(4, 5))
    order = rank_scores(S, 5)
    scores = np.take_along_axis(S, order, 1)
    before, _ = apply_filter(order, scores, pair, 3)
    after, values = apply_filter(order[:, :3], scores[:, :3], pair, 3)
    assert before[3].tolist() == [3, 4, 1]
    assert after[3].tolist() == [3, 4, 5]
    assert values[3, 2] == -np.inf
    assert compute_metrics(before, Y, INV_P)["p"][2] > compute_metrics(after, Y, INV_P)["p"][2]


@pytest.mark.parametrize("seed", range(3))
def test_ndcg_recall_and_precision_match_sklearn(seed: int) -> None:
    y, scores, inv_p = make_random_problem(seed)
    full = y[np.diff(y.indptr) > 0]  # scikit-learn does not skip empty rows, so remove them
    order = rank_scores(scores[np.diff(y.indptr) > 0], 15)
    curves = compute_metrics(order, full, inv_p)
    for k in (1, 3, 7, 15):
        chosen = np.zeros(full.shape, int)
        np.put_along_axis(chosen, order[:, :k], 1, axis=1)
        truth = full.toarray().astype(int)
        assert curves["n"][k - 1] == pytest.approx(ndcg_score(truth, scores[np.diff(y.indptr) > 0], k=k))
        assert curves["r"][k - 1] == pytest.approx(recall_score(truth, chosen, average="samples"))
        assert curves["p"][k - 1] == pytest.approx(precision_score(truth, chosen, average="samples"))
        macro = recall_score(truth, chosen, average=None, zero_division=np.nan)
        np.testing.assert_allclose(label_recall(order, full, k), macro)


def test_ideal_propensity_ranking_scores_one() -> None:
    y, _, inv_p = make_random_problem(0)
    curves = compute_metrics(rank_scores(y.toarray() * inv_p, 6), y, inv_p)
    for metric in ("psp", "psn", "psr"):
        np.testing.assert_allclose(curves[metric], 1.0)


def test_metrics_ignore_row_order_and_monotone_transforms() -> None:
    y, scores, inv_p = make_random_problem(1)
    shuffled = np.random.default_rng(0).permutation(len(scores))
    plain = compute_metrics(rank_scores(scores, 5), y, inv_p)
    moved = compute_metrics(rank_scores(np.exp(3 * scores[shuffled]) - 7, 5), y[shuffled], inv_p)
    for metric in plain:
        np.testing.assert_allclose(plain[metric], moved[metric])


def test_psp_with_equal_propensities_is_precision_over_ideal_precision() -> None:
    y, scores, _ = make_random_problem(2)
    ones = np.full(y.shape[1], 2.5)
    curves, best = (
        compute_metrics(rank_scores(scores, 5), y, ones),
        compute_metrics(rank_scores(y.toarray(), 5), y, ones),
    )
    np.testing.assert_allclose(curves["psp"], curves["p"] / best["p"])


def test_ndcg_at_1_is_precision_and_recall_at_full_depth_is_one() -> None:
    y, scores, inv_p = make_random_problem(3)
    curves = compute_metrics(rank_scores(scores, y.shape[1]), y, inv_p)
    filled = np.mean(np.diff(y.indptr) > 0)
    assert curves["n"][0] == pytest.approx(curves["p"][0])
    assert curves["r"][-1] == pytest.approx(filled)
    assert curves["fn"][-1] == pytest.approx(0.0)


def test_contributions_of_label_groups_sum_to_the_metric() -> None:
    y, scores, inv_p = make_random_problem(4)
    order, group = rank_scores(scores, 6), np.arange(y.shape[1]) % 4
    whole, parts = compute_metrics(order, y, inv_p), metrics_by_group(order, y, inv_p, group, 4)
    for metric in whole:
        np.testing.assert_allclose(parts[metric].sum(0), whole[metric])


def test_document_contributions_average_to_the_metric_and_slices_sum() -> None:
    y, scores, inv_p = make_random_problem(3)
    ranking = rank_scores(scores, 10)
    parts = metrics_by_document(ranking, y, inv_p, {"head": np.arange(4), "rest": np.arange(4, 15)})
    whole = flat(compute_metrics(ranking, y, inv_p))
    for key in ("p_at_1", "p_at_5", "psp_at_1", "psp_at_5"):
        assert parts[key].shape == (40,) and parts[key].mean() == pytest.approx(whole[key])
        np.testing.assert_allclose(parts[f"head/{key}"] + parts[f"rest/{key}"], parts[key])
    golden = metrics_by_document(rank_scores(S, 3), Y, INV_P, {})["p_at_1"]
    assert golden.tolist() == [100, 0, 0, 100]


def test_ties_go_to_the_lower_label_for_every_form_of_scores() -> None:
    dense = np.array([[0.5, 0.9, 0.5, 0.5], [-0.2, -0.2, -np.inf, np.nan]])
    entries = sp.csr_matrix((dense[0], ([0] * 4, range(4))), shape=(2, 4))
    entries = entries + sp.csr_matrix(([-0.2, -0.2], ([1, 1], [0, 1])), shape=(2, 4))
    mapping = {
        "indices": np.array([[3, 2, 1, 0], [1, 0, 4, -1]]),
        "scores": np.array([[0.5, 0.5, 0.9, 0.5], [-0.2, -0.2, 9, 9]]),
    }
    expected = [[1, 0, 2], [0, 1, 4]]
    assert (
        rank_scores(dense, 3).tolist()
        == rank_scores(entries, 3).tolist()
        == rank_scores(mapping, 3, 4).tolist()
        == expected
    )


def test_stored_zeros_and_negatives_are_ranked() -> None:
    scores = sp.csr_matrix((np.array([0.0, -0.5]), np.array([2, 1]), np.array([0, 2])), shape=(1, 4))
    assert rank_scores(scores, 4).tolist() == [[2, 1, 4, 4]]


def test_padding_is_not_a_hit_of_the_next_document() -> None:
    y = sp.csr_matrix(np.array([[0.0, 1.0], [1.0, 0.0]]))
    curves = compute_metrics(np.array([[2, 2], [2, 2]]), y, np.ones(2))
    assert curves["p"].tolist() == [0.0, 0.0]


def test_flat_returns_percentages_under_metrics_json_keys() -> None:
    y, scores, inv_p = make_random_problem(5, labels=120)
    metrics = flat(compute_metrics(rank_scores(scores, 100), y, inv_p))
    assert set(metrics) == {
        *(f"{m}_at_{k}" for m in ("p", "n", "psp", "psn") for k in (1, 3, 5)),
        *("r_at_10", "r_at_100", "psr_at_100", "fn_at_100"),
    }
    assert 0 < metrics["p_at_1"] <= 100
    assert flat(compute_metrics(rank_scores(S, 3), Y, INV_P))["p_at_3"] == pytest.approx(100 / 3)


def test_million_labels_are_evaluated_without_a_dense_matrix() -> None:
    rows, labels, k = 300, 1_000_000, 100
    rng = np.random.default_rng(0)
    y = sp.csr_matrix(
        (np.ones(rows * 5), (np.repeat(np.arange(rows), 5), rng.integers(0, labels, rows * 5))), shape=(rows, labels)
    )
    order = rng.integers(0, labels - k, (rows, 1)) + np.arange(k)
    order[:, 0] = y.indices[y.indptr[:-1]]
    inv_p = rng.random(labels) + 1
    tracemalloc.start()
    curves = compute_metrics(order, y, inv_p)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert curves["p"][0] == 1.0
    assert peak < 64 * 2**20  # a dense N' x L of bytes would take 286 MB
