"""Build the graphs that training uses, as scipy matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import scipy.sparse as sp

from ramen.config import WalkConfig, parse_section
from ramen.data.dataset import Dataset, Side
from ramen.graph.build import build_set
from ramen.graph.metadata import Graph

GraphMatrices = dict[str, dict[str, sp.csr_matrix]]
"""Anchor set -> side ("documents" or "labels") -> edge weights, CSR rows x anchors."""


def build_graph(dataset: Dataset, **walk: Any) -> GraphMatrices:
    """Return the graphs that training uses: cleaned of test documents and hubs, and walked if `hops` is set.

    Args:
        dataset: with anchor sets.
        **walk: knobs of section `walk`, such as `hops=400`.

    Returns:
        Anchor set -> "documents" (training documents) and "labels" -> CSR rows x anchors, float32: 1 for an original
        edge, the walk's share for a new one. Column j is anchor `dataset.anchor_sets[name].texts.texts[j]`.
    """
    settings = cast(WalkConfig, parse_section("walk", walk))
    return {
        name: matrices(
            build_set(
                anchors,
                settings,
                documents=dataset.train,
                labels=dataset.labels,
                test=dataset.test,
                y_train=dataset.y_train,
                unseen=dataset.unseen,
                name=name,
            ).graphs
        )
        for name, anchors in dataset.anchor_sets.items()
    }


def matrices(graphs: Mapping[Side, Graph]) -> dict[str, sp.csr_matrix]:
    """Weighted CSR matrices of one anchor set, by `Side.role`."""
    return {
        side.role: sp.csr_matrix((graph.weight, graph.indices, graph.indptr), graph.shape)
        for side, graph in graphs.items()
    }
