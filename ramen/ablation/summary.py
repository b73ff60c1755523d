"""Summary of a row over its seeds: means, gains over another row, and their errors."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen.ablation.run import Outcome
from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import ENCODER
from ramen.evaluation.per_document import read_contributions
from ramen.evaluation.predictions import ENCODER_PREDICTIONS
from ramen.evaluation.quantiles import MISSED_DEPTHS
from ramen.evaluation.uncertainty import PerDocument, standard_error
from ramen.files import wrap_read_errors


@dataclass(frozen=True)
class Summary:
    """A row over its seeds.

    Attributes:
        mean, deviation: metric -> mean and sample standard deviation over seeds; the deviation of one seed is NaN.
        gain, gain_deviation: the same of the difference to the row it is compared with, paired by seed; empty without
            such a row.
        gain_error: metric -> standard error of the gain over the test documents, clustered by group, for the metrics
            of `metrics_by_document`. A deviation over seeds does not cover the choice of the test documents.
        missed: bin of labels -> depth -> difference of the missed share (R-ICLR, Table 8; lower is better).
        seconds: mean training time.
    """

    mean: dict[str, float]
    deviation: dict[str, float]
    gain: dict[str, float]
    gain_deviation: dict[str, float]
    gain_error: dict[str, float]
    missed: dict[str, dict[int, float]]
    seconds: float


def summarise(outcomes: Sequence[Outcome], against: Sequence[Outcome] | None, keys: Sequence[str]) -> Summary:
    """Summarise a row over its seeds.

    Args:
        outcomes: of the row, one per seed.
        against: of the row it is compared with, under the same seeds; None = no such row.
        keys: metrics to summarise. A row without label context and classifiers has no `encoder/` metrics; its overall
            metrics take their place.
    """

    def tabulate(rows: Sequence[Outcome]) -> NDArray[np.float64]:
        return np.array([[_metric(outcome.metrics, key) for key in keys] for outcome in rows])

    def mean_and_deviation(values: NDArray[np.float64]) -> tuple[dict[str, float], dict[str, float]]:
        deviation = values.std(0, ddof=1) if len(values) > 1 else np.full(len(keys), math.nan)
        return (
            dict(zip(keys, values.mean(0).tolist(), strict=True)),
            dict(zip(keys, deviation.tolist(), strict=True)),
        )

    seconds = float(np.mean([outcome.seconds for outcome in outcomes]))
    mean, deviation = mean_and_deviation(tabulate(outcomes))
    if not against:
        return Summary(mean, deviation, {}, {}, {}, {}, seconds)
    gain, gain_deviation = mean_and_deviation(tabulate(outcomes) - tabulate(against))
    errors, missed = _gain_errors(outcomes, against), _missed_differences(outcomes, against)
    return Summary(mean, deviation, gain, gain_deviation, errors, missed, seconds)


def _metric(metrics: Mapping[str, float], key: str) -> float:
    """Return a metric, NaN if unknown; without any `encoder/` metrics, the overall metrics are the encoder's."""
    has_encoder_metrics = any(name.startswith(ENCODER) for name in metrics)
    return metrics.get(key if has_encoder_metrics else key.removeprefix(ENCODER), math.nan)


def _gain_errors(outcomes: Sequence[Outcome], against: Sequence[Outcome]) -> dict[str, float]:
    """Return standard errors of the gains averaged over seeds; empty for other datasets or fewer than two groups."""
    if any(ours.dataset != other.dataset for ours, other in zip(outcomes, against, strict=True)):
        return {}
    pairs = [
        (_read_contributions(ours.dataset, ours.evaluation), _read_contributions(other.dataset, other.evaluation))
        for ours, other in zip(outcomes, against, strict=True)
    ]
    errors = {}
    for prefix, first in pairs[0][0].items():
        for key in first.values:
            gains = [ours[prefix].values[key] - other[prefix].values[key] for ours, other in pairs]
            error = standard_error(np.mean(gains, axis=0), first.groups, first.weights_of(key))
            if error is not None:
                errors[f"{prefix}{key}"] = error
    return errors


# the report is written after every seed, and several rows are compared with the same base
@functools.lru_cache(maxsize=16)
def _read_contributions(dataset: Path, evaluation: Path) -> dict[str, PerDocument]:
    """Return each test document's contribution to a row's metrics, by the prefix of the keys ("" and `encoder/`)."""
    data = Dataset.read(dataset, anchors=False)
    overall = read_contributions(data, evaluation)
    has_encoder_predictions = (evaluation / ENCODER_PREDICTIONS).is_file()
    encoder = read_contributions(data, evaluation, ENCODER_PREDICTIONS) if has_encoder_predictions else overall
    return {"": overall, ENCODER: encoder}


def _missed_differences(outcomes: Sequence[Outcome], against: Sequence[Outcome]) -> dict[str, dict[int, float]]:
    """Return differences of `label_fn_at_k` by bin, averaged over seeds, and their sum over the bins as "complete"."""
    sums: dict[str, dict[int, float]] = {}
    for ours, other in zip(map(_read_bins, outcomes), map(_read_bins, against), strict=True):
        for name in (name for name in ours if name in other):
            for k in MISSED_DEPTHS:
                column = f"label_fn_at_{k}"
                if ours[name].get(column) and other[name].get(column):
                    difference = (float(ours[name][column]) - float(other[name][column])) / len(outcomes)
                    for line in (f"{name} ({ours[name]['labels']} labels)", "complete"):
                        sums.setdefault(line, {}).setdefault(k, 0.0)
                        sums[line][k] += difference
    return dict(sorted(sums.items(), key=lambda item: item[0] == "complete"))


def _read_bins(outcome: Outcome) -> dict[str, dict[str, str]]:
    file = outcome.evaluation / "quantiles.csv"
    with wrap_read_errors(file), file.open(encoding="utf-8", newline="") as stream:
        return {row["bin"]: row for row in csv.DictReader(stream)}
