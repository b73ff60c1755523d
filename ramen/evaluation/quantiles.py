"""Equi-volume label bins (R-ICLR), head / torso / tail, and metrics per bin.

Two forms are reported and never share a name:

- *contribution* (`tail/p_at_1`, `tail/r_at_100`, ...): hits and ground truth restricted to the bin's labels, ranks
  and normalisers of the full problem. Averaged over documents; the bins add up to the complete value.
- *label-averaged* (`tail/label_r_at_100`): recall of each label within the bin (share of its test documents that rank
  it in the first k), averaged over the bin's labels that occur in the test set. Does not add up; 100 is the best for
  every bin. `label_fn_at_k` in the table is the form of R-ICLR's Table 8: missed share summed over the bin's labels,
  divided by all L labels; it does add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.evaluation.metrics import Floats, Ints, contributions, evaluate, flat, label_recall

QUANTILES = 5
"""Equi-volume bins of a report (R-ICLR)."""
LABEL_DEPTHS = (10, 100)
"""Depths of the label-averaged recall."""
MISSED_DEPTHS = (5, 10, 20, 50, 100)
"""Depths of the missed share by bin, those of R-ICLR's Table 8."""


def equi_volume_bins(frequency: NDArray[Any], q: int) -> list[Ints]:
    """Cut labels, most frequent first, into bins of about equal training volume (pyxclib's rule).

    A new bin starts before a label that would raise the bin's volume above floor(total / q). A first label larger than
    that leaves an empty first bin. The q-th bin takes all remaining labels.

    Args:
        frequency: [L] training documents per label.
        q: number of bins aimed at; fewer come out where single labels are large.

    Returns:
        Label ids of each bin (int64), every label once, ties in frequency by lower id.
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
    """Three groups of about equal training volume, for headlines.

    Labels are taken most frequent first (ties by lower id). Head takes labels until it holds at least a third of the
    volume, torso until it holds at least half of what head left, tail takes the rest with the labels never seen in
    training. Measuring torso by what is left keeps all three non-empty wherever three labels occur in training, also
    when one label outweighs all others (pyxclib's rule leaves an empty first bin there).

    Returns:
        head, torso, tail -> label ids, int64; every label in exactly one group.
    """
    order = np.argsort(-np.asarray(frequency), kind="stable").astype(np.int64)
    volume = np.cumsum(np.asarray(frequency, np.float64)[order])
    total = volume[-1] if len(order) else 0.0
    head = min(int(np.searchsorted(volume, total / 3.0, side="left")) + 1, len(order))
    reached = volume[head - 1] if head else 0.0
    torso = min(int(np.searchsorted(volume, reached + (total - reached) / 2.0, side="left")) + 1, len(order))
    torso = max(torso, head)
    return {"head": order[:head], "torso": order[head:torso], "tail": order[torso:]}


def by_bin(
    indices: NDArray[Any],
    y: sp.csr_matrix,
    inv_p: Floats,
    frequency: NDArray[Any],
    bins: Mapping[str, Ints],
) -> dict[str, dict[str, float]]:
    """Facts and metrics of each bin of labels, in percent.

    Args:
        indices: int [N', K] ranking, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L].
        frequency: [L] training documents per label.
        bins: name -> label ids; disjoint.

    Returns:
        name -> `labels`, `tested_labels`, `mean_documents` (training documents per label), contributions under the
        keys of `metrics.flat`, and `label_r_at_k`, `label_fn_at_k` (left out where no label of the bin is tested).
    """
    num_labels = y.shape[1]
    group = np.full(num_labels, -1, np.int64)
    for number, labels in enumerate(bins.values()):
        assert (group[labels] < 0).all(), "bins overlap"
        group[labels] = number
    curves = contributions(indices, y, inv_p, group, max(len(bins), 1))
    depths = sorted({*LABEL_DEPTHS, *MISSED_DEPTHS})
    recalls = {k: label_recall(indices, y, k) for k in depths if k <= indices.shape[1]}
    out: dict[str, dict[str, float]] = {}
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
        out[name] = row
    return out


def overall_and_thirds(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, frequency: NDArray[Any]
) -> dict[str, float]:
    """Metrics of a ranking under the keys of metrics.json, in percent: overall, and what head, torso and tail add.

    Args:
        indices: int [N', K] ranking, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L].
        frequency: int [L], training documents per label.
    """
    table = by_bin(indices, y, inv_p, frequency, head_torso_tail(frequency))
    return flat(evaluate(indices, y, inv_p)) | slices(table)


def slices(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a table as flat keys `tail/p_at_1`; `label_r_at_k` is the label-averaged form."""
    return {
        f"{name}/{key}": value
        for name, row in table.items()
        for key, value in row.items()
        if "_at_" in key and not key.startswith("label_fn")
    }
