"""What both training stages train on: pairs, graphs and texts, without the held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.base.protocol import LabelProblem
from ramen.config import ObjectiveConfig, TrainingConfig, check_known
from ramen.data.dataset import Dataset, Side
from ramen.data.filters import heldout_filter
from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TextTable
from ramen.graph.cleaning import anchors_among, false_negative_anchors
from ramen.graph.metadata import Graph, Graphs, read_graphs
from ramen.training.heldout import HeldOut, split_held_out
from ramen.training.label_augmentation import augment_labels


@dataclass(frozen=True)
class TrainingInputs:
    """Data of a training stage.

    Attributes:
        dataset: documents, labels and anchor sets.
        training_rows: int64, training documents that are not held out.
        held_out: the held-out documents.
        ignored: CSR N x L, pairs that are neither positive nor negative.
        pairs: CSR N x L, pairs that count as true in training.
        graphs: set -> side -> unpruned graph of the sets that are regularised with.
        negative_graphs: set -> side -> graph of the sets that negatives are drawn from.
        active: set -> side -> whether its regulariser takes part: its initial weight is above 0. The bandit may move a
            weight to 0 and back.
        false_negatives: set -> side -> CSR items x M, anchors that are no negatives of an item.
        texts: tokens of every distinct text, by role: "documents", "labels" and "anchors/<set>".
    """

    dataset: Dataset
    training_rows: NDArray[np.int64]
    held_out: HeldOut
    ignored: sp.csr_matrix
    pairs: sp.csr_matrix
    graphs: dict[str, dict[Side, Graph]]
    negative_graphs: dict[str, dict[Side, Graph]]
    active: dict[str, dict[Side, bool]]
    false_negatives: dict[str, dict[Side, sp.csr_matrix]]
    texts: TextTable

    def label_problem(
        self, rows: NDArray[np.int64], encoder: SentenceEncoder, training: TrainingConfig
    ) -> LabelProblem:
        """The part of the data that a base algorithm sees, for some of the training documents."""
        return LabelProblem(
            rows[np.diff(self.pairs.indptr)[rows] > 0],
            self.pairs,
            self.ignored,
            self.texts.roles["labels"],
            self.texts.roles["documents"],
            training.batch_size,
            encoder.dimension,
            training.seed,
            self.dataset.unseen,
        )


def prepare_inputs(
    dataset: Dataset, graph: Path, encoder: SentenceEncoder, objective: ObjectiveConfig, training: TrainingConfig
) -> TrainingInputs:
    """Split off the held-out documents, select the graphs, and tokenise every distinct text once.

    Args:
        dataset: the dataset.
        graph: folder of the artifact `graph`.
        encoder: its tokenizer and maximum length.
        objective, training: sections.

    Raises:
        ConfigError: a knob names an unknown anchor set or regulariser.
    """
    held_out, training_rows = split_held_out(dataset, training)
    ignored = heldout_filter(dataset, held_out)
    known: dict[str, dict[Side, Graph]] = {}
    used: dict[str, dict[Side, Graph]] = {}
    negative_graphs: dict[str, dict[Side, Graph]] = {}
    if objective.graphs or objective.augment_labels:
        known = training_graphs(graph, dataset, held_out)
        used = select_anchor_sets(known, objective.anchor_sets, "objective.anchor_sets")
    if objective.graphs:
        objective.check_anchor_sets(known)
        negative_graphs = select_anchor_sets(known, objective.negative_sets, "objective.negative_sets")
    graphs = used if objective.graphs else {}
    pairs = dataset.positives
    if objective.augment_labels:
        pairs = augment_labels(pairs, dataset.filter_train, used)
    return TrainingInputs(
        dataset,
        training_rows,
        HeldOut.of(dataset, held_out, ignored),
        ignored,
        pairs,
        graphs,
        negative_graphs,
        {name: {side: objective.weight(name, side.item) > 0 for side in Side} for name in graphs},
        _false_negatives(dataset, graphs, held_out),
        tokenise(encoder, dataset),
    )


def training_graphs(path: Path, dataset: Dataset, held_out: NDArray[np.int64]) -> dict[str, dict[Side, Graph]]:
    """The graphs under `path`, without the edges to anchors that are held-out documents.

    A label regularised towards a document is trained on that pair, so no held-out document may be an anchor, as no test
    document is.
    """
    texts, graphs = dataset.train.select(held_out), read_graphs(path)
    for name, sides in graphs.items():
        hidden = anchors_among(texts, dataset.anchor_sets[name].texts)
        graphs[name] = {side: graph.select(~hidden[graph.indices]) for side, graph in sides.items()}
    return graphs


def select_anchor_sets(
    graphs: dict[str, dict[Side, Graph]], wanted: Sequence[str], knob: str
) -> dict[str, dict[Side, Graph]]:
    """The graphs of the anchor sets that a knob names; all if it names none.

    Raises:
        ConfigError: it names an unknown set.
    """
    check_known(wanted, graphs, knob)
    return {name: sides for name, sides in graphs.items() if not wanted or name in wanted}


def _false_negatives(
    dataset: Dataset, graphs: Graphs, held_out: NDArray[np.int64]
) -> dict[str, dict[Side, sp.csr_matrix]]:
    """Set -> side -> anchors that are no negatives of an item, whether the graph has the edge or not."""
    is_training = np.ones(len(dataset.train), np.float32)
    is_training[held_out] = 0
    y = sp.csr_matrix(sp.diags(is_training) @ dataset.y_train)
    y.eliminate_zeros()
    anchors = {name: dataset.anchor_sets[name].texts for name in graphs}
    return {
        name: {
            Side.DOCUMENT: false_negative_anchors(dataset.train, dataset.labels, y, texts),
            Side.LABEL: false_negative_anchors(dataset.labels, dataset.train, sp.csr_matrix(y.T), texts),
        }
        for name, texts in anchors.items()
    }


def tokenise(encoder: SentenceEncoder, dataset: Dataset) -> TextTable:
    """Tokens of every distinct text of the dataset."""
    roles = {"documents": dataset.train.texts, "labels": dataset.labels.texts}
    roles |= {f"anchors/{name}": anchors.texts.texts for name, anchors in dataset.anchor_sets.items()}
    return TextTable.build(encoder.tokenizer, roles, encoder.settings.max_length)
