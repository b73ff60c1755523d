"""Balanced spherical clustering by repeated halving (NGAME's hierarchical 2-means).

Letters: n vectors, D width.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

TOLERANCE = 1e-4
"""A halving has settled when the mean similarity to the own centroid rises by less."""
ROUNDS = 30
"""Reassignments of a halving at most; it settles in about ten."""


def halvings(share: float) -> int:
    """How often to halve so that about `share` clusters come of it."""
    return max(0, round(math.log2(max(share, 1.0))))


def balanced_clusters(vectors: Vectors, levels: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Halve vectors `levels` times: clusters whose sizes differ by at most 1.

    Args:
        vectors: float32 [n, D], unit norm.
        levels: 2 ** levels clusters; fewer if that would leave one empty.
        rng: chooses the first centroids.

    Returns:
        int32 [n], clusters 0..K-1. Neighbouring numbers are siblings in the tree of halvings.
    """
    groups = [rng.permutation(len(vectors))]
    for _ in range(min(levels, int(math.log2(max(len(vectors), 1))))):
        groups = [half for group in groups for half in _halve(vectors, group, rng)]
    clusters = np.empty(len(vectors), np.int32)
    for number, group in enumerate(groups):
        clusters[group] = number
    return clusters


def _halve(
    vectors: Vectors, group: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split a group in two of equal size (the first gets the odd one), each nearer to its own centroid."""
    half = (len(group) + 1) // 2
    if half == len(group):
        return group, group[:0]
    members = vectors[group]
    centroids = members[rng.choice(len(group), 2, replace=False)]
    before = -np.inf
    first = np.zeros(len(group), bool)
    for _ in range(ROUNDS):
        scores = members @ centroids.T
        # of the difference, not of one side: a vector near to both must not decide by either alone
        first = np.zeros(len(group), bool)
        first[np.argsort(scores[:, 1] - scores[:, 0], kind="stable")[:half]] = True
        reached = float(np.where(first, scores[:, 0], scores[:, 1]).mean())
        centroids = np.stack([_centre(members[first]), _centre(members[~first])])
        if reached - before < TOLERANCE:
            break
        before = reached
    return group[first], group[~first]


def _centre(members: Vectors) -> Vectors:
    centre = members.mean(0)
    return np.asarray(centre / max(float(np.linalg.norm(centre)), 1e-12), np.float32)
