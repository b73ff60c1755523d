"""Random walk: hops per second compared with pyxclib, and memory at several sizes.

    python benchmarks/walk.py                     both libraries in one run
    python benchmarks/walk.py --scale 4           four times the documents and anchors

pyxclib (github.com/kunaldahiya/pyxclib) is not on the package index: put a checkout on PYTHONPATH. ramen and `simulate`
of pyxclib count visits and keep the top k; the kernel of pyxclib only lists the visited anchors.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import scipy.sparse as sp

from ramen.graph.walk import walk

HOPS, RESTART, TOP_K, CAP = 400, 0.8, 10, 500


def zipf_graph(documents: int, anchors: int, mean_degree: int, seed: int = 0) -> sp.csr_matrix:
    """Make a graph documents x anchors with Zipf popularity of anchors (exponent 1, shuffled)."""
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, anchors + 1)
    cumulative = np.cumsum(popularity / popularity.sum())
    shuffled = rng.permutation(anchors)
    degree = rng.poisson(mean_degree - 1, documents) + 1
    columns = shuffled[np.minimum(np.searchsorted(cumulative, rng.random(degree.sum())), anchors - 1)]
    rows = np.repeat(np.arange(documents), degree)
    matrix = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(documents, anchors))
    matrix.data[:] = 1
    return matrix


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_ramen(matrix: sp.csr_matrix, threads: int) -> float:
    """Return hops per second, without compilation."""
    settings = {"hops": HOPS, "restart": RESTART, "top_k": TOP_K, "degree_cap": CAP, "seed": 0, "threads": threads}
    walk(matrix[:100], **settings)  # type: ignore[arg-type]
    started = time.perf_counter()
    walk(matrix, **settings)  # type: ignore[arg-type]
    return count_walkable(matrix) * HOPS / (time.perf_counter() - started)


def count_walkable(matrix: sp.csr_matrix) -> int:
    """Count the anchors that are neither isolated nor over the cap."""
    degree = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return int(((degree > 0) & (degree <= CAP)).sum())


def measure_pyxclib(matrix: sp.csr_matrix) -> tuple[float, float] | None:
    """Return hops per second of pyxclib on the same walkable graph, without compilation; None if it is not installed.

    The first figure is for `simulate` as ECLARE calls it, the second for its compiled kernel only.
    """
    try:
        from xclib.utils.graph import RandomWalk, _random_walk
    except ImportError:
        return None
    degree = np.bincount(matrix.indices, minlength=matrix.shape[1])
    peer = RandomWalk(matrix[:, (degree > 0) & (degree <= CAP)].tocsr())
    rows, columns = peer.Y, peer.Y.T.tocsr()
    graph = (rows.indptr, rows.indices, columns.indptr, columns.indices)
    _random_walk(*graph, 10, RESTART, 0, 10)
    RandomWalk(rows[:1000]).simulate(10, RESTART, TOP_K)
    hops = rows.shape[1] * HOPS
    started = time.perf_counter()
    peer.simulate(HOPS, RESTART, TOP_K)
    simulate = hops / (time.perf_counter() - started)
    started = time.perf_counter()
    for start in range(0, rows.shape[1], 1000):
        _random_walk(*graph, HOPS, RESTART, start, min(start + 1000, rows.shape[1]))
    return simulate, hops / (time.perf_counter() - started)


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--anchors", type=int, default=94_000)
    parser.add_argument("--degree", type=int, default=8, help="mean anchors per document")
    parser.add_argument("--scale", type=int, default=1, help="multiply documents and anchors")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    matrix = zipf_graph(args.documents * args.scale, args.anchors * args.scale, args.degree)
    before = peak_mib()
    figures = [measure_ramen(matrix, args.threads) for _ in range(args.runs)]
    print(f"graph {matrix.shape[0]} x {matrix.shape[1]}, {matrix.nnz} edges, {count_walkable(matrix)} walkable anchors")
    print(
        f"ramen   {np.median(figures) / 1e6:7.1f} million hops/s (median of {args.runs}), "
        f"memory {before:.0f} -> {peak_mib():.0f} MiB"
    )
    peer = measure_pyxclib(matrix)
    if peer is None:
        print("pyxclib: not installed; put a checkout on PYTHONPATH to compare")
        return
    for name, figure in zip(("simulate", "kernel only"), peer, strict=True):
        ratio = np.median(figures) / figure
        print(f"pyxclib {figure / 1e6:7.1f} million hops/s ({name}), ramen is {ratio:.1f} times as fast")


if __name__ == "__main__":
    main()
