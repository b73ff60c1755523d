"""Do the graphs say anything about the task that the encoder does not know yet? (`ramen probe`)

Two questions per anchor set, asked on documents that were not trained on:

* Do true pairs share anchors more often than others? Against random labels nearly every graph looks good, since what is
  about the same thing shares neighbours and the text already tells that. So true labels that the encoder missed at the
  first place are also set against the wrong labels it put there.
* What would the encoder gain by the graph, had it learnt all of it? Neighbours' mean vectors are added to the labels'
  vectors, to the documents' (which nobody knows of a new document: an oracle), and to both.

Letters: V documents asked, L labels, M anchors of a set, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.artifacts import Artifact
from ramen.config import Config, TrainingConfig
from ramen.data.dataset import Dataset, Texts, read_test_edges
from ramen.data.filters import heldout_filter
from ramen.encoder.label_vectors import encode_labels, with_context
from ramen.encoder.loading import load_encoder, load_trained
from ramen.errors import ArtifactError, DataError, Defect
from ramen.evaluation import uncertainty
from ramen.evaluation.metrics import DEPTH, apply_filter, by_document, document_weights, inverse_propensity
from ramen.evaluation.uncertainty import Gain, PerDocument
from ramen.graph.cleaning import anchors_among, remove_edges
from ramen.graph.metadata import Graph, inverse_sqrt_degree, neighbour_means, read_graphs
from ramen.retrieval import search
from ramen.sampling import keyed_rng
from ramen.training.heldout import split_held_out

log = logging.getLogger(__name__)

SHARE = 0.5
"""Of the neighbours' mean in a vector. Fixed: choosing the best of several would flatter the graph."""
RANDOM_LABELS = 10
"""Labels drawn for every document, as chance."""
MEASURED = ("p_at_1", "psp_at_5", "r_at_100")

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ProbeResult:
    """What one anchor set says.

    Attributes:
        documents, labels: per cent of them with an anchor.
        true, chance: per cent of the true pairs, and of the pairs with random labels, that share an anchor.
        missed, mistaken: the same of the true labels that are not ranked first where the first is wrong, and of
            that first, wrong label. Nearly equal: the graph cannot tell where the text cannot.
        gains: "labels", "documents" or "both" -> metric -> gain; empty where the side has no edges.
    """

    documents: float
    labels: float
    true: float
    chance: float
    missed: float
    mistaken: float
    gains: dict[str, dict[str, Gain]]


@dataclass(frozen=True)
class ProbeSettings:
    """The documents asked, their labels and what is ignored: CSR V x L each, and the sets' edges: CSR V x M.

    Attributes:
        groups: int64 [V], the group of each document; None = each is its own.
    """

    texts: Texts
    y: sp.csr_matrix
    ignored: sp.csr_matrix
    edges: dict[str, sp.csr_matrix]
    groups: NDArray[np.int64] | None


def probe(
    dataset: Artifact, graph: Artifact, model: Artifact | None, config: Config, on_test: bool
) -> tuple[dict[str, float], dict[str, ProbeResult]]:
    """Ask every anchor set.

    Args:
        dataset, graph: the artifacts; edges are those of `graph`, test documents' own are raw ones.
        model: a trained encoder; None = the one that training would start from.
        config: sections encoder, training (which documents will be held out; a model tells itself), scoring.
        on_test: ask the test documents instead of the held-out ones, to explain a result; never to choose by.

    Returns:
        The metrics of the text alone, in percent, and what each set says.

    Raises:
        DataError: no document is held out.
        ArtifactError: the model was trained on another dataset, so what it has not seen is unknown.
    """
    problem = Dataset.read(dataset.path)
    graphs = read_graphs(graph.path)
    if on_test:
        asked = _test(dataset.path, problem, graphs)
    else:
        training = config.training if model is None else _trained_with(model, dataset)
        held_out, _ = split_held_out(problem, training)
        if not len(held_out):
            raise DataError(
                Defect(str(dataset.path), "no held-out document to ask", "set training.validation_fraction above 0")
            )
        asked = _held_out(problem, graphs, held_out)
    candidates = problem.candidates
    if len(problem.unseen) and not on_test:  # held-out documents have none of the labels that training never sees
        candidates = np.setdiff1d(np.arange(len(problem.labels)), problem.unseen)
    own = config.encoder
    encoder = load_trained(model.path, own) if model else load_encoder(own.name, own, max_length=own.max_length)
    log.info("encoding %d documents and %d labels", len(asked.texts), len(problem.labels))
    vectors = encoder.encode(asked.texts.texts)
    labels = encode_labels(encoder, model.path, problem.labels.texts) if model else encoder.encode(problem.labels.texts)
    inv_p = inverse_propensity(problem.y_train, config.scoring.propensity_a, config.scoring.propensity_b)

    def ranked(documents: Vectors, by: Vectors) -> NDArray[np.int64]:
        found, scores = search(documents, by, config.scoring.retrieve, config.scoring.chunk, candidates)
        return apply_filter(found, scores, asked.ignored, DEPTH)[0]

    ranking = ranked(vectors, labels)
    weights_of = document_weights(asked.y, inv_p, {})

    def measured(indices: NDArray[np.int64]) -> PerDocument:
        return PerDocument(asked.texts.uids, by_document(indices, asked.y, inv_p, {}), weights_of, asked.groups)

    plain = measured(ranking)

    def gain(documents: Vectors, by: Vectors) -> dict[str, Gain]:
        gained = uncertainty.gains(measured(ranked(documents, by)), plain)
        return {key: gained[key] for key in MEASURED if key in gained}

    said = {}
    for name, sides in graphs.items():
        anchors = problem.anchor_sets[name].texts
        log.info("%s: encoding its anchors", name)
        hidden = anchors_among(asked.texts, anchors)
        of_labels = _without(sides["labels"].csr(), hidden)
        of_documents = _without(asked.edges[name], hidden)
        weights = inverse_sqrt_degree(sides)
        used = np.union1d(of_labels.indices, of_documents.indices)
        known = np.zeros((len(anchors), vectors.shape[1]), np.float32)
        known[used] = encoder.encode([anchors.texts[i] for i in used])
        gains = {}
        more_labels = _with_mean(labels, of_labels, known, weights)
        more_documents = _with_mean(vectors, of_documents, known, weights)
        if of_labels.nnz:
            gains["labels"] = gain(vectors, more_labels)
        if of_documents.nnz:
            gains["documents"] = gain(more_documents, labels)
        if len(gains) == 2:
            gains["both"] = gain(more_documents, more_labels)
        said[name] = ProbeResult(
            **_sharing(asked.y, of_documents, of_labels, ranking[:, 0], candidates, config.training.seed), gains=gains
        )
    return {key: float(plain.values[key].mean()) for key in MEASURED if key in plain.values}, said


