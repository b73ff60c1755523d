"""Estimate, before training, whether the graphs contain information that the encoder does not have (`ramen probe`).

Two measurements per anchor set, on documents that were not used for training:

* How often true pairs share an anchor. Random pairs are a weak baseline: documents and labels on one topic share
  neighbours, which the texts already show. So relevant labels that the encoder did not rank first are also compared
  with the wrong labels that it ranked first.
* What the encoder would gain if it had learnt the whole graph. Means of the neighbours' vectors are added to the label
  vectors, to the document vectors (an oracle, because the anchors of a new document are unknown), and to both.

Letters: V probed documents, L labels, M anchors of a set, D vector width.
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
from ramen.data.dataset import Dataset, Side, Texts, read_test_edges
from ramen.data.filters import heldout_filter
from ramen.encoder.label_vectors import add_context, encode_labels
from ramen.encoder.loading import load_encoder, load_trained
from ramen.errors import ArtifactError, DataError, Defect
from ramen.evaluation.metrics import DEPTH, apply_filter, document_weights, inverse_propensity, metrics_by_document
from ramen.evaluation.uncertainty import Gain, PerDocument, paired_gains
from ramen.graph.cleaning import anchors_among, remove_edges
from ramen.graph.metadata import Graphs, inverse_sqrt_degree, neighbour_means, read_graphs
from ramen.retrieval import RETRIEVED, search
from ramen.sampling import keyed_rng
from ramen.training.heldout import split_held_out

log = logging.getLogger(__name__)

NEIGHBOUR_WEIGHT = 0.5
"""Weight of the neighbours' mean in a vector. Fixed, because choosing the best of several would favour the graph."""
RANDOM_LABELS = 10
"""Random labels per document for the share of random pairs."""
METRICS = ("p_at_1", "psp_at_5", "r_at_100")

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ProbeResult:
    """Result for one anchor set. The field names are keys of the command's JSON.

    Attributes:
        documents, labels: percentage with an anchor.
        true, chance: percentage of the true pairs, and of pairs with random labels, that share an anchor.
        missed, mistaken: where the label ranked first is wrong, the same percentage of the relevant labels (not ranked
            first) and of the label ranked first. Nearly equal: the graph cannot correct the encoder's mistakes.
        gains: "labels", "documents" or "both" -> metric -> gain; a side without edges is missing.
    """

    documents: float
    labels: float
    true: float
    chance: float
    missed: float
    mistaken: float
    gains: dict[str, dict[str, Gain]]


@dataclass(frozen=True)
class ProbeDocuments:
    """Documents to probe.

    Attributes:
        y, ignored: CSR V x L, relevant and filtered labels.
        edges: anchor set -> CSR V x M.
        groups: int64 [V], the group of each document; None = one document per group.
    """

    texts: Texts
    y: sp.csr_matrix
    ignored: sp.csr_matrix
    edges: dict[str, sp.csr_matrix]
    groups: NDArray[np.int64] | None


@dataclass(frozen=True)
class _Evaluator:
    """Ranks labels for the probed documents and measures the rankings.

    Attributes:
        candidates: int64, the labels to rank; None = all.
        inv_p: float64 [L], inverse propensities.
        weights: of the metrics' denominators, see `document_weights`.
    """

    probed: ProbeDocuments
    candidates: NDArray[np.int64] | None
    inv_p: NDArray[np.float64]
    weights: Mapping[str, NDArray[np.float64]]

    def rank(self, documents: Vectors, labels: Vectors) -> NDArray[np.int64]:
        """Return the top labels of each document, int64 [V, 100], padded with L."""
        indices, scores = search(documents, labels, RETRIEVED, candidates=self.candidates)
        return apply_filter(indices, scores, self.probed.ignored, DEPTH)[0]

    def measure(self, ranking: NDArray[np.int64]) -> PerDocument:
        """Return each document's contribution to the metrics."""
        values = metrics_by_document(ranking, self.probed.y, self.inv_p, {})
        return PerDocument(self.probed.texts.uids, values, self.weights, self.probed.groups)

    def gain(self, base: PerDocument, documents: Vectors, labels: Vectors) -> dict[str, Gain]:
        """Return the gains of ranking by these vectors over a base, for `METRICS`."""
        gains = paired_gains(self.measure(self.rank(documents, labels)), base)
        return {key: gains[key] for key in METRICS if key in gains}


