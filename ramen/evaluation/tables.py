"""Measuring a ranking of the test documents, and the tables of an evaluation: for trained models and for peers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ramen import config
from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import inverse_propensity, label_recall
from ramen.evaluation.predictions import Ranking
from ramen.evaluation.quantiles import LABEL_DEPTHS, by_bin, equi_volume_bins, head_torso_tail, overall_and_thirds
from ramen.evaluation.report import SLICES
from ramen.evaluation.report_data import Measured, unlabelled
from ramen.files import write_json, write_text


def measure_ranking(problem: Dataset, ranking: Ranking, scoring: config.ScoringConfig) -> Measured:
    """Metrics of a ranking, overall, by head, torso and tail, and by quantile of label frequency."""
    indices, y = ranking.indices, problem.y_test
    frequency = np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64)
    inv_p = inverse_propensity(problem.y_train, scoring.propensity_a, scoring.propensity_b)
    thirds = head_torso_tail(frequency)
    cut = equi_volume_bins(frequency, scoring.quantiles, scoring.quantile_rule)
    bins = {str(i): labels for i, labels in enumerate((labels for labels in cut if len(labels)), 1)}
    metrics = overall_and_thirds(indices, y, inv_p, frequency)
    metrics |= {f"label_r_at_{k}": 100.0 * float(np.nanmean(label_recall(indices, y, k))) for k in LABEL_DEPTHS}
    sizes = {"overall": len(frequency)} | {name: len(labels) for name, labels in thirds.items()}
    return Measured(metrics, by_bin(indices, y, inv_p, frequency, bins), frequency, sizes)


def counts(problem: Dataset, measured: Measured, scoring: config.ScoringConfig) -> dict[str, Any]:
    """Facts for the manifest of an evaluation."""
    num_train, num_test, num_labels = problem.shape
    return {
        "train_documents": num_train,
        "test_documents": num_test,
        "test_documents_without_label": unlabelled(problem),
        "labels": num_labels,
        **{f"{name}_labels": measured.sizes[name] for name in SLICES},
        "propensity_a": scoring.propensity_a,
        "propensity_b": scoring.propensity_b,
    }


def write_tables(
    path: Path,
    problem: Dataset,
    measured: Measured,
    scoring: config.ScoringConfig,
    base: Mapping[str, float] | None,
) -> None:
    """Write metrics.json, propensity.json, quantiles.csv and plots/quantiles.csv."""
    metrics = measured.metrics | {f"base/{key}": value for key, value in (base or {}).items()}
    propensity = {"a": scoring.propensity_a, "b": scoring.propensity_b, "N": problem.shape[0]}
    write_json(path / "metrics.json", metrics)
    write_json(path / "propensity.json", propensity)
    columns = list(dict.fromkeys(key for row in measured.bins.values() for key in row))
    wide = [[name, *(row.get(key, "") for key in columns)] for name, row in measured.bins.items()]
    long = [[name, key, value] for name, row in measured.bins.items() for key, value in row.items() if "_at_" in key]
    write_text(path / "quantiles.csv", _csv(["bin", *columns], wide))
    write_text(path / "plots" / "quantiles.csv", _csv(["bin", "metric", "value"], long))


def _csv(header: list[str], rows: Iterable[list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return stream.getvalue()
