"""Evaluation metrics: time, memory and values beside pyxclib's on the size of LF-WikiSeeAlsoTitles-320K.

    PYTHONPATH=/path/to/pyxclib python benchmarks/metrics.py

Synthetic: 177,515 documents, 312,330 labels of Zipf frequency, 2.11 per document, 100 sorted predictions each, of which
some are true. Both get the same sorted indices and give P, nDCG, PSP, PSnDCG and R at 1..k; ours gives PSR and FN, too.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import scipy.sparse as sp

from ramen.evaluation.metrics import evaluate, inverse_propensity


def problem(documents: int, labels: int, depth: int) -> tuple[np.ndarray, sp.csr_matrix, np.ndarray]:
    """Sorted predictions int64 [documents, depth], truth (CSR), inverse propensities."""
    rng = np.random.default_rng(0)
    popularity = 1 / np.arange(1, labels + 1)
    cumulative = np.cumsum(popularity / popularity.sum())
    counts = rng.poisson(1.11, documents) + 1
    rows = np.repeat(np.arange(documents), counts)
    columns = np.minimum(np.searchsorted(cumulative, rng.random(len(rows))), labels - 1)
    y = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(documents, labels))
    y.data[:] = 1
    predicted = rng.integers(0, labels - depth, (documents, 1)) + np.argsort(rng.random((1, depth)), axis=1)
    true = y.indices[y.indptr[:-1]]
    place = rng.integers(0, depth, documents)
    found = (rng.random(documents) < 0.6) & ~(predicted == true[:, None]).any(1)
    predicted[found, place[found]] = true[found]
    return predicted, y, inverse_propensity(y, 0.55, 1.5)


def best_of(runs: int, function: object) -> tuple[float, object]:
    """(least seconds, last result) of a call."""
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        result = function()  # type: ignore[operator]
        seconds.append(time.perf_counter() - started)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=177_515)
    parser.add_argument("--labels", type=int, default=312_330)
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    indices, y, inv_p = problem(given.documents, given.labels, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    evaluate(indices[:1000], y[:1000], inv_p)
    for depth in (5, 100):
        ours, mine = best_of(given.runs, lambda d=depth: evaluate(indices[:, :d], y, inv_p))
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"ramen    k={depth:3} {ours:7.2f} s  peak +{max(peak, 0):.0f} MiB")
        try:
            from xclib.evaluation import xc_metrics as peer
        except ImportError:
            print("pyxclib is not on PYTHONPATH: ours alone")
            continue

        def theirs(d: int = depth) -> dict[str, np.ndarray]:
            return {
                "p": peer.precision(indices, y, k=d, sorted=True),
                "n": peer.ndcg(indices, y, k=d, sorted=True),
                "psp": peer.psprecision(indices, y, inv_p, k=d, sorted=True),
                "psn": peer.psndcg(indices, y, inv_p, k=d, sorted=True),
                "r": peer.recall(indices, y, k=d, sorted=True),
            }

        theirs_seconds, other = best_of(given.runs, theirs)
        off = max(float(np.abs(mine[name] - other[name]).max()) for name in other)  # type: ignore[index, attr-defined]
        print(f"pyxclib  k={depth:3} {theirs_seconds:7.2f} s  largest difference {off:.1e}")
        print(f"pyxclib / ramen, k={depth}: {theirs_seconds / ours:.1f}")


if __name__ == "__main__":
    main()
