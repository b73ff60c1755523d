"""P, nDCG, PSP, PSnDCG, R, PSR and FN at 1..K, as pyxclib's `xc_metrics` defines them.

Letters: N' test documents, L labels, K depth of the ranking, G groups of labels.

Every numerator is a sum over *hits* (document, rank, label), so nothing of size N' x L is ever made, and the part
that a group of labels contributes is the same sum over the group's hits. Memory is O(N' K + nnz + G K^2).

Rules worth knowing: a document without labels stays in the mean and counts 0 (pyxclib); FN alone is averaged over
documents that have labels (R-ICLR); PSP, PSnDCG and PSR are ratios of corpus means, not means of ratios; a ratio
whose denominator is 0 is 0.
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
"""Ranks that `flat` needs."""
ENCODER = "encoder/"
"""Before the name of a metric: by the texts' vectors alone, without label context and classifiers."""
PEER = "peers/"
"""Before the name of a peer and of its metric."""

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
    """Inverse propensity of each label, `1 + C (N_l + b)^-a` with `C = (ln N - 1)(b + 1)^a`.

    Args:
        y_train: N x L; N counts empty rows too, N_l is the sum of the column's values.
        a, b: 0.55, 1.5 for most data sets; 0.5, 0.4 for Wikipedia-500K; 0.6, 2.6 for Amazon.

    Returns:
        float64 [L]. With N < 3 the values fall below 1.
    """
    assert y_train.shape[0] > 0
    constant = (np.log(y_train.shape[0]) - 1.0) * (b + 1.0) ** a
    frequency = np.asarray(y_train.sum(axis=0, dtype=np.float64)).ravel()
    return np.asarray(1.0 + constant * (frequency + b) ** -a, np.float64)


