"""ANCE: globally mined negatives join the labels of the step (Xiong et al., ICLR 2021; as RAMEN uses it).

Uniform steps and the triplet loss. Every few epochs the labels nearest to each document are found with the current
encoder, all true ones left out; each step draws a few of them per document, and all documents of the step share them.
"""

from __future__ import annotations

from ramen.base.mining import Mining


class Ance(Mining):
    """In-batch triplet with `base.mining.negatives` mined negatives per document."""
