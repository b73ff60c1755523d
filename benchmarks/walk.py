"""Random walk: hops per second beside pyxclib's, and memory as edges grow.

    python benchmarks/walk.py                     both, in one run
    python benchmarks/walk.py --scale 4           four times the edges per document

pyxclib (github.com/kunaldahiya/pyxclib) is not on the package index: put a checkout on PYTHONPATH. Ours and its
`simulate` count visits and keep the top k; its kernel alone only lists the anchors it visits.
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
    """Documents x anchors; anchors are drawn with Zipf popularity (exponent 1, in random order of number)."""
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, anchors + 1)
    cumulative = np.cumsum(popularity / popularity.sum())
    name = rng.permutation(anchors)
    degree = rng.poisson(mean_degree - 1, documents) + 1
    columns = name[np.minimum(np.searchsorted(cumulative, rng.random(degree.sum())), anchors - 1)]
    rows = np.repeat(np.arange(documents), degree)
    matrix = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(documents, anchors))
    matrix.data[:] = 1
    return matrix


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(matrix: sp.csr_matrix, threads: int) -> float:
    """Hops per second, compilation excluded."""
    settings = {"hops": HOPS, "restart": RESTART, "top_k": TOP_K, "degree_cap": CAP, "seed": 0, "threads": threads}
    walk(matrix[:100], **settings)  # type: ignore[arg-type]
    started = time.perf_counter()
    walk(matrix, **settings)  # type: ignore[arg-type]
    return walked_anchors(matrix) * HOPS / (time.perf_counter() - started)


def walked_anchors(matrix: sp.csr_matrix) -> int:
    """Anchors that walk: not isolated, not over the cap."""
    degree = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return int(((degree > 0) & (degree <= CAP)).sum())


def pyxclib(matrix: sp.csr_matrix) -> tuple[float, float] | None:
    """Hops per second of pyxclib on the same walkable graph, compilation excluded: (`simulate` as ECLARE
    calls it, its compiled kernel alone). None if it is not installed."""
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
    whole = hops / (time.perf_counter() - started)
    started = time.perf_counter()
    for start in range(0, rows.shape[1], 1000):
        _random_walk(*graph, HOPS, RESTART, start, min(start + 1000, rows.shape[1]))
    return whole, hops / (time.perf_counter() - started)


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--anchors", type=int, default=94_000)
    parser.add_argument("--degree", type=int, default=8, help="mean anchors per document")
    parser.add_argument("--scale", type=int, default=1, help="multiply documents and anchors")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    matrix = zipf_graph(options.documents * options.scale, options.anchors * options.scale, options.degree)
    before = peak_mib()
    figures = [ours(matrix, options.threads) for _ in range(options.runs)]
    print(f"graph {matrix.shape[0]} x {matrix.shape[1]}, {matrix.nnz} edges, {walked_anchors(matrix)} anchors walk")
    print(
        f"ours    {np.median(figures) / 1e6:7.1f} million hops/s (median of {options.runs}), "
        f"memory {before:.0f} -> {peak_mib():.0f} MiB"
    )
    peer = pyxclib(matrix)
    if peer is None:
        print("pyxclib: not installed; put a checkout on PYTHONPATH to compare")
        return
    for name, figure in zip(("simulate", "kernel alone"), peer, strict=True):
        ratio = np.median(figures) / figure
        print(f"pyxclib {figure / 1e6:7.1f} million hops/s ({name}), ours is {ratio:.1f} times that")


if __name__ == "__main__":
    main()
