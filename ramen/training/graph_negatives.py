"""Hard negatives from the graphs: labels that share an anchor with a document of the step, but are not true for it.

Where the text misleads the encoder, the graph often misleads it the same way: a wrong label that is ranked first shares
an anchor with the document far more often than a random label does. So the graph names the labels that the encoder must
learn to tell apart, from the first step on and without a look at the encoder. Recommenders take hard negatives from
walks on their graph too (PinSage, Ying et al., KDD 2018).
"""

from __future__ import annotations

import numpy as np

from ramen.config import Sampling
from ramen.graph.metadata import Graphs, drawing_weights
from ramen.sampling import Ints, RowSampler


class GraphNegatives:
    """Draws labels two steps away from documents: to one of the document's anchors, and to one of that anchor's labels.

    Args:
        graphs: set -> side ("train" or "labels") -> graph.
        sampling: how an anchor is drawn among a document's; a label is drawn uniformly among an anchor's.
        share: of the labels beside those of a step's documents, at most.
    """

    def __init__(self, graphs: Graphs, sampling: Sampling, share: float) -> None:
        self.share = share
        self._steps = []
        for name in sorted(graphs):
            to_labels = graphs[name]["labels"].csr().T.tocsr()
            to_anchors = graphs[name]["train"]
            # an anchor without labels leads nowhere
            to_anchors = to_anchors.select(np.diff(to_labels.indptr)[to_anchors.indices] > 0)
            weights = drawing_weights(graphs[name], sampling)
            of_edges = None if weights is None else weights[to_anchors.indices]
            to_anchor = RowSampler(to_anchors.indptr, to_anchors.indices, of_edges)
            self._steps.append((to_anchor, RowSampler(to_labels.indptr, to_labels.indices)))

    def draw(self, documents: Ints, beside: int, rng: np.random.Generator) -> Ints:
        """Distinct labels, int64: one per document and set at most, and `share * beside` in all."""
        found = [np.zeros(0, np.int64)]
        for to_anchor, to_label in self._steps:
            _, anchors = to_anchor.draw(documents, rng)
            found.append(to_label.draw(anchors, rng)[1])
        labels = np.unique(np.concatenate(found))
        most = round(self.share * beside)
        if len(labels) > most:
            labels = np.sort(rng.choice(labels, most, replace=False))
        return labels
