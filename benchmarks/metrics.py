"""Evaluation metrics: time, memory and values compared with pyxclib, at the size of LF-WikiSeeAlsoTitles-320K.

    PYTHONPATH=/path/to/pyxclib python benchmarks/metrics.py

The data are synthetic: 177,515 documents, 312,330 labels with Zipf frequencies, 2.11 labels per document, and 100
sorted predictions per document, some of them true. Both libraries get the same sorted indices and compute P, nDCG, PSP,
PSnDCG and R at 1..k; ramen also computes PSR and FN.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import scipy.sparse as sp

from ramen.evaluation.metrics import compute_metrics, inverse_propensity


def make_predictions(documents: int, labels: int, depth: int) -> tuple[np.ndarray, sp.csr_matrix, np.ndarray]:
    """Return sorted predictions int64 [documents, depth], true labels (CSR) and inverse propensities."""
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
    column = rng.integers(0, depth, documents)
    hit = (rng.random(documents) < 0.6) & ~(predicted == true[:, None]).any(1)
    predicted[hit, column[hit]] = true[hit]
    return predicted, y, inverse_propensity(y, 0.55, 1.5)


def best_of(runs: int, function: object) -> tuple[float, object]:
    """Call a function several times; return the least seconds and the last result."""
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
    args = parser.parse_args()
    indices, y, inv_p = make_predictions(args.documents, args.labels, 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compute_metrics(indices[:1000], y[:1000], inv_p)
    for depth in (5, 100):
        seconds, metrics = best_of(args.runs, lambda d=depth: compute_metrics(indices[:, :d], y, inv_p))
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"ramen    k={depth:3} {seconds:7.2f} s  peak +{max(peak, 0):.0f} MiB")
        try:
            from xclib.evaluation import xc_metrics as peer
        except ImportError:
            print("pyxclib is not on PYTHONPATH: only ramen is measured")
            continue

        def evaluate_peer(d: int = depth) -> dict[str, np.ndarray]:
            return {
                "p": peer.precision(indices, y, k=d, sorted=True),
                "n": peer.ndcg(indices, y, k=d, sorted=True),
                "psp": peer.psprecision(indices, y, inv_p, k=d, sorted=True),
                "psn": peer.psndcg(indices, y, inv_p, k=d, sorted=True),
                "r": peer.recall(indices, y, k=d, sorted=True),
            }

        peer_seconds, peer_metrics = best_of(args.runs, evaluate_peer)
        difference = max(float(np.abs(metrics[name] - peer_metrics[name]).max()) for name in peer_metrics)  # type: ignore[index, attr-defined]
        print(f"pyxclib  k={depth:3} {peer_seconds:7.2f} s  largest difference {difference:.1e}")
        print(f"pyxclib / ramen, k={depth}: {peer_seconds / seconds:.1f}")


if __name__ == "__main__":
    main()
