"""Clustered standard errors against a bootstrap over groups, the paired t-test, and their edge cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.stats import ttest_rel

from ramen.evaluation.metrics import compute_metrics, document_weights, label_recall, metrics_by_document
from ramen.evaluation.uncertainty import Gain, PerDocument, flat_gains, is_significant, paired_gains, standard_error

LABELS, DEPTH = 60, 10
THIRDS = {"head": np.arange(20), "tail": np.arange(20, LABELS)}


class ClusteredRuns:
    """Two runs on documents in groups, which share their labels and how well each run ranks them."""

    def __init__(self, seed: int, groups: int = 150) -> None:
        rng = np.random.default_rng(seed)
        self.groups = rng.permutation(np.repeat(np.arange(groups), rng.integers(1, 15, groups)))
        self.inv_p = 1 + 9 * rng.random(LABELS)
        group_labels = np.array([rng.choice(LABELS, 4, replace=False) for _ in range(groups)])
        truth = np.zeros((len(self.groups), LABELS))
        for row, group in enumerate(self.groups):
            truth[row, group_labels[group, : rng.integers(1, 5)]] = 1
        skill = np.array([[0.0, 1.0], [1.0, 0.3]])[rng.integers(2, size=groups)] + 0.2
        noise = rng.random((2, *truth.shape))
        self.y = sp.csr_matrix(truth)
        self.rankings = [np.argsort(-(skill[self.groups, run, None] * truth + noise[run]), 1) for run in (0, 1)]
        self.rankings = [ranking[:, :DEPTH] for ranking in self.rankings]

    def tables(self, clustered: bool = True) -> list[PerDocument]:
        weights = document_weights(self.y, self.inv_p, THIRDS, DEPTH)
        uids = [str(i) for i in range(len(self.groups))]
        groups = self.groups if clustered else None
        return [
            PerDocument(uids, metrics_by_document(ranking, self.y, self.inv_p, THIRDS), weights, groups)
            for ranking in self.rankings
        ]

    def bootstrap(self, metric: str, k: int) -> tuple[float, float]:
        """Return the gain and its deviation over 2,000 resamples of whole groups, of both means of a ratio."""
        truth = self.y.toarray()
        worth = truth * (self.inv_p if metric == "psp" else 1.0)
        best = np.sort(worth, 1)[:, ::-1][:, :k].sum(1) if metric == "psp" else np.full(len(truth), float(k))
        scores = [np.take_along_axis(worth, ranking[:, :k], 1).sum(1) for ranking in self.rankings]
        ours, base, ideal = (np.bincount(self.groups, values) for values in (*scores, best))
        drawn = np.random.default_rng(1).integers(len(ours), size=(2000, len(ours)))
        resampled = 100 * (ours[drawn].sum(1) - base[drawn].sum(1)) / ideal[drawn].sum(1)
        return 100 * float((ours - base).sum() / ideal.sum()), float(resampled.std(ddof=1))


@pytest.mark.parametrize(("metric", "k"), [("p", 1), ("psp", 5)])
def test_standard_error_matches_a_bootstrap_over_groups(metric: str, k: int) -> None:
    runs = ClusteredRuns(0)
    key = f"{metric}_at_{k}"
    gain = paired_gains(*runs.tables())[key]
    points, error = runs.bootstrap(metric, k)
    assert gain.points == pytest.approx(points) and gain.error == pytest.approx(error, rel=0.05)
    independent = paired_gains(*runs.tables(clustered=False))[key].error
    assert independent is not None and gain.error is not None and gain.error > 1.5 * independent


def test_standard_error_of_a_ratio_accounts_for_its_denominator() -> None:
    """Treating the denominator as fixed would give a large error."""
    runs = ClusteredRuns(1)
    best = np.argsort(-runs.y.toarray() * runs.inv_p, 1, kind="stable")[:, :DEPTH]
    runs.rankings = [best, np.full_like(best, LABELS)]
    gain = paired_gains(*runs.tables())["psp_at_5"]
    assert gain.points == pytest.approx(100) and gain.error == pytest.approx(0, abs=1e-9)


def test_one_document_per_group_gives_the_paired_t_test() -> None:
    runs = ClusteredRuns(2)
    ours, base = runs.tables(clustered=False)
    gain = paired_gains(ours, base)["p_at_5"]
    test = ttest_rel(ours.values["p_at_5"], base.values["p_at_5"])
    assert gain.error == pytest.approx(gain.points / test.statistic)
    explicit_groups = standard_error(ours.values["p_at_5"] - base.values["p_at_5"], np.arange(len(runs.groups)))
    assert explicit_groups == pytest.approx(gain.error)


def test_fewer_than_two_groups_have_no_standard_error() -> None:
    assert standard_error(np.array([1.0, 2.0, 3.0]), np.array([7, 7, 7])) is None
    assert standard_error(np.array([1.0])) is None and standard_error(np.zeros(0)) is None
    ours, base = (PerDocument(["a"], {"p_at_1": np.array([value])}) for value in (100.0, 0.0))
    assert paired_gains(ours, base) == {"p_at_1": Gain(100.0, None)}
    assert flat_gains(paired_gains(ours, base)) == {"gain/p_at_1": 100.0}


def test_gain_of_two_standard_errors_is_significant() -> None:
    assert is_significant(-2.0, 1.0) and not is_significant(1.99, 1.0)
    assert not is_significant(5.0, None) and not is_significant(0.0, 0.0)


def test_contributions_average_to_the_metric_and_weights_to_one() -> None:
    runs = ClusteredRuns(3, groups=40)
    ours, _ = runs.tables()
    curves = compute_metrics(runs.rankings[0], runs.y, runs.inv_p)
    for key, values in ours.values.items():
        metric, k = key.rpartition("/")[2].split("_at_")
        if metric != "label_r" and "/" not in key:
            assert values.mean() == pytest.approx(100 * curves[metric][int(k) - 1]), key
            parts = ours.values[f"head/{key}"] + ours.values[f"tail/{key}"]
            np.testing.assert_allclose(parts, values, atol=1e-9)
    assert {key.rpartition("/")[2] for key in ours.weights} == {
        *("psp_at_1", "psp_at_3", "psp_at_5", "psn_at_5"),
    }, "rankings of 10 have no label recall at 100"
    assert all(values.mean() == pytest.approx(1) for values in ours.weights.values())


def test_label_recall_averages_over_tested_labels() -> None:
    rng = np.random.default_rng(0)
    y = sp.csr_matrix((rng.random((30, 150)) < 0.02).astype(float))
    ranking = np.argsort(rng.random((30, 150)), 1)[:, :100]
    thirds = {"head": np.arange(50), "tail": np.arange(50, 149), "empty": np.arange(149, 149)}
    values, weights = metrics_by_document(ranking, y, np.ones(150), thirds), document_weights(y, np.ones(150), thirds)
    recall = label_recall(ranking, y, 100)
    for name, labels in {"": np.arange(150), "head/": thirds["head"], "tail/": thirds["tail"]}.items():
        assert values[f"{name}label_r_at_100"].mean() == pytest.approx(100 * np.nanmean(recall[labels]))
        assert weights[f"{name}label_r_at_100"].mean() == pytest.approx(1)
    assert "empty/label_r_at_100" not in values and "empty/label_r_at_100" not in weights


def test_runs_with_different_propensities_have_no_gain_in_psp() -> None:
    runs = ClusteredRuns(4, groups=20)
    ours, _ = runs.tables()
    runs.inv_p = runs.inv_p**2
    _, base = runs.tables()
    gain_of = paired_gains(ours, base)
    assert "p_at_1" in gain_of and "tail/r_at_10" in gain_of
    assert not any(key.rpartition("/")[2].startswith("ps") for key in gain_of)


@pytest.mark.parametrize("clustered", [True, False])
def test_per_document_table_is_read_as_written(clustered: bool, tmp_path: Path) -> None:
    ours, base = ClusteredRuns(5, groups=20).tables(clustered)
    file = tmp_path / "per_document.parquet"
    PerDocument(ours.uids, ours.values, ours.weights, ours.groups, {"dataset": "f" * 64}).write(file)
    restored = PerDocument.read(file)
    assert restored.uids == ours.uids and restored.notes == {"dataset": "f" * 64}
    assert restored.group_count == ours.group_count == (20 if clustered else len(ours.uids))
    read, kept = paired_gains(restored, base), paired_gains(ours, base)
    assert read.keys() == kept.keys()
    for key, gain in read.items():
        assert (gain.points, gain.error) == pytest.approx((kept[key].points, kept[key].error), rel=1e-4, abs=1e-4)