def probe(
    dataset: Artifact, graph: Artifact, model: Artifact | None, config: Config, on_test: bool
) -> tuple[dict[str, float], dict[str, ProbeResult]]:
    """Probe every anchor set.

    Args:
        dataset, graph: the artifacts. Edges are those of `graph`; test documents use their raw edges.
        model: a trained encoder; None = the encoder from which training starts.
        config: sections encoder, training (which documents are held out, unless a model determines them) and scoring.
        on_test: probe the test documents rather than the held-out ones; to explain a result, never to choose settings.

    Returns:
        The metrics of the texts only, in percent, and the result of each anchor set.

    Raises:
        DataError: no document is held out.
        ArtifactError: the model was trained on another dataset, so that its held-out documents are unknown.
    """
    data = Dataset.read(dataset.path)
    graphs = read_graphs(graph.path)
    if on_test:
        probed = _test_documents(dataset.path, data, graphs)
    else:
        training = config.training if model is None else _read_training_section(model, dataset)
        probed = _held_out_documents(dataset.path, data, graphs, training)
    candidates = data.candidates
    if len(data.unseen) and not on_test:  # held-out documents only have labels that occur in training
        candidates = np.setdiff1d(np.arange(len(data.labels)), data.unseen)
    section = config.encoder
    if model:
        encoder = load_trained(model.path, section)
    else:
        encoder = load_encoder(section.name, section, max_length=section.max_length)
    log.info("encoding %d documents and %d labels", len(probed.texts), len(data.labels))
    documents = encoder.encode(probed.texts.texts)
    labels = encode_labels(encoder, model.path, data.labels.texts) if model else encoder.encode(data.labels.texts)
    inv_p = inverse_propensity(data.y_train, config.scoring.propensity_a, config.scoring.propensity_b)
    weights = document_weights(probed.y, inv_p, {})
    evaluator = _Evaluator(probed, candidates, inv_p, weights)
    ranking = evaluator.rank(documents, labels)
    text_only = evaluator.measure(ranking)

    results = {}
    for name, sides in graphs.items():
        anchors = data.anchor_sets[name].texts
        log.info("%s: encoding its anchors", name)
        hidden = anchors_among(probed.texts, anchors)
        label_edges = _remove_anchors(sides[Side.LABEL].csr(), hidden)
        document_edges = _remove_anchors(probed.edges[name], hidden)
        anchor_weights = inverse_sqrt_degree(sides)
        used = np.union1d(label_edges.indices, document_edges.indices)
        anchor_vectors = np.zeros((len(anchors), documents.shape[1]), np.float32)
        anchor_vectors[used] = encoder.encode([anchors.texts[i] for i in used])
        mixed_labels = _add_neighbour_mean(labels, label_edges, anchor_vectors, anchor_weights)
        mixed_documents = _add_neighbour_mean(documents, document_edges, anchor_vectors, anchor_weights)
        gains = {}
        if label_edges.nnz:
            gains["labels"] = evaluator.gain(text_only, documents, mixed_labels)
        if document_edges.nnz:
            gains["documents"] = evaluator.gain(text_only, mixed_documents, labels)
        if len(gains) == 2:
            gains["both"] = evaluator.gain(text_only, mixed_documents, mixed_labels)
        shares = _share_anchors(probed.y, document_edges, label_edges, ranking[:, 0], candidates, config.training.seed)
        results[name] = ProbeResult(**shares, gains=gains)
    return {key: float(text_only.values[key].mean()) for key in METRICS if key in text_only.values}, results


def _read_training_section(model: Artifact, dataset: Artifact) -> TrainingConfig:
    """Return the section a model was trained with, which determines its held-out documents."""
    if model.manifest["inputs"].get("dataset") != dataset.digest:
        raise ArtifactError(
            f"{model.path}: was not trained on {dataset.path}, so its held-out documents are unknown; pass the dataset "
            "it was trained on, or probe the test documents with --test"
        )
    recorded = model.manifest["sections"]["training"]  # may contain knobs of earlier versions
    return TrainingConfig.model_validate({key: recorded[key] for key in TrainingConfig.model_fields if key in recorded})


