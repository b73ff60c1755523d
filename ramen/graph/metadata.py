"""Metadata graphs: the container, and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import listed_files
from ramen.config import Sampling
from ramen.errors import ArtifactError
from ramen.files import RERUN, edges_of, read_arrays

SIDES = ("train", "labels")
"""The two sides of an anchor set: training documents (G_XA) and labels (G_ZA)."""


@dataclass(frozen=True)
class Graph:
    """Edges from rows (documents or labels) to the anchors of one set, in CSR order, columns sorted in a row.

    Attributes:
        indptr: int64 [rows + 1].
        indices: int32 [edges], anchor of each edge.
        weight: float32 [edges], positive; 1 for an original edge, the walk's share for a new one.
        original: bool [edges], true if the edge was in the cleaned raw graph.
        shape: (rows, anchors).
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    weight: NDArray[np.float32]
    original: NDArray[np.bool_]
    shape: tuple[int, int]

    @property
    def num_edges(self) -> int:
        return len(self.indices)

    def rows(self) -> NDArray[np.int32]:
        """Row of each edge, int32 [edges]."""
        return np.repeat(np.arange(self.shape[0], dtype=np.int32), np.diff(self.indptr))

    def csr(self) -> sp.csr_matrix:
        """Binary CSR, float32 ones."""
        return sp.csr_matrix((np.ones(self.num_edges, np.float32), self.indices, self.indptr), shape=self.shape)

    def given(self) -> sp.csr_matrix:
        """Binary CSR of the edges that the walk did not add, float32 ones."""
        return self.select(self.original).csr()

    def select(self, keep: NDArray[np.bool_]) -> Graph:
        """The graph with only the edges where `keep` (bool [edges]) is true."""
        indptr = np.concatenate([[0], np.cumsum(keep)])[self.indptr].astype(np.int64)
        return replace(
            self, indptr=indptr, indices=self.indices[keep], weight=self.weight[keep], original=self.original[keep]
        )

    def write(self, path: Path) -> None:
        """Write as .npz (nothing pickled)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            indptr=self.indptr,
            indices=self.indices,
            weight=self.weight,
            original=self.original,
            shape=np.array(self.shape, np.int64),
        )

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read what `write` wrote. Raises ArtifactError if it is missing, damaged, or no graph."""
        found = read_arrays(path, ("indptr", "indices", "weight", "original", "shape"))
        shape = edges_of(path, found, "weight")
        if found["original"].dtype != bool or found["original"].shape != found["indices"].shape:
            raise ArtifactError(f"{path}: original is not a list of {len(found['indices']):,} booleans; {RERUN}")
        if (found["weight"] <= 0).any():
            raise ArtifactError(f"{path}: a weight is not above 0; {RERUN}")
        return cls(found["indptr"], found["indices"], found["weight"], found["original"], shape)


def neighbour_means(edges: sp.csr_matrix, vectors: NDArray[np.float32], prior: float = 0.0) -> NDArray[np.float32]:
    """Mean of each row's neighbours, by the edges' weights: float32 [rows, D], 0 for a row without any.

    Args:
        edges: CSR rows x n, weights not negative.
        vectors: float32 [n, D].
        prior: weight of a zero vector beside them: the mean shrinks where few say something.
    """
    return np.asarray((edges @ vectors) / np.maximum(np.asarray(edges.sum(1)) + prior, 1e-12), np.float32)


def degree(sides: Mapping[str, Graph | sp.csr_matrix]) -> NDArray[np.int64]:
    """Edges per anchor over both sides, int64 [M]."""
    per_side = np.array([np.bincount(side.indices, minlength=side.shape[1]) for side in sides.values()], np.int64)
    return np.asarray(per_side.sum(0), np.int64)


def drawing_weights(sides: Mapping[str, Graph], sampling: Sampling) -> NDArray[np.float64] | None:
    """Weights by which a set's anchors are drawn: float64 [M], None for uniform."""
    return None if sampling == "uniform" else inverse_sqrt_degree(sides)


def inverse_sqrt_degree(sides: Mapping[str, Graph]) -> NDArray[np.float64]:
    """1 / sqrt(edges on both sides) of each of a set's anchors, float64 [M]: what all share says little."""
    return np.asarray(1.0 / np.sqrt(np.maximum(degree(sides), 1)), np.float64)


Graphs = Mapping[str, Mapping[str, Graph]]
"""anchor set -> side ("train" or "labels") -> graph."""


def write_graphs(path: Path, graphs: Graphs) -> None:
    """Write `<set>/{train,labels}.npz` under `path` (a draft of the artifact `graph` or `pruned_graph`)."""
    for name, sides in graphs.items():
        for side in SIDES:
            sides[side].write(path / name / f"{side}.npz")


def read_graphs(path: Path) -> dict[str, dict[str, Graph]]:
    """Read all graphs under `path`, anchor sets in alphabetical order; folders that ramen did not write are ignored.

    Raises:
        ArtifactError: a graph is missing or damaged, or the sides of a set have different numbers of anchors.
    """
    sides = {f"{side}.npz" for side in SIDES}
    parts = [name.split("/") for name in listed_files(path)]
    graphs = {
        name: {side: Graph.read(path / name / f"{side}.npz") for side in SIDES}
        for name in sorted({name for name, *file in parts if len(file) == 1 and file[0] in sides})
    }
    for name, (train, labels) in ((name, (both[side] for side in SIDES)) for name, both in graphs.items()):
        if train.shape[1] != labels.shape[1]:
            raise ArtifactError(
                f"{path / name}: its sides have {train.shape[1]:,} and {labels.shape[1]:,} anchors, expected as many; "
                f"{RERUN}"
            )
    return graphs
