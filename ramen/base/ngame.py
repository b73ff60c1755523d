"""NGAME: similar documents share a step, so that in-batch negatives are hard (Dahiya et al., WSDM 2023).

Every few epochs the documents are clustered by the current encoder's vectors, into clusters of equal size. An epoch
concatenates the clusters in random order and cuts the result into steps. Clusters start small and double in size, so
negatives get harder as the encoder improves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ramen.base.clustering import balanced_clusters, halvings
from ramen.base.protocol import BaseAlgorithm, Embed, is_due
from ramen.sampling import Ints, keyed_rng


class Ngame(BaseAlgorithm):
    """In-batch triplet loss over clustered documents, followed by a classifier per label."""

    clusters: NDArray[np.int32] | None = None
    """int32 [n], cluster of each of `problem.documents`; None before the first refresh."""

    def refresh_due(self, epoch: int) -> bool:
        return is_due(epoch, self.settings.refresh_from, self.settings.refresh_every)

    def cluster_size(self, epoch: int) -> int:
        """Return the documents per cluster at an epoch: `base.clusters.size`, doubled up to the batch size."""
        doublings = (epoch - self.settings.refresh_from) // self.settings.clusters.double_every
        return min(self.settings.clusters.size << min(doublings, 32), self.problem.batch_size)

    def refresh(self, epoch: int, embed: Embed) -> None:
        vectors = embed("documents")[self.problem.documents]
        rng = keyed_rng(self.problem.seed, "clusters", epoch)
        self.clusters = balanced_clusters(vectors, halvings(len(vectors) / self.cluster_size(epoch)), rng)

    def order(self, rng: np.random.Generator) -> Ints:
        if self.clusters is None:
            return super().order(rng)
        cluster_rank = rng.permutation(int(self.clusters.max()) + 1)[self.clusters]
        within_cluster = rng.random(len(cluster_rank))
        return self.problem.documents[np.lexsort((within_cluster, cluster_rank))]

    def state(self) -> dict[str, NDArray[np.generic]]:
        return {} if self.clusters is None else {"clusters": self.clusters}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        self.clusters = state.get("clusters")  # type: ignore[assignment]

    @property
    def classifies(self) -> bool:
        return True