def _held_out_documents(path: Path, data: Dataset, graphs: Graphs, training: TrainingConfig) -> ProbeDocuments:
    """Return the documents that training holds out. Raises DataError if there are none."""
    rows, _ = split_held_out(data, training)
    if not len(rows):
        raise DataError(Defect(str(path), "no held-out document to probe", "set training.validation_fraction above 0"))
    return ProbeDocuments(
        data.train.select(rows),
        data.y_train[rows],
        heldout_filter(data, rows)[rows],
        {name: sides[Side.DOCUMENT].csr()[rows] for name, sides in graphs.items()},
        None if data.groups is None else data.groups[rows],
    )


def _test_documents(path: Path, data: Dataset, graphs: Graphs) -> ProbeDocuments:
    """Return the test documents with their raw edges to the anchors of the graphs."""
    edges = {}
    for name, sides in graphs.items():
        kept = np.concatenate([graph.indices for graph in sides.values()])
        count = sides[Side.DOCUMENT].shape[1]
        raw = read_test_edges(path, name)
        if raw is None:
            log.warning("%s: the dataset has no edges of test documents; they count as documents without anchors", name)
            edges[name] = sp.csr_matrix((len(data.test), count), dtype=np.float32)
        else:
            edges[name] = _remove_anchors(raw, ~np.isin(np.arange(count), kept))
    return ProbeDocuments(data.test, data.y_test, data.filter_test, edges, data.test_groups)


def _remove_anchors(matrix: sp.csr_matrix, anchors: NDArray[np.bool_]) -> sp.csr_matrix:
    """Return the matrix without edges to the anchors marked in bool [M]."""
    return remove_edges(matrix, anchors, sp.csr_matrix(matrix.shape))


def _add_neighbour_mean(
    vectors: Vectors, edges: sp.csr_matrix, anchors: Vectors, weights: NDArray[np.float64]
) -> Vectors:
    """Add a share of the neighbours' weighted mean to each vector and normalise: float32 [rows, D]."""
    return add_context(vectors, np.float32(NEIGHBOUR_WEIGHT) * neighbour_means(edges @ sp.diags(weights), anchors))


def _share_anchors(
    y: sp.csr_matrix,
    documents: sp.csr_matrix,
    labels: sp.csr_matrix,
    first: NDArray[np.int64],
    candidates: NDArray[np.int64] | None,
    seed: int,
) -> dict[str, float]:
    """Return the percentages of `ProbeResult`: rows with an anchor, and pairs that share one.

    Args:
        y: CSR V x L, relevant labels.
        documents, labels: CSR V x M and L x M, edges.
        first: int64 [V], the label ranked first; L = none.
        candidates: labels from which random labels are drawn; None = all.
        seed: of the random labels.
    """

    def share(rows: NDArray[np.integer], columns: NDArray[np.integer]) -> float:
        if not len(rows):
            return 0.0
        common = np.asarray(documents[rows].multiply(labels[columns]).sum(axis=1)).ravel()
        return 100.0 * float((common > 0).mean())

    true = y.tocoo()
    rng = keyed_rng(seed, "probe")
    rows = np.repeat(np.flatnonzero(np.diff(y.indptr)), RANDOM_LABELS)
    num_labels = y.shape[1]
    drawn = rng.integers(0, num_labels if candidates is None else len(candidates), len(rows))
    pairs = set(zip(true.row.tolist(), true.col.tolist(), strict=True))
    wrong = np.array([label < num_labels and (row, label) not in pairs for row, label in enumerate(first.tolist())])
    missed = wrong[true.row]
    return {
        "documents": 100.0 * float((np.diff(documents.indptr) > 0).mean()),
        "labels": 100.0 * float((np.diff(labels.indptr) > 0).mean()),
        "true": share(true.row, true.col),
        "chance": share(rows, drawn if candidates is None else candidates[drawn]),
        "missed": share(true.row[missed], true.col[missed]),
        "mistaken": share(np.flatnonzero(wrong), first[wrong]),
    }
