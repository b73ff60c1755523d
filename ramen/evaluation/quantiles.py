"""Equi-volume label bins (R-ICLR), head / torso / tail, and metrics per bin.

Metrics per bin have two forms with separate names:

- *contribution* (`tail/p_at_1`, `tail/r_at_100`, ...): hits and ground truth restricted to the bin's labels, ranks and
  normalisers of all labels. Averaged over documents; the bins sum to the overall metric.
- *label-averaged* (`tail/label_r_at_100`): recall of each label (share of its test documents that rank it in the top
  k), averaged over the bin's labels that occur in the test set; the maximum of every bin is 100. `label_fn_at_k` is
  R-ICLR's Table 8: the missed share summed over the bin's labels, divided by all L labels; its bins sum to the overall
  value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.evaluation.metrics import Floats, Ints, compute_metrics, flat, label_recall, metrics_by_group

QUANTILES = 5
"""Target number of equi-volume bins in the report (R-ICLR)."""
LABEL_DEPTHS = (10, 100)
"""Depths of the label-averaged recall."""
MISSED_DEPTHS = (5, 10, 20, 50, 100)
"""Depths of the missed share per bin (R-ICLR, Table 8)."""


def equi_volume_bins(frequency: NDArray[Any], q: int) -> list[Ints]:
    """Cut the labels, most frequent first, into bins of about equal training volume (pyxclib's rule).

    A new bin starts before a label that would raise the bin above floor(total / q), so a larger first label leaves an
    empty first bin. The q-th bin takes the rest.

    Args:
        frequency: [L] training documents per label.
        q: target number of bins; single large labels lead to fewer.

    Returns:
        int64 label ids of each bin; every label is in exactly one bin, ties in frequency go to the lower id.
    """
    assert q >= 1
    order = np.argsort(-np.asarray(frequency), kind="stable").astype(np.int64)
    volume = np.cumsum(np.asarray(frequency, np.float64)[order])
    limit = volume[-1] / q if len(order) else 0.0
    bins: list[Ints] = []
    start = 0
    while start < len(order):
        reached = volume[start - 1] if start else 0.0
        end = int(np.searchsorted(volume, reached + np.floor(limit), side="right"))
        end = max(end, start + 1) if bins else end
        end = len(order) if len(bins) == q - 1 else min(end, len(order))
        bins.append(order[start:end])
        start = end
    return bins


def head_torso_tail(frequency: NDArray[Any]) -> dict[str, Ints]:
    """Split the labels into three groups of about equal training volume.

    Labels are assigned most frequent first (ties by lower id): to head until it holds at least a third of the volume,
    to torso until it holds at least half of the remaining volume, then to tail, which includes labels unseen in
    training. Measuring torso by the remaining volume keeps all groups non-empty if at least three labels occur in
    training, even if one label outweighs all others (pyxclib's rule would leave an empty first bin).

    Args:
        frequency: [L] training documents per label.

    Returns:
        head, torso, tail -> int64 label ids; every label is in exactly one group.
    """
    order = np.argsort(-np.asarray(frequency), kind="stable").astype(np.int64)
    volume = np.cumsum(np.asarray(frequency, np.float64)[order])
    total = volume[-1] if len(order) else 0.0
    head = min(int(np.searchsorted(volume, total / 3.0, side="left")) + 1, len(order))
    reached = volume[head - 1] if head else 0.0
    torso = min(int(np.searchsorted(volume, reached + (total - reached) / 2.0, side="left")) + 1, len(order))
    torso = max(torso, head)
    return {"head": order[:head], "torso": order[head:torso], "tail": order[torso:]}


def metrics_by_bin(
    indices: NDArray[Any],
    y: sp.csr_matrix,
    inv_p: Floats,
    frequency: NDArray[Any],
    bins: Mapping[str, Ints],
) -> dict[str, dict[str, float]]:
    """Return label counts and metrics (in percent) of each bin of labels.

    Args:
        indices: int [N', K] ranking, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L].
        frequency: [L] training documents per label.
        bins: name -> label ids; disjoint.

    Returns:
        Name -> `labels`, `tested_labels`, `mean_documents` (training documents per label), contributions under the
        keys of `metrics.flat`, and `label_r_at_k`, `label_fn_at_k` (missing if no label of the bin occurs in the test
        set).
    """
    num_labels = y.shape[1]
    group = np.full(num_labels, -1, np.int64)
    for number, labels in enumerate(bins.values()):
        assert (group[labels] < 0).all(), "bins overlap"
        group[labels] = number
    curves = metrics_by_group(indices, y, inv_p, group, max(len(bins), 1))
    depths = sorted({*LABEL_DEPTHS, *MISSED_DEPTHS})
    recalls = {k: label_recall(indices, y, k) for k in depths if k <= indices.shape[1]}
    table: dict[str, dict[str, float]] = {}
    for number, (name, labels) in enumerate(bins.items()):
        row: dict[str, float] = {
            "labels": len(labels),
            "tested_labels": 0,
            "mean_documents": float(np.mean(frequency[labels])) if len(labels) else 0.0,
            **flat({key: values[number] for key, values in curves.items()}),
        }
        for k, recall in recalls.items():
            tested = recall[labels][~np.isnan(recall[labels])]
            row["tested_labels"] = len(tested)
            if len(tested) and k in LABEL_DEPTHS:
                row[f"label_r_at_{k}"] = 100.0 * float(tested.mean())
            if len(tested):
                row[f"label_fn_at_{k}"] = 100.0 * float((1.0 - tested).sum()) / num_labels
        table[name] = row
    return table


def overall_and_thirds(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, frequency: NDArray[Any]
) -> dict[str, float]:
    """Return the metrics of a ranking in percent, overall and by head, torso and tail, under the keys of metrics.json.

    Args:
        indices: int [N', K] ranking, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L].
        frequency: int [L], training documents per label.
    """
    table = metrics_by_bin(indices, y, inv_p, frequency, head_torso_tail(frequency))
    return flat(compute_metrics(indices, y, inv_p)) | flatten_bins(table)


def flatten_bins(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a table by bin under flat keys `tail/p_at_1`, without `label_fn_at_k`."""
    return {
        f"{name}/{key}": value
        for name, row in table.items()
        for key, value in row.items()
        if "_at_" in key and not key.startswith("label_fn")
    }
