"""Measurements of a ranking of the test documents, and the tables of an evaluation, for trained models and peers."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ramen import config
from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import Ints, inverse_propensity, label_recall
from ramen.evaluation.predictions import Ranking
from ramen.evaluation.quantiles import (
    LABEL_DEPTHS,
    QUANTILES,
    equi_volume_bins,
    head_torso_tail,
    metrics_by_bin,
    overall_and_thirds,
)
from ramen.evaluation.report import SLICES
from ramen.files import write_json, write_text


@dataclass(frozen=True)
class Measurements:
    """Measurements of a ranking.

    Attributes:
        metrics: flat, in percent, with slices such as `tail/p_at_1`.
        bins: table of the non-empty label bins, see `quantiles.metrics_by_bin`.
        frequency: int64 [L], training documents per label.
        sizes: number of labels in head, torso, tail and overall.
    """

    metrics: dict[str, float]
    bins: dict[str, dict[str, float]]
    frequency: Ints
    sizes: dict[str, int]


def measure_ranking(dataset: Dataset, ranking: Ranking, scoring: config.ScoringConfig) -> Measurements:
    """Compute the metrics of a ranking: overall, by head, torso and tail, and by bin of label frequency."""
    indices, y = ranking.indices, dataset.y_test
    frequency = np.asarray(dataset.y_train.sum(axis=0)).ravel().astype(np.int64)
    inv_p = inverse_propensity(dataset.y_train, scoring.propensity_a, scoring.propensity_b)
    thirds = head_torso_tail(frequency)
    cut = equi_volume_bins(frequency, QUANTILES)
    bins = {str(i): labels for i, labels in enumerate((labels for labels in cut if len(labels)), 1)}
    metrics = overall_and_thirds(indices, y, inv_p, frequency)
    metrics |= {f"label_r_at_{k}": 100.0 * float(np.nanmean(label_recall(indices, y, k))) for k in LABEL_DEPTHS}
    sizes = {"overall": len(frequency)} | {name: len(labels) for name, labels in thirds.items()}
    return Measurements(metrics, metrics_by_bin(indices, y, inv_p, frequency, bins), frequency, sizes)


def count_unlabelled(dataset: Dataset) -> int:
    """Return the number of test documents without a label."""
    return int((np.diff(dataset.y_test.indptr) == 0).sum())


def count_documents(dataset: Dataset, measured: Measurements, scoring: config.ScoringConfig) -> dict[str, Any]:
    """Return the counts and propensity parameters for the manifest of an evaluation."""
    num_train, num_test, num_labels = dataset.shape
    return {
        "train_documents": num_train,
        "test_documents": num_test,
        "test_documents_without_label": count_unlabelled(dataset),
        "labels": num_labels,
        **{f"{name}_labels": measured.sizes[name] for name in SLICES},
        "propensity_a": scoring.propensity_a,
        "propensity_b": scoring.propensity_b,
    }


def write_tables(
    path: Path,
    dataset: Dataset,
    measured: Measurements,
    scoring: config.ScoringConfig,
    base: Mapping[str, float] | None,
) -> None:
    """Write metrics.json, propensity.json, quantiles.csv and plots/quantiles.csv.

    Args:
        base: metrics of the base run, written to metrics.json under `base/`; None = no base.
    """
    metrics = measured.metrics | {f"base/{key}": value for key, value in (base or {}).items()}
    propensity = {"a": scoring.propensity_a, "b": scoring.propensity_b, "N": dataset.shape[0]}
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