def rank(scores: Any, k: int, num_labels: int | None = None) -> Ints:
    """Turn scores into a ranking: higher score first, among equal scores the lower label first.

    Args:
        scores: CSR N' x L, of which the stored entries compete (zeros and negatives too); or a dense array
            [N', L], where -inf and NaN do not compete; or a mapping with `indices` and `scores`, both [N', K'],
            where an index outside 0..L-1 or a score of -inf is padding.
        k: length of the ranking.
        num_labels: L, needed for a mapping only.

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
        assert num_labels is not None, "a mapping does not say how many labels there are"
        columns, values = np.asarray(scores["indices"]), np.asarray(scores["scores"])
        competes = (columns >= 0) & (columns < num_labels) & (values > -np.inf)
    else:
        values = np.asarray(scores)
        num_labels = values.shape[1]
        columns = np.broadcast_to(np.arange(num_labels), values.shape)
        competes = values > -np.inf
    rows = np.nonzero(competes)[0]
    return _rank_entries(rows, columns[competes], values[competes], (values.shape[0], num_labels), k)


def _rank_entries(rows: Any, columns: Any, values: Any, shape: tuple[int, int], k: int) -> Ints:
    order = np.lexsort((columns, -values, rows))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    rows = rows[order]
    place = np.arange(len(order)) - starts[rows]
    kept = place < k
    out = np.full((shape[0], k), shape[1], np.int64)
    out[rows[kept], place[kept]] = columns[order][kept]
    return out


def apply_filter(
    indices: NDArray[Any], scores: NDArray[Any], filter_csr: sp.csr_matrix, k: int
) -> tuple[Ints, NDArray[np.float32]]:
    """Remove filtered pairs from sorted predictions, close the gaps, and only then cut to k.

    The ground truth is left as it is, as the published numbers have it: a filtered pair that is relevant is lost.

    Args:
        indices: int [N', K'] label ids, best first, padded with L.
        scores: [N', K'], in the same order.
        filter_csr: N' x L, the pairs to remove.
        k: length of the result.

    Returns:
        int64 [N', k] padded with L, and float32 [N', k] padded with -inf.
    """
    num_rows, num_labels = filter_csr.shape
    assert indices.shape == scores.shape and indices.shape[0] == num_rows
    kept = (indices < num_labels) & ~_contains(filter_csr, indices)[0]
    place = np.cumsum(kept, axis=1) - 1
    kept &= place < k
    rows = np.nonzero(kept)[0]
    labels = np.full((num_rows, k), num_labels, np.int64)
    values = np.full((num_rows, k), -np.inf, np.float32)
    labels[rows, place[kept]] = indices[kept]
    values[rows, place[kept]] = scores[kept]
    return labels, values


@dataclass(frozen=True)
class Hits:
    """Relevant pairs found at a rank: `row`, `rank` (0-based) and `label`, int64 [H] each."""

    row: Ints
    rank: Ints
    label: Ints


def _canonical(y: sp.csr_matrix) -> sp.csr_matrix:
    """Columns sorted in every row, each pair once, no stored zeros; the matrix itself where that holds already."""
    if y.has_canonical_format and y.data.all():
        return y
    y = y.copy()
    y.data = (y.data != 0).astype(np.float32)
    y.eliminate_zeros()
    y.sum_duplicates()
    return y


def pairs(y: sp.csr_matrix) -> tuple[Ints, Ints]:
    """Rows and columns of the non-zero entries, each pair once, in row-major order."""
    y = _canonical(y)
    return np.repeat(np.arange(y.shape[0]), np.diff(y.indptr)), y.indices.astype(np.int64)


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _mark_hits(indices: Any, indptr: Any, columns: Any, hit: Any, seen: Any) -> Any:
    """Mark where a ranked label is among its row's sorted columns; count labels ranked twice."""
    twice = 0
    for row in numba.prange(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        for place in range(indices.shape[1]):
            label = indices[row, place]
            low, high = begin, end
            while low < high:
                middle = (low + high) >> 1
                if columns[middle] < label:
                    low = middle + 1
                else:
                    high = middle
            if low < end and columns[low] == label:
                hit[row, place] = True
                twice += seen[low]
                seen[low] = True
    return twice


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _best_first(indptr: Any, columns: Any, inv_p: Any, out: Any) -> None:
    """Each row's columns by falling inverse propensity, the lower column first among equals."""
    for row in numba.prange(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin == 1:
            out[begin] = columns[begin]
        elif end > begin:
            mine = columns[begin:end]
            out[begin:end] = mine[np.argsort(-inv_p[mine], kind="mergesort")]


def _contains(y: sp.csr_matrix, indices: NDArray[Any]) -> tuple[NDArray[np.bool_], int]:
    """Whether y[i, indices[i, r]] is set (false for padding), and how often a label is set a second time in its row."""
    num_rows, num_labels = y.shape
    assert indices.shape[0] == num_rows, f"{indices.shape[0]} rankings for {num_rows} documents"
    assert not indices.size or (indices.min() >= 0 and indices.max() <= num_labels), "label ids outside 0..L"
    y = _canonical(y)
    hit = np.zeros(indices.shape, bool)
    return hit, _mark_hits(indices, y.indptr, y.indices, hit, np.zeros(y.nnz, bool))


def find_hits(indices: NDArray[Any], y: sp.csr_matrix) -> Hits:
    """Hits of a ranking (int [N', K], padded with L) in the ground truth (CSR N' x L)."""
    hit, twice = _contains(y, indices)
    assert not twice, "a label is ranked twice for the same document"
    row, place = np.nonzero(hit)
    return Hits(row, place, indices[row, place].astype(np.int64))


def _best(y: sp.csr_matrix, inv_p: Floats, k: int) -> Hits:
    """The hits of the best ranking under propensity scores: relevant labels, largest inverse propensity first."""
    y = _canonical(y)
    label = np.empty(y.nnz, np.int64)
    _best_first(y.indptr, y.indices, inv_p, label)
    counts = np.diff(y.indptr)
    row = np.repeat(np.arange(y.shape[0]), counts)
    place = np.arange(y.nnz) - np.repeat(y.indptr[:-1].astype(np.int64), counts)
    kept = place < k
    return Hits(row[kept], place[kept], label[kept])


def contributions(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, group: NDArray[Any], num_groups: int
) -> Curves:
    """All metrics, split by the group of the label that made the hit.

    Hits and ground truth are restricted to the group's labels; ranks and normalisers (document's label count, ideal
    gain, best propensity-scored ranking) are those of the full problem, so the groups add up to the whole.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.
        group: int [L], 0..G-1, or -1 for labels in no group.
        num_groups: G.

    Returns:
        p, n, psp, psn, r, psr, fn: float64 [G, K], fractions.
    """
    num_rows, k = indices.shape
    assert num_rows > 0 and k > 0 and len(inv_p) == len(group) == y.shape[1]
    row, label = pairs(y)
    relevant = np.bincount(row, minlength=num_rows)
    share = 1.0 / np.maximum(relevant, 1)
    found, best = find_hits(indices, y), _best(y, inv_p, k)
    one, scored, ideal = np.ones(len(found.row)), inv_p[found.label], inv_p[best.label]
    parts = _Sums(group, num_groups, k, relevant)
    whole = _Sums(np.zeros(y.shape[1], np.int64), 1, k, relevant)
    recalled = parts.plain(found, share[found.row])
    inside = group[label] >= 0
    sought = _totals(group[label][inside], share[row[inside]], num_groups)[:, None]
    return {
        "p": parts.plain(found, one) / np.arange(1, k + 1) / num_rows,
        "n": parts.discounted(found, one) / num_rows,
        "psp": _ratio(parts.plain(found, scored), whole.plain(best, ideal)),
        "psn": _ratio(parts.discounted(found, scored), whole.discounted(best, ideal)),
        "r": recalled / num_rows,
        "psr": _ratio(parts.plain(found, scored * share[found.row]), whole.plain(best, ideal * share[best.row])),
        "fn": (sought - recalled) / max(int(np.count_nonzero(relevant)), 1),
    }


@dataclass(frozen=True)
class _Sums:
    """Sums of weighted hits by group of labels and depth.

    Attributes:
        group: int [L], 0..G-1 or -1.
        num_groups: G.
        k: depth K.
        relevant: int [N'], labels of each document (n_i).
    """

    group: NDArray[Any]
    num_groups: int
    k: int
    relevant: NDArray[Any]

    def plain(self, hits: Hits, weight: Floats) -> Floats:
        """Weight of the hits within each depth, [G, K]."""
        inside = self.group[hits.label] >= 0
        cell = self.group[hits.label][inside] * self.k + hits.rank[inside]
        sums = _totals(cell, weight[inside], self.num_groups * self.k)
        return np.asarray(sums.reshape(self.num_groups, self.k).cumsum(1))

    def discounted(self, hits: Hits, weight: Floats) -> Floats:
        """Weight discounted by rank, over the ideal gain min(I(n_i), I(k)) of row and depth, [G, K]."""
        inside = self.group[hits.label] >= 0
        discount = 1.0 / np.log2(np.arange(self.k) + 2.0)
        count = np.minimum(self.relevant[hits.row[inside]], self.k) - 1
        cell = (self.group[hits.label][inside] * self.k + count) * self.k + hits.rank[inside]
        gain = _totals(cell, weight[inside] * discount[hits.rank[inside]], self.num_groups * self.k**2)
        steps = np.arange(self.k)
        ideal = discount.cumsum()[np.minimum(steps[:, None], steps[None, :])]
        return np.asarray((gain.reshape(self.num_groups, self.k, self.k).cumsum(2) / ideal).sum(1))


def _totals(cell: NDArray[Any], weight: Floats, length: int) -> Floats:
    """Weight by cell; unlike bincount alone it gives floats where there is no cell at all."""
    return np.bincount(cell, weight, length).astype(np.float64)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def evaluate(indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats) -> Curves:
    """All metrics of a ranking.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.

    Returns:
        p, n, psp, psn, r, psr, fn: float64 [K], fractions; entry k-1 is the metric at k.
    """
    curves = contributions(indices, y, inv_p, np.zeros(y.shape[1], np.int64), 1)
    return {name: values[0] for name, values in curves.items()}


BY_DOCUMENT = {"p": (1, 3, 5), "n": (5,), "psp": (1, 3, 5), "psn": (5,), "r": (10, 100), "label_r": (100,)}
"""Metrics that `by_document` takes apart, with depths."""


def by_document(
    indices: NDArray[Any], y: sp.csr_matrix, inv_p: Floats, slices: Mapping[str, NDArray[Any]]
) -> dict[str, Floats]:
    """What each document adds to a metric, so that the difference of two runs on the same documents has an error.

    Args:
        indices: int [N', K] label ids, best first, padded with L.
        y: CSR N' x L, ground truth.
        inv_p: float64 [L], from `inverse_propensity`.
        slices: name -> label ids, whose contributions are taken apart as well.

    Returns:
        float64 [N'] in percent under the keys of metrics.json (`p_at_1`, `tail/p_at_1`, ...); the mean over documents
        is the metric, for ratios of means too: their denominators, see `document_weights`, are means over all
        documents. No `label_r_at_k` of a slice whose labels occur in no test document.
    """
    num_rows, depth = indices.shape
    found = find_hits(indices, y)
    denominators = _denominators(y, inv_p, slices, depth)
    parts = {name: labels[found.label] for name, labels in _masks(slices, y.shape[1]).items()}
    out = {}
    for metric, k in _depths(depth):
        weight = _weight(metric, k, found, y, inv_p)
        for name, inside in parts.items():
            total = float(num_rows)
            if metric in _RATIOS:
                total = float(denominators[f"{name if metric == 'label_r' else ''}{metric}_at_{k}"].sum())
            if total == 0.0 and metric == "label_r":
                continue
            counted = (found.rank < k) & inside
            sums = _totals(found.row[counted], weight[counted], num_rows)
            out[f"{name}{metric}_at_{k}"] = sums * (100.0 * num_rows / total if total else 0.0)
    return out


def document_weights(
    y: sp.csr_matrix, inv_p: Floats, slices: Mapping[str, NDArray[Any]], depth: int = DEPTH
) -> dict[str, Floats]:
    """Shares of the documents in the denominators of the metrics that are ratios of means.

    PSP and PSnDCG are divided by the score of the best ranking, label-averaged recall by the number of labels tested: a
    document counts 1 / N_l for each of its labels l, N_l the label's test documents.

    Args:
        y, inv_p, slices: as for `by_document`.
        depth: K of the rankings.

    Returns:
        Metric -> float64 [N'], mean 1. A slice of PSP and PSnDCG has the denominator of the whole and no key.
    """
    found = _denominators(y, inv_p, slices, depth)
    return {key: values / values.mean() for key, values in found.items() if values.any()}


_RATIOS = ("psp", "psn", "label_r")
"""Metrics whose denominator differs between documents."""


def _depths(depth: int) -> list[tuple[str, int]]:
    return [(metric, k) for metric, depths in BY_DOCUMENT.items() for k in depths if k <= depth]


def _masks(slices: Mapping[str, NDArray[Any]], num_labels: int) -> dict[str, NDArray[np.bool_]]:
    """Prefix of a slice's keys -> its labels, bool [L]; the first is the whole."""
    parts = {f"{name}/": np.isin(np.arange(num_labels), labels) for name, labels in slices.items()}
    return {"": np.ones(num_labels, bool)} | parts


def _weight(metric: str, k: int, hits: Hits, y: sp.csr_matrix, inv_p: Floats) -> Floats:
    """What a hit within the first k adds to the numerator of its document, [H]; hits further down have any value."""
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
    """What each document adds to the denominators of `_RATIOS`, [N']; slices have one of their own for recall only."""
    out = {}
    row, label = pairs(y)
    tested = np.bincount(label, minlength=y.shape[1])
    for metric, k in _depths(depth):
        if metric == "label_r":
            for name, inside in _masks(slices, y.shape[1]).items():
                out[f"{name}{metric}_at_{k}"] = _totals(row, inside[label] / tested[label], y.shape[0])
        elif metric in _RATIOS:
            best = _best(y, inv_p, k)
            out[f"{metric}_at_{k}"] = _totals(best.row, _weight(metric, k, best, y, inv_p), y.shape[0])
    return out


def label_recall(indices: NDArray[Any], y: sp.csr_matrix, k: int) -> Floats:
    """Share of each label's test documents that rank it in their first k: float64 [L], NaN for untested labels."""
    found = find_hits(indices[:, :k], y)
    tested = np.bincount(pairs(y)[1], minlength=y.shape[1]).astype(np.float64)
    tested[tested == 0] = np.nan
    return np.asarray(np.bincount(found.label, minlength=y.shape[1]) / tested)


def flat(curves: Curves) -> dict[str, float]:
    """Percentages under the keys of metrics.json (`p_at_1`, `n_at_5`, ...), as far as the curves reach."""
    return {
        f"{name}_at_{k}": 100.0 * float(curves[name][k - 1])
        for name, depths in REPORTED.items()
        for k in depths
        if k <= len(curves[name])
    }