def _trained_with(model: Artifact, dataset: Artifact) -> TrainingConfig:
    """The section that a model was trained with, which says what it has not seen."""
    if model.manifest["inputs"].get("dataset") != dataset.digest:
        raise ArtifactError(
            f"{model.path}: was not trained on {dataset.path}, so which of its documents it has seen is unknown; "
            "name the dataset it was trained on, or ask the test documents with --test"
        )
    return TrainingConfig.model_validate(model.manifest["sections"]["training"])


def _held_out(problem: Dataset, graphs: Mapping[str, Mapping[str, Graph]], rows: NDArray[np.int64]) -> ProbeSettings:
    """The documents that training holds out."""
    return ProbeSettings(
        problem.train.at(rows),
        problem.y_train[rows],
        heldout_filter(problem, rows)[rows],
        {name: sides["train"].csr()[rows] for name, sides in graphs.items()},
        None if problem.groups is None else problem.groups[rows],
    )


def _test(path: Path, problem: Dataset, graphs: Mapping[str, Mapping[str, Graph]]) -> ProbeSettings:
    """The test documents; of their raw edges those to anchors that the graph kept."""
    edges = {}
    for name, sides in graphs.items():
        kept = np.concatenate([graph.indices for graph in sides.values()])
        count = sides["train"].shape[1]
        raw = read_test_edges(path, name)
        if raw is None:
            log.warning("%s: the dataset has no edges of test documents, so theirs count as 0", name)
        none = sp.csr_matrix((len(problem.test), count), dtype=np.float32)
        edges[name] = none if raw is None else _without(raw, ~_numbered(count, kept))
    return ProbeSettings(problem.test, problem.y_test, problem.filter_test, edges, problem.test_groups)


def _numbered(length: int, numbers: NDArray[np.integer]) -> NDArray[np.bool_]:
    """bool [length], true at the numbers; -1 is none."""
    return np.isin(np.arange(length), numbers)


def _without(matrix: sp.csr_matrix, anchors: NDArray[np.bool_]) -> sp.csr_matrix:
    """The matrix without edges to the marked anchors."""
    return remove_edges(matrix, anchors, sp.csr_matrix(matrix.shape))


def _with_mean(vectors: Vectors, edges: sp.csr_matrix, anchors: Vectors, weights: NDArray[np.float64]) -> Vectors:
    """Unit vectors with a share of their neighbours' weighted mean added: float32 [rows, D]."""
    return with_context(vectors, np.float32(SHARE) * neighbour_means(edges @ sp.diags(weights), anchors))


def _sharing(
    y: sp.csr_matrix,
    documents: sp.csr_matrix,
    labels: sp.csr_matrix,
    first: NDArray[np.int64],
    candidates: NDArray[np.int64] | None,
    seed: int,
) -> dict[str, float]:
    """How often pairs share an anchor, in percent, and how many rows have one at all; by chance: of the candidates."""

    def share(rows: NDArray[np.integer], columns: NDArray[np.integer]) -> float:
        if not len(rows):
            return 0.0
        common = np.asarray(documents[rows].multiply(labels[columns]).sum(axis=1)).ravel()
        return 100.0 * float((common > 0).mean())

    true = y.tocoo()
    rng = keyed_rng(seed, "probe")
    rows = np.repeat(np.flatnonzero(np.diff(y.indptr)), RANDOM_LABELS)
    number = y.shape[1]
    drawn = rng.integers(0, number if candidates is None else len(candidates), len(rows))
    pairs = set(zip(true.row.tolist(), true.col.tolist(), strict=True))
    wrong = np.array([label < number and (row, label) not in pairs for row, label in enumerate(first.tolist())])
    missed = wrong[true.row]
    return {
        "documents": 100.0 * float((np.diff(documents.indptr) > 0).mean()),
        "labels": 100.0 * float((np.diff(labels.indptr) > 0).mean()),
        "true": share(true.row, true.col),
        "chance": share(rows, drawn if candidates is None else candidates[drawn]),
        "missed": share(true.row[missed], true.col[missed]),
        "mistaken": share(np.flatnonzero(wrong), first[wrong]),
    }
