"""P, nDCG, PSP, PSnDCG, R, PSR and FN at 1..K, as pyxclib's `xc_metrics` defines them.

Letters: N' test documents, L labels, K depth of the ranking, G groups of labels.

Every numerator is a sum over *hits* (document, rank, label), so no N' x L array is allocated, and the contribution of
a group of labels is the same sum over the group's hits. Memory is O(N' K + nnz + G K^2).

Conventions: a document without labels counts as 0 in the mean (pyxclib); only FN is averaged over the documents that
have labels (R-ICLR); PSP, PSnDCG and PSR are ratios of corpus means, not means of ratios; a ratio with a zero
denominator is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Curves = dict[str, Floats]
"""Metric name -> values at 1..K, as fractions."""

DEPTH = 100
"""Length of the rankings: the largest depth in `REPORTED`."""
ENCODER = "encoder/"
"""Prefix of metrics of the encoder only, without label context and classifiers."""
PEER = "peers/"
"""Prefix of a peer's metrics: `peers/NAME/METRIC`."""

REPORTED = {
    "p": (1, 3, 5),
    "n": (1, 3, 5),
    "psp": (1, 3, 5),
    "psn": (1, 3, 5),
    "r": (10, 100),
    "psr": (100,),
    "fn": (100,),
}
"""Metric -> depths in metrics.json."""


def inverse_propensity(y_train: sp.csr_matrix, a: float, b: float) -> Floats:
    """Return each label's inverse propensity, `1 + C (N_l + b)^-a` with `C = (ln N - 1)(b + 1)^a`.

    Args:
        y_train: CSR N x L; N includes empty rows, N_l is the sum of column l.
        a, b: 0.55, 1.5 for most data sets; 0.5, 0.4 for Wikipedia-500K; 0.6, 2.6 for Amazon.

    Returns:
        float64 [L]. With N < 3 the values fall below 1.
    """
    assert y_train.shape[0] > 0
    constant = (np.log(y_train.shape[0]) - 1.0) * (b + 1.0) ** a
    frequency = np.asarray(y_train.sum(axis=0, dtype=np.float64)).ravel()
    return np.asarray(1.0 + constant * (frequency + b) ** -a, np.float64)


def rank_scores(scores: Any, k: int, num_labels: int | None = None) -> Ints:
    """Rank labels by score, highest first; ties go to the lower label id.

    Args:
        scores: one of three forms: CSR N' x L, whose stored entries are ranked (zeros and negatives too); a dense array
            [N', L], where -inf and NaN are left out; or a mapping with `indices` and `scores`, both [N', K'], where an
            index outside 0..L-1 or a score of -inf is padding.
        k: length of the ranking.
        num_labels: L; required for a mapping.

    Returns:
        int64 [N', k] label ids, padded with L.
    """
    if sp.issparse(scores):
        matrix = sp.csr_matrix(scores)
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return _rank_entries(rows, matrix.indices, matrix.data, matrix.shape, k)
    if isinstance(scores, Mapping):
        assert num_labels is not None, "num_labels is required for a mapping"
        columns, values = np.asarray(scores["indices"]), np.asarray(scores["scores"])
        ranked = (columns >= 0) & (columns < num_labels) & (values > -np.inf)
    else:
        values = np.asarray(scores)
        num_labels = values.shape[1]
        columns = np.broadcast_to(np.arange(num_labels), values.shape)
        ranked = values > -np.inf
    rows = np.nonzero(ranked)[0]
    return _rank_entries(rows, columns[ranked], values[ranked], (values.shape[0], num_labels), k)


def _rank_entries(rows: Any, columns: Any, values: Any, shape: tuple[int, int], k: int) -> Ints:
    order = np.lexsort((columns, -values, rows))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    rows = rows[order]
    ranks = np.arange(len(order)) - starts[rows]
    kept = ranks < k
    ranking = np.full((shape[0], k), shape[1], np.int64)
    ranking[rows[kept], ranks[kept]] = columns[order][kept]
    return ranking


def apply_filter(
    indices: NDArray[Any], scores: NDArray[Any], filter_csr: sp.csr_matrix, k: int
) -> tuple[Ints, NDArray[np.float32]]:
    """Remove filtered pairs from rankings, close the gaps, then cut to length k.

    The ground truth is not filtered, as in the published results: a relevant pair that is filtered is a miss.

    Args:
        indices: int [N', K'] label ids, best first, padded with L.
        scores: [N', K'] scores of `indices`.
        filter_csr: CSR N' x L, the pairs to remove.
        k: length of the result.

    Returns:
        int64 [N', k] padded with L, and float32 [N', k] padded with -inf.
    """
    num_rows, num_labels = filter_csr.shape
    assert indices.shape == scores.shape and indices.shape[0] == num_rows
    kept = (indices < num_labels) & ~_contains(filter_csr, indices)[0]
    ranks = np.cumsum(kept, axis=1) - 1
    kept &= ranks < k
    rows = np.nonzero(kept)[0]
    labels = np.full((num_rows, k), num_labels, np.int64)
    values = np.full((num_rows, k), -np.inf, np.float32)
    labels[rows, ranks[kept]] = indices[kept]
    values[rows, ranks[kept]] = scores[kept]
    return labels, values


