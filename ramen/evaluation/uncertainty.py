"""Paired standard errors of gains, clustered by the groups of the test documents.

Every metric is a ratio of means over the test documents, `mean(v_i) / mean(w_i)` with `mean(w_i) = 1`: v_i is the
document's contribution, w_i its share of the denominator (1 for P, nDCG and R; for PSP the share of the ideal score).
The gain of one run over another on the same documents is `D = mean(d_i)`, where `d_i` is the difference of their
contributions. Its standard error, linearised and robust to clusters g = 1..G, is

    sqrt(G / (G - 1) * sum_g (sum_{i in g} (d_i - D w_i))^2) / n

With one document per group and w_i = 1 this is the standard error of the paired t-test.

Sources: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference (2015); Cochran, Sampling Techniques,
chapter 6 (ratio estimators).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ramen.files import check_type, wrap_read_errors

Floats = NDArray[np.float64]

PER_DOCUMENT = "per_document.parquet"
GAIN, GAIN_SE = "gain/", "gain_se/"
"""Prefixes of a metric's gain over the base and of its standard error."""
SIGNIFICANT = 2.0
"""A gain is significant from this number of standard errors."""
_WEIGHT, _NOTES = "weight/", b"ramen"


@dataclass(frozen=True)
class Gain:
    """Gain in points, and its standard error over the test documents; None for fewer than two groups."""

    points: float
    error: float | None

    @property
    def significant(self) -> bool:
        """Whether the gain is at least two standard errors from 0."""
        return is_significant(self.points, self.error)


def is_significant(points: float, error: float | None) -> bool:
    """Return whether a gain is at least two standard errors from 0; false if the error is unknown."""
    return error is not None and points != 0 and abs(points) >= SIGNIFICANT * error


def standard_error(
    differences: Floats, groups: NDArray[Any] | None = None, weights: Floats | None = None
) -> float | None:
    """Return the cluster-robust standard error of a mean difference.

    Args:
        differences: [n], paired differences d_i.
        groups: int [n], the group of each document; None = one document per group.
        weights: [n], mean 1, the documents' shares of the metric's denominator; None = all 1.

    Returns:
        The standard error in the unit of `differences`; None for fewer than two groups.
    """
    if not len(differences):
        return None
    residuals = differences - differences.mean() * (1.0 if weights is None else weights)
    if groups is not None:
        residuals = np.bincount(np.unique(groups, return_inverse=True)[1], residuals)
    count = len(residuals)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * float(residuals @ residuals)) / len(differences)


@dataclass(frozen=True)
class PerDocument:
    """Each test document's contribution to a run's metrics.

    Attributes:
        uids: ids of the N' test documents, in test order.
        values: metric -> float64 [N'] in percent, from `metrics.metrics_by_document`; the mean is the metric.
        weights: metric -> float64 [N'], mean 1, from `metrics.document_weights`; metrics without an entry weigh 1.
        groups: int64 [N'], the group of each document; None = one document per group.
        notes: JSON values that describe the run, such as the digest of the dataset.
    """

    uids: list[str]
    values: Mapping[str, Floats]
    weights: Mapping[str, Floats] = field(default_factory=dict)
    groups: NDArray[np.int64] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group_count(self) -> int:
        """Number of groups of test documents."""
        return len(self.uids) if self.groups is None else len(np.unique(self.groups))

    def weights_of(self, metric: str) -> Floats | None:
        """Return the documents' shares of a metric's denominator; slices without their own use the overall metric's."""
        return self.weights.get(metric, self.weights.get(metric.rpartition("/")[2]))

    def write(self, path: Path) -> None:
        """Write a Parquet file: `uid`, `group`, a float32 column per metric, and `weight/METRIC`."""
        columns: dict[str, Any] = {"uid": pa.array(self.uids, pa.string())}
        if self.groups is not None:
            columns["group"] = pa.array(self.groups)
        columns |= {key: pa.array(values.astype(np.float32)) for key, values in self.values.items()}
        columns |= {f"{_WEIGHT}{key}": pa.array(values.astype(np.float32)) for key, values in self.weights.items()}
        table = pa.table(columns).replace_schema_metadata({_NOTES: json.dumps(dict(self.notes), sort_keys=True)})
        pq.write_table(table, path, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> PerDocument:
        """Read a file of `write`. Raises ArtifactError if it is missing or damaged."""
        with wrap_read_errors(path):
            table = pq.read_table(path)
            uids = [str(uid) for uid in table["uid"].to_pylist()]
            groups = table["group"].to_numpy() if "group" in table.column_names else None
            columns = {
                name: table[name].to_numpy().astype(np.float64)
                for name in table.column_names
                if name not in ("uid", "group")
            }
            notes = check_type(json.loads((table.schema.metadata or {}).get(_NOTES, b"{}")), dict[str, Any], str(path))
        values = {key: column for key, column in columns.items() if not key.startswith(_WEIGHT)}
        weights = {key.removeprefix(_WEIGHT): column for key, column in columns.items() if key.startswith(_WEIGHT)}
        return cls(uids, values, weights, groups, notes)


def paired_gains(ours: PerDocument, base: PerDocument) -> dict[str, Gain]:
    """Return the gains of a run over a base on the same test documents, with standard errors.

    Metrics that only one run has, or that were computed with different propensities, are left out.

    Args:
        ours, base: contributions on the same dataset; the groups of `ours` are used.
    """
    assert ours.uids == base.uids, "the runs were evaluated on different documents"
    gain_of = {}
    for metric in (metric for metric in ours.values if metric in base.values):
        weights, base_weights = ours.weights_of(metric), base.weights_of(metric)
        if weights is not None and (base_weights is None or not np.allclose(weights, base_weights, rtol=1e-5)):
            continue
        differences = ours.values[metric] - base.values[metric]
        gain_of[metric] = Gain(float(differences.mean()), standard_error(differences, ours.groups, weights))
    return gain_of


def flat_gains(gain_of: Mapping[str, Gain]) -> dict[str, float]:
    """Return gains under the keys of metrics.json: `gain/p_at_1`, `gain_se/p_at_1`, `gain/tail/p_at_1`, ..."""
    points = {f"{GAIN}{metric}": gain.points for metric, gain in gain_of.items()}
    return points | {f"{GAIN_SE}{metric}": gain.error for metric, gain in gain_of.items() if gain.error is not None}
