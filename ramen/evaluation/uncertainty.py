"""Paired standard errors of gains, clustered by the group of the test documents.

Every metric is a ratio of means over the test documents, `mean(v_i) / mean(w_i)` with `mean(w_i) = 1`: v_i is the
document's contribution, w_i its share of the denominator (1 for P, nDCG and R; for PSP the share of the best possible
score). The gain of a run over another on the same documents is `D = mean(d_i)`, `d_i` the difference of contributions.
Its standard error, linearised and robust to clusters g = 1..G, is

    sqrt(G / (G - 1) * sum_g (sum_{i in g} (d_i - D w_i))^2) / n

With a group per document and w_i = 1 this is the standard error of the paired t-test.

Source: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference (2015); Cochran, Sampling Techniques,
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

from ramen.files import checked, reading

Floats = NDArray[np.float64]

PER_DOCUMENT = "per_document.parquet"
GAIN, GAIN_SE = "gain/", "gain_se/"
"""Before the name of a metric: the gain over the base, and its standard error."""
SIGNIFICANT = 2.0
"""Standard errors that a gain must reach to be shown as one."""
_WEIGHT, _NOTES = "weight/", b"ramen"


@dataclass(frozen=True)
class Gain:
    """Points of a metric gained, and the standard error over the documents; None for fewer than two groups."""

    points: float
    error: float | None

    @property
    def significant(self) -> bool:
        """Whether the gain is at least two standard errors away from 0."""
        return is_significant(self.points, self.error)


def is_significant(points: float, error: float | None) -> bool:
    """Whether a gain is at least two standard errors away from 0; false where the error is unknown."""
    return error is not None and points != 0 and abs(points) >= SIGNIFICANT * error


def standard_error(
    differences: Floats, groups: NDArray[Any] | None = None, weights: Floats | None = None
) -> float | None:
    """Return the cluster-robust standard error of a mean difference.

    Args:
        differences: [n], paired differences d_i.
        groups: int [n], the group of each document; None = each is its own.
        weights: [n], mean 1, the documents' shares of the metric's denominator; None = 1 each.

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
    """What each test document contributes to a run's metrics.

    Attributes:
        uids: of the N' test documents, in test order.
        values: metric -> float64 [N'] in percent, as `metrics.by_document` gives them; their mean is the metric.
        weights: metric -> float64 [N'], mean 1, as `metrics.document_weights` gives them; of metrics without: 1 each.
        groups: int64 [N'], the group of each document; None = each is its own.
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
        """Shares of a metric's denominator; the contribution of head, torso or tail has that of the whole metric."""
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
        """Read what `write` wrote. Raises ArtifactError if it is missing or damaged."""
        with reading(path):
            table = pq.read_table(path)
            uids = [str(uid) for uid in table["uid"].to_pylist()]
            groups = table["group"].to_numpy() if "group" in table.column_names else None
            numbers = {
                name: table[name].to_numpy().astype(np.float64)
                for name in table.column_names
                if name not in ("uid", "group")
            }
            notes = checked(json.loads((table.schema.metadata or {}).get(_NOTES, b"{}")), dict[str, Any], str(path))
        values = {key: column for key, column in numbers.items() if not key.startswith(_WEIGHT)}
        weights = {key.removeprefix(_WEIGHT): column for key, column in numbers.items() if key.startswith(_WEIGHT)}
        return cls(uids, values, weights, groups, notes)


def gains(ours: PerDocument, base: PerDocument) -> dict[str, Gain]:
    """Return what a run gains over another on the same test documents, with standard errors.

    Metrics that only one run has, or that were computed with other propensities, are left out.

    Args:
        ours, base: of the same dataset; the groups are those of `ours`.
    """
    assert ours.uids == base.uids, "the runs were evaluated on other documents"
    found = {}
    for metric in (metric for metric in ours.values if metric in base.values):
        weights, theirs = ours.weights_of(metric), base.weights_of(metric)
        if weights is not None and (theirs is None or not np.allclose(weights, theirs, rtol=1e-5)):
            continue
        differences = ours.values[metric] - base.values[metric]
        found[metric] = Gain(float(differences.mean()), standard_error(differences, ours.groups, weights))
    return found


def flat_gains(found: Mapping[str, Gain]) -> dict[str, float]:
    """Gains under the keys of metrics.json: `gain/p_at_1`, `gain_se/p_at_1`, `gain/tail/p_at_1`, ..."""
    points = {f"{GAIN}{metric}": gain.points for metric, gain in found.items()}
    return points | {f"{GAIN_SE}{metric}": gain.error for metric, gain in found.items() if gain.error is not None}
