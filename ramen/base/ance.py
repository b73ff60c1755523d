"""ANCE: negatives mined among all labels (Xiong et al., ICLR 2021; as a baseline of RAMEN).

Documents in uniform random order, triplet loss. Every few epochs the current encoder retrieves the nearest labels of
each document, without the true ones; each step samples some of them per document as negatives of all its documents.
"""

from __future__ import annotations

from ramen.base.mining import Mining


class Ance(Mining):
    """In-batch triplet loss with `base.mining.negatives` mined negatives per document."""