@dataclass(frozen=True)
class Hits:
    """Relevant labels in rankings: document `row`, 0-based `rank` and `label`, int64 [H] each."""

    row: Ints
    rank: Ints
    label: Ints


def _canonical(y: sp.csr_matrix) -> sp.csr_matrix:
    """Return y with sorted columns, without duplicates and stored zeros; y itself if it already is in that form."""
    if y.has_canonical_format and y.data.all():
        return y
    y = y.copy()
    y.data = (y.data != 0).astype(np.float32)
    y.eliminate_zeros()
    y.sum_duplicates()
    return y


def pairs(y: sp.csr_matrix) -> tuple[Ints, Ints]:
    """Return rows and columns of the non-zero entries, without duplicates, in row-major order."""
    y = _canonical(y)
    return np.repeat(np.arange(y.shape[0]), np.diff(y.indptr)), y.indices.astype(np.int64)


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _mark_hits(indices: Any, indptr: Any, columns: Any, hit: Any, seen: Any) -> Any:
    """Mark the ranked labels that are among their row's sorted columns; return the number of duplicates."""
    duplicates = 0
    for row in numba.prange(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        for rank in range(indices.shape[1]):
            label = indices[row, rank]
            low, high = begin, end
            while low < high:
                middle = (low + high) >> 1
                if columns[middle] < label:
                    low = middle + 1
                else:
                    high = middle
            if low < end and columns[low] == label:
                hit[row, rank] = True
                duplicates += seen[low]
                seen[low] = True
    return duplicates


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _sort_by_propensity(indptr: Any, columns: Any, inv_p: Any, out: Any) -> None:
    """Write each row's columns by decreasing inverse propensity; ties go to the lower column."""
    for row in numba.prange(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin == 1:
            out[begin] = columns[begin]
        elif end > begin:
            labels = columns[begin:end]
            out[begin:end] = labels[np.argsort(-inv_p[labels], kind="mergesort")]


def _contains(y: sp.csr_matrix, indices: NDArray[Any]) -> tuple[NDArray[np.bool_], int]:
    """Return whether y[i, indices[i, r]] is set (false for padding), and the number of labels repeated in a row."""
    num_rows, num_labels = y.shape
    assert indices.shape[0] == num_rows, f"{indices.shape[0]} rankings for {num_rows} documents"
    assert not indices.size or (indices.min() >= 0 and indices.max() <= num_labels), "label ids outside 0..L"
    y = _canonical(y)
    hit = np.zeros(indices.shape, bool)
    return hit, _mark_hits(indices, y.indptr, y.indices, hit, np.zeros(y.nnz, bool))


def find_hits(indices: NDArray[Any], y: sp.csr_matrix) -> Hits:
    """Return the hits of rankings (int [N', K], padded with L) in the ground truth (CSR N' x L)."""
    hit, duplicates = _contains(y, indices)
    assert not duplicates, "a label is ranked twice for the same document"
    row, rank = np.nonzero(hit)
    return Hits(row, rank, indices[row, rank].astype(np.int64))


def _ideal_hits(y: sp.csr_matrix, inv_p: Floats, k: int) -> Hits:
    """Return the hits of the ideal ranking for PSP: relevant labels, largest inverse propensity first."""
    y = _canonical(y)
    label = np.empty(y.nnz, np.int64)
    _sort_by_propensity(y.indptr, y.indices, inv_p, label)
    counts = np.diff(y.indptr)
    row = np.repeat(np.arange(y.shape[0]), counts)
    rank = np.arange(y.nnz) - np.repeat(y.indptr[:-1].astype(np.int64), counts)
    kept = rank < k
    return Hits(row[kept], rank[kept], label[kept])


def metrics_by_group(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, group: NDArray[Any], num_groups: int
) -> Curves:
    """Return each group of labels' contribution to the metrics.

    Hits and ground truth are restricted to the group's labels. Ranks and normalisers (label count of the document,
    ideal gain, ideal propensity-scored ranking) are those of all labels, so the contributions sum to the metric.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.
        group: int [L], 0..G-1; -1 for labels outside all groups.
        num_groups: G.

    Returns:
        p, n, psp, psn, r, psr, fn -> float64 [G, K], fractions.
    """
    num_rows, k = indices.shape
    assert num_rows > 0 and k > 0 and len(inv_p) == len(group) == y.shape[1]
    row, label = pairs(y)
    relevant = np.bincount(row, minlength=num_rows)
    share = 1.0 / np.maximum(relevant, 1)
    hits, ideal = find_hits(indices, y), _ideal_hits(y, inv_p, k)
    one, scored, best = np.ones(len(hits.row)), inv_p[hits.label], inv_p[ideal.label]
    parts = _GroupSums(group, num_groups, k, relevant)
    whole = _GroupSums(np.zeros(y.shape[1], np.int64), 1, k, relevant)
    recalled = parts.plain(hits, share[hits.row])
    grouped = group[label] >= 0
    recallable = _bincount(group[label][grouped], share[row[grouped]], num_groups)[:, None]
    return {
        "p": parts.plain(hits, one) / np.arange(1, k + 1) / num_rows,
        "n": parts.discounted(hits, one) / num_rows,
        "psp": _ratio(parts.plain(hits, scored), whole.plain(ideal, best)),
        "psn": _ratio(parts.discounted(hits, scored), whole.discounted(ideal, best)),
        "r": recalled / num_rows,
        "psr": _ratio(parts.plain(hits, scored * share[hits.row]), whole.plain(ideal, best * share[ideal.row])),
        "fn": (recallable - recalled) / max(int(np.count_nonzero(relevant)), 1),
    }


@dataclass(frozen=True)
class _GroupSums:
    """Sums of hit weights by label group and depth.

    Attributes:
        group: int [L], 0..G-1 or -1.
        num_groups: G.
        k: depth K.
        relevant: int [N'], number of labels of each document (n_i).
    """

    group: NDArray[Any]
    num_groups: int
    k: int
    relevant: NDArray[Any]

    def plain(self, hits: Hits, weight: Floats) -> Floats:
        """Return the total weight of the hits within each depth, [G, K]."""
        grouped = self.group[hits.label] >= 0
        cell = self.group[hits.label][grouped] * self.k + hits.rank[grouped]
        sums = _bincount(cell, weight[grouped], self.num_groups * self.k)
        return np.asarray(sums.reshape(self.num_groups, self.k).cumsum(1))

    def discounted(self, hits: Hits, weight: Floats) -> Floats:
        """Return the rank-discounted weight over the ideal gain min(I(n_i), I(k)) of row and depth, [G, K]."""
        grouped = self.group[hits.label] >= 0
        discount = 1.0 / np.log2(np.arange(self.k) + 2.0)
        count = np.minimum(self.relevant[hits.row[grouped]], self.k) - 1
        cell = (self.group[hits.label][grouped] * self.k + count) * self.k + hits.rank[grouped]
        gain = _bincount(cell, weight[grouped] * discount[hits.rank[grouped]], self.num_groups * self.k**2)
        depths = np.arange(self.k)
        ideal = discount.cumsum()[np.minimum(depths[:, None], depths[None, :])]
        return np.asarray((gain.reshape(self.num_groups, self.k, self.k).cumsum(2) / ideal).sum(1))


def _bincount(cell: NDArray[Any], weight: Floats, length: int) -> Floats:
    """Return the total weight of each cell as floats; np.bincount returns integers for empty input."""
    return np.bincount(cell, weight, length).astype(np.float64)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def compute_metrics(indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats) -> Curves:
    """Return all metrics of a ranking.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.

    Returns:
        p, n, psp, psn, r, psr, fn -> float64 [K], fractions; entry k-1 is the metric at k.
    """
    curves = metrics_by_group(indices, y, inv_p, np.zeros(y.shape[1], np.int64), 1)
    return {name: values[0] for name, values in curves.items()}


PER_DOCUMENT_DEPTHS = {"p": (1, 3, 5), "n": (5,), "psp": (1, 3, 5), "psn": (5,), "r": (10, 100), "label_r": (100,)}
"""Metric -> depths that `metrics_by_document` computes."""
_RATIOS = ("psp", "psn", "label_r")
"""Metrics whose denominator differs between documents."""


def metrics_by_document(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, slices: Mapping[str, NDArray[Any]]
) -> dict[str, Floats]:
    """Return each document's contribution to the metrics, from which standard errors of gains are computed.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.
        slices: name -> label ids, whose contributions are also computed separately.

    Returns:
        Key of metrics.json (`p_at_1`, `tail/p_at_1`, ...) -> float64 [N'] in percent, whose mean is the metric. Ratios
        of means are divided by their mean denominator, see `document_weights`. A slice whose labels occur in no test
        document has no `label_r_at_k`.
    """
    num_rows, depth = indices.shape
    hits = find_hits(indices, y)
    denominators = _denominators(y, inv_p, slices, depth)
    in_slice = {prefix: labels[hits.label] for prefix, labels in _slice_masks(slices, y.shape[1]).items()}
    values = {}
    for metric, k in _metric_depths(depth):
        weight = _hit_weight(metric, k, hits, y, inv_p)
        for prefix, inside in in_slice.items():
            total = float(num_rows)
            if metric in _RATIOS:
                total = float(denominators[f"{prefix if metric == 'label_r' else ''}{metric}_at_{k}"].sum())
            if total == 0.0 and metric == "label_r":
                continue
            counted = (hits.rank < k) & inside
            sums = _bincount(hits.row[counted], weight[counted], num_rows)
            values[f"{prefix}{metric}_at_{k}"] = sums * (100.0 * num_rows / total if total else 0.0)
    return values


def document_weights(
    y: sp.csr_matrix, inv_p: Floats, slices: Mapping[str, NDArray[Any]], depth: int = DEPTH
) -> dict[str, Floats]:
    """Return each document's share of the denominators of the metrics that are ratios of means.

    The denominator of PSP and PSnDCG is the score of the ideal ranking. That of label-averaged recall is the number of
    tested labels: a document counts 1 / N_l for each of its labels l, where N_l is the label's test documents.

    Args:
        y, inv_p, slices: as for `metrics_by_document`.
        depth: K of the rankings.

    Returns:
        Metric -> float64 [N'], mean 1. Slices of PSP and PSnDCG share the denominator of all labels and have no key.
    """
    denominators = _denominators(y, inv_p, slices, depth)
    return {key: values / values.mean() for key, values in denominators.items() if values.any()}


def _metric_depths(depth: int) -> list[tuple[str, int]]:
    return [(metric, k) for metric, depths in PER_DOCUMENT_DEPTHS.items() for k in depths if k <= depth]


def _slice_masks(slices: Mapping[str, NDArray[Any]], num_labels: int) -> dict[str, NDArray[np.bool_]]:
    """Return the key prefix of each slice -> its labels as bool [L]; the first, "", is all labels."""
    masks = {f"{name}/": np.isin(np.arange(num_labels), labels) for name, labels in slices.items()}
    return {"": np.ones(num_labels, bool)} | masks


def _hit_weight(metric: str, k: int, hits: Hits, y: sp.csr_matrix, inv_p: Floats) -> Floats:
    """Return what a hit within depth k adds to its document's numerator, [H]; undefined for hits below depth k."""
    relevant = np.diff(_canonical(y).indptr)[hits.row]
    if metric == "p":
        return np.full(len(hits.row), 1.0 / k)
    if metric == "psp":
        return inv_p[hits.label]
    if metric == "r":
        return np.asarray(1.0 / relevant, np.float64)
    if metric == "label_r":
        return np.asarray(1.0 / np.bincount(pairs(y)[1], minlength=y.shape[1])[hits.label], np.float64)
    discount = 1.0 / np.log2(np.arange(k) + 2.0)
    share = discount[np.minimum(hits.rank, k - 1)] / discount.cumsum()[np.minimum(relevant, k) - 1]
    return np.asarray(share * (inv_p[hits.label] if metric == "psn" else 1.0), np.float64)


def _denominators(y: sp.csr_matrix, inv_p: Floats, slices: Mapping[str, NDArray[Any]], depth: int) -> dict[str, Floats]:
    """Return each document's part of the denominators of `_RATIOS`, [N']; only `label_r` has one per slice."""
    denominators = {}
    row, label = pairs(y)
    tested = np.bincount(label, minlength=y.shape[1])
    for metric, k in _metric_depths(depth):
        if metric == "label_r":
            for prefix, inside in _slice_masks(slices, y.shape[1]).items():
                denominators[f"{prefix}{metric}_at_{k}"] = _bincount(row, inside[label] / tested[label], y.shape[0])
        elif metric in _RATIOS:
            ideal = _ideal_hits(y, inv_p, k)
            weight = _hit_weight(metric, k, ideal, y, inv_p)
            denominators[f"{metric}_at_{k}"] = _bincount(ideal.row, weight, y.shape[0])
    return denominators


def label_recall(indices: NDArray[Any], y: sp.csr_matrix, k: int) -> Floats:
    """Return the share of each label's test documents that rank it in their top k, float64 [L]; NaN if untested."""
    hits = find_hits(indices[:, :k], y)
    tested = np.bincount(pairs(y)[1], minlength=y.shape[1]).astype(np.float64)
    tested[tested == 0] = np.nan
    return np.asarray(np.bincount(hits.label, minlength=y.shape[1]) / tested)


def flat(curves: Curves) -> dict[str, float]:
    """Return percentages under the keys of metrics.json (`p_at_1`, `n_at_5`, ...), up to the curves' depth."""
    return {
        f"{name}_at_{k}": 100.0 * float(curves[name][k - 1])
        for name, depths in REPORTED.items()
        for k in depths
        if k <= len(curves[name])
    }
