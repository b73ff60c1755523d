"""Balanced spherical clustering by repeated halving (NGAME's hierarchical 2-means).

Letters: n vectors, D width.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

TOLERANCE = 1e-4
"""A split has converged when the mean similarity to the assigned centroid rises by less than this."""
ROUNDS = 30
"""Maximum number of reassignments per split; about ten are enough."""


def halvings(share: float) -> int:
    """Return the number of halvings that gives about `share` clusters."""
    return max(0, round(math.log2(max(share, 1.0))))


def balanced_clusters(vectors: Vectors, levels: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Halve vectors `levels` times, into clusters whose sizes differ by at most 1.

    Args:
        vectors: float32 [n, D], unit norm.
        levels: 2 ** levels clusters; fewer if one would be empty.
        rng: samples the initial centroids.

    Returns:
        int32 [n], clusters 0..K-1; consecutive numbers are siblings in the tree of halvings.
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
    """Split a group into two of equal size by 2-means; the first gets the extra member of an odd group."""
    half = (len(group) + 1) // 2
    if half == len(group):
        return group, group[:0]
    members = vectors[group]
    centroids = members[rng.choice(len(group), 2, replace=False)]
    previous = -np.inf
    first = np.zeros(len(group), bool)
    for _ in range(ROUNDS):
        scores = members @ centroids.T
        # sort by the difference: a vector may be near both centroids
        first = np.zeros(len(group), bool)
        first[np.argsort(scores[:, 1] - scores[:, 0], kind="stable")[:half]] = True
        similarity = float(np.where(first, scores[:, 0], scores[:, 1]).mean())
        centroids = np.stack([_centroid(members[first]), _centroid(members[~first])])
        if similarity - previous < TOLERANCE:
            break
        previous = similarity
    return group[first], group[~first]


def _centroid(members: Vectors) -> Vectors:
    mean = members.mean(0)
    return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), np.float32)
