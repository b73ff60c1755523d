"""Explain labels from training data: their frequency, and their anchors in the training graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen.artifacts import open_artifact
from ramen.data.dataset import Dataset, Side
from ramen.errors import ArtifactError
from ramen.evaluation.quantiles import head_torso_tail
from ramen.graph.metadata import read_graphs

MAX_CANDIDATES = 30
"""Anchors per label and set that are compared with the query."""
MAX_SHOWN = 3
"""Anchors per label in an answer: those nearest to the query."""


class TrainingGraph:
    """Label frequencies and anchor graphs of a training run, by label uid.

    Args:
        folder: artifacts of a run: `dataset`, and `pruned_graph` or `graph`.

    Raises:
        ArtifactError: an artifact is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        dataset = open_artifact(folder / "dataset", "dataset")
        kind = "pruned_graph" if (folder / "pruned_graph").is_dir() else "graph"
        if not (folder / kind).is_dir():
            raise ArtifactError(f"{folder}: has no pruned_graph and no graph; give the folder of a run's artifacts")
        graph = open_artifact(folder / kind, kind)
        problem = Dataset.read(dataset.path)
        self.digest = dataset.digest
        self.row_of = {uid: row for row, uid in enumerate(problem.labels.uids)}
        self.frequency: NDArray[np.int64] = np.bincount(problem.y_train.indices, minlength=len(problem.labels))
        bins = head_torso_tail(self.frequency)
        self.bin_of = {int(label): name for name, labels in bins.items() for label in labels}
        self.graphs = {name: sides[Side.LABEL] for name, sides in read_graphs(graph.path).items()}
        self.texts = {name: problem.anchor_sets[name].texts.texts for name in self.graphs}

    def describe(self, uid: str) -> dict[str, object]:
        """Return a label's `bin` (head, torso, tail) and number of training `documents`; empty if it is unknown."""
        row = self.row_of.get(uid)
        if row is None:
            return {}
        return {"bin": self.bin_of.get(row, "tail"), "documents": int(self.frequency[row])}

    def explain(
        self, query: NDArray[np.float32], uids: Sequence[str], encode: Callable[[list[str]], NDArray[np.float32]]
    ) -> list[list[dict[str, object]]]:
        """Return the anchors of each label that are nearest to a query, nearest first.

        Args:
            query: float32 [D], unit norm.
            uids: labels.
            encode: texts -> float32 [n, D], unit norm.

        Returns:
            For each label at most `MAX_SHOWN` of {set, text, cosine}.
        """
        anchors_of_labels = [
            [(name, self.texts[name][anchor]) for name in self.graphs for anchor in self._anchors(name, uid)]
            for uid in uids
        ]
        distinct = sorted({text for anchors in anchors_of_labels for _, text in anchors})
        if not distinct:
            return [[] for _ in uids]
        cosine = dict(zip(distinct, (encode(distinct) @ query).tolist(), strict=True))
        return [
            [
                {"set": name, "text": text, "cosine": round(cosine[text], 4)}
                for name, text in sorted(set(anchors), key=lambda anchor: (-cosine[anchor[1]], anchor))[:MAX_SHOWN]
            ]
            for anchors in anchors_of_labels
        ]

    def _anchors(self, name: str, uid: str) -> NDArray[np.int32]:
        """Return up to `MAX_CANDIDATES` anchor rows of a label in one anchor set."""
        row, graph = self.row_of.get(uid), self.graphs[name]
        if row is None:
            return np.zeros(0, np.int32)
        anchors: NDArray[np.int32] = graph.indices[graph.indptr[row] : graph.indptr[row + 1]]
        return anchors[:MAX_CANDIDATES]
