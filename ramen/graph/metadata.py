"""The metadata graph: its two sides, its container and its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import list_files
from ramen.config import Sampling
from ramen.data.dataset import Side
from ramen.errors import ArtifactError
from ramen.files import RERUN, check_csr_arrays, read_arrays


@dataclass(frozen=True)
class Graph:
    """Edges from rows (documents or labels) to the anchors of one set, in CSR order with sorted columns.

    Attributes:
        indptr: int64 [rows + 1].
        indices: int32 [edges], anchor of each edge.
        weight: float32 [edges], positive; 1 for an original edge, the share of visits for an edge added by the walk.
        original: bool [edges], true if the cleaned raw graph has the edge.
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
        """All edges as binary CSR, float32."""
        return sp.csr_matrix((np.ones(self.num_edges, np.float32), self.indices, self.indptr), shape=self.shape)

    def original_csr(self) -> sp.csr_matrix:
        """The original edges (without those that the walk added) as binary CSR, float32."""
        return self.select(self.original).csr()

    def select(self, keep: NDArray[np.bool_]) -> Graph:
        """Return the graph with only the edges where `keep` (bool [edges]) is true."""
        indptr = np.concatenate([[0], np.cumsum(keep)])[self.indptr].astype(np.int64)
        return replace(
            self, indptr=indptr, indices=self.indices[keep], weight=self.weight[keep], original=self.original[keep]
        )

    def write(self, path: Path) -> None:
        """Write the graph as .npz, without pickled objects."""
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
        """Read a graph that `write` wrote. Raises ArtifactError if the file is missing, damaged or not a graph."""
        arrays = read_arrays(path, ("indptr", "indices", "weight", "original", "shape"))
        shape = check_csr_arrays(path, arrays, "weight")
        if arrays["original"].dtype != bool or arrays["original"].shape != arrays["indices"].shape:
            raise ArtifactError(
                f"{path}: original is {arrays['original'].dtype} of shape {arrays['original'].shape}, "
                f"expected {len(arrays['indices']):,} booleans; {RERUN}"
            )
        if (arrays["weight"] <= 0).any():
            raise ArtifactError(f"{path}: a weight is not positive; {RERUN}")
        return cls(arrays["indptr"], arrays["indices"], arrays["weight"], arrays["original"], shape)


def neighbour_means(edges: sp.csr_matrix, vectors: NDArray[np.float32], prior: float = 0.0) -> NDArray[np.float32]:
    """Return the weighted mean of each row's neighbours.

    Args:
        edges: CSR rows x n, non-negative edge weights.
        vectors: float32 [n, D].
        prior: weight of an additional zero vector in each mean; it shrinks the mean of a row with few neighbours.

    Returns:
        float32 [rows, D]; 0 for a row without neighbours.
    """
    return np.asarray((edges @ vectors) / np.maximum(np.asarray(edges.sum(1)) + prior, 1e-12), np.float32)


def degree(sides: Mapping[Side, Graph | sp.csr_matrix]) -> NDArray[np.int64]:
    """Return the edges per anchor over both sides, int64 [M]."""
    per_side = np.array([np.bincount(side.indices, minlength=side.shape[1]) for side in sides.values()], np.int64)
    return np.asarray(per_side.sum(0), np.int64)


def sampling_weights(sides: Mapping[Side, Graph], sampling: Sampling) -> NDArray[np.float64] | None:
    """Return the sampling weights of a set's anchors: float64 [M], None for uniform."""
    return None if sampling == "uniform" else inverse_sqrt_degree(sides)


def inverse_sqrt_degree(sides: Mapping[Side, Graph | sp.csr_matrix]) -> NDArray[np.float64]:
    """Return 1 / sqrt(degree over both sides) of each anchor, float64 [M]: anchors that many rows share say little."""
    return np.asarray(1.0 / np.sqrt(np.maximum(degree(sides), 1)), np.float64)


Graphs = Mapping[str, Mapping[Side, Graph]]
"""Anchor set -> side -> graph."""


def write_graphs(path: Path, graphs: Graphs) -> None:
    """Write `<set>/{train,labels}.npz` below `path`, a draft of the artifact `graph` or `pruned_graph`."""
    for name, sides in graphs.items():
        for side in Side:
            sides[side].write(path / name / f"{side}.npz")


def read_graphs(path: Path) -> dict[str, dict[Side, Graph]]:
    """Read all graphs below `path`, anchor sets in alphabetical order; folders that ramen did not write are ignored.

    Raises:
        ArtifactError: a graph is missing or damaged, or the sides of a set have different numbers of anchors.
    """
    files = {f"{side}.npz" for side in Side}
    parts = [name.split("/") for name in list_files(path)]
    names = sorted({name for name, *file in parts if len(file) == 1 and file[0] in files})
    graphs = {name: {side: Graph.read(path / name / f"{side}.npz") for side in Side} for name in names}
    for name, sides in graphs.items():
        documents, labels = (sides[side].shape[1] for side in Side)
        if documents != labels:
            raise ArtifactError(
                f"{path / name}: train.npz has {documents:,} anchors, labels.npz {labels:,}; expected equal numbers; "
                f"{RERUN}"
            )
    return graphs
