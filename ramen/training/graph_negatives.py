"""Hard negatives from the graphs: labels that share an anchor with a document of the step and are not true for it.

A wrong label that the encoder ranks first shares an anchor with the document far more often than a random label. The
graphs therefore provide hard negatives from the first step on, without mining. Recommenders draw hard negatives by
walks on their graphs, too (PinSage, Ying et al., KDD 2018).
"""

from __future__ import annotations

import numpy as np

from ramen.config import Sampling
from ramen.data.dataset import Side
from ramen.graph.metadata import Graphs, sampling_weights
from ramen.sampling import Ints, RowSampler


class GraphNegatives:
    """Draws labels two hops from documents: to one of the document's anchors, then to one of the anchor's labels.

    Args:
        graphs: set -> side -> graph.
        sampling: how a document's anchor is drawn; an anchor's label is drawn uniformly.
        share: largest share of a step's random labels.
    """

    def __init__(self, graphs: Graphs, sampling: Sampling, share: float) -> None:
        self.share = share
        self._hops = []
        for name in sorted(graphs):
            to_labels = graphs[name][Side.LABEL].csr().T.tocsr()
            to_anchors = graphs[name][Side.DOCUMENT]
            # drop anchors without labels
            to_anchors = to_anchors.select(np.diff(to_labels.indptr)[to_anchors.indices] > 0)
            weights = sampling_weights(graphs[name], sampling)
            of_edges = None if weights is None else weights[to_anchors.indices]
            to_anchor = RowSampler(to_anchors.indptr, to_anchors.indices, of_edges)
            self._hops.append((to_anchor, RowSampler(to_labels.indptr, to_labels.indices)))

    def draw(self, documents: Ints, random_labels: int, rng: np.random.Generator) -> Ints:
        """Distinct labels, int64: at most one per document and set, and `share * random_labels` in total."""
        drawn = [np.zeros(0, np.int64)]
        for to_anchor, to_label in self._hops:
            _, anchors = to_anchor.draw(documents, rng)
            drawn.append(to_label.draw(anchors, rng)[1])
        labels = np.unique(np.concatenate(drawn))
        limit = round(self.share * random_labels)
        if len(labels) > limit:
            labels = np.sort(rng.choice(labels, limit, replace=False))
        return labels
