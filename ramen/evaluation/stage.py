"""Stage `evaluate`: retrieve labels for the test documents, measure, write metrics, predictions and the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen import config
from ramen.artifacts import Artifact, Draft, open_artifact
from ramen.console import warn
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fused_labels, has_more
from ramen.encoder.loading import load_trained
from ramen.errors import ArtifactError, DataError, Defect, RamenError
from ramen.evaluation.figures import png
from ramen.evaluation.metrics import DEPTH, ENCODER, PEER, REPORTED, apply_filter
from ramen.evaluation.metrics import evaluate as measure
from ramen.evaluation.per_document import from_evaluation, from_ranking
from ramen.evaluation.predictions import ENCODER_PREDICTIONS, PREDICTIONS, Ranking, write_predictions
from ramen.evaluation.report import make_figures, render
from ramen.evaluation.report_data import gather
from ramen.evaluation.tables import counts, measure_ranking, write_tables
from ramen.evaluation.uncertainty import PER_DOCUMENT, flat_gains, gains
from ramen.files import write_text
from ramen.graph.cleaning import anchors_among, anchors_of, remove_edges
from ramen.peers import PEERS, Task
from ramen.peers.evaluation import rank_test_documents
from ramen.retrieval import search
from ramen.tracking import Tracker


def evaluate(
    *,
    dataset: Artifact,
    pruned_graph: Artifact,
    model: Artifact,
    evaluation: Draft,
    encoder: config.EncoderConfig,
    scoring: config.ScoringConfig,
    track: Tracker,
) -> dict[str, float]:
    """Evaluate a model on the test documents.

    Writes metrics.json, propensity.json, quantiles.csv, plots/quantiles.csv (bin, metric, value),
    predictions.parquet, per_document.parquet (contributions to the metrics), figures/*.png and report.html;
    encoder_predictions.parquet for a model with label context or classifiers. Test documents without a label are kept
    and count 0, as in pyxclib (FN alone leaves them out).

    Returns:
        Overall and slice metrics in percent; with a base also `gain/METRIC` and its standard error `gain_se/METRIC`.
        metrics.json also holds the base's metrics under `base/`.

    Raises:
        DataError: there is no test document, or none has a label.
        ArtifactError: the model gives vectors that are not finite; `scoring.base` is no evaluation of this dataset
            with these propensity parameters.
    """
    problem = Dataset.read(dataset.path)
    if not problem.y_test.nnz:
        defect = "expected at least one test document with a label, found none"
        raise DataError(Defect(f"{dataset.path}/labels/test.npz", defect, "ingest again with a larger test split"))
    base = _open_base(scoring, dataset)  # its propensity was checked before the stage began
    alone, fused = _retrieve(problem, model, encoder, scoring)
    ranking = fused or alone
    measured = measure_ranking(problem, ranking, scoring)
    if fused:  # as published NGAME figures are; those of the encoder alone belong beside
        theirs = measure_ranking(problem, alone, scoring).metrics
        measured.metrics.update({f"{ENCODER}{key}": value for key, value in theirs.items()})
    documents = from_ranking(
        problem, ranking.indices, scoring.propensity_a, scoring.propensity_b, {"dataset": dataset.digest}
    )
    gained = gains(documents, from_evaluation(problem, base.path)) if base else {}
    measured.metrics.update(flat_gains(gained))
    measured.metrics.update(_peers(problem, encoder, scoring))
    report = gather(problem, ranking, measured, scoring, model, pruned_graph, base, gained)

    if scoring.links:
        measured.metrics.update(_links(problem, model, encoder, scoring))

    write_tables(evaluation.path, problem, measured, scoring, report.base)
    write_predictions(evaluation.path / PREDICTIONS, problem, ranking, scoring.chunk)
    documents.write(evaluation.path / PER_DOCUMENT)
    if fused:
        write_predictions(evaluation.path / ENCODER_PREDICTIONS, problem, alone, scoring.chunk)
    figures = make_figures(report)
    images = {name: png(figure) for name, figure in figures.items()}
    (evaluation.path / "figures").mkdir()
    for name, image in images.items():
        (evaluation.path / "figures" / f"{name}.png").write_bytes(image)
    write_text(evaluation.path / "report.html", render(report, images))
    evaluation.counts.update(counts(problem, measured, scoring) | {"test_groups": documents.group_count})
    if base:
        evaluation.counts["base"] = base.digest
    return measured.metrics


def _open_base(scoring: config.ScoringConfig, dataset: Artifact) -> Artifact | None:
    """The base's evaluation, if one is named; its numbers must be comparable."""
    if not scoring.base:
        return None
    base = open_artifact(scoring.base, "evaluation")
    if base.manifest["inputs"].get("dataset") != dataset.digest:
        raise ArtifactError(f"scoring.base = {scoring.base}: was evaluated on another dataset than {dataset.path}")
    return base


def _retrieve(
    problem: Dataset, model: Artifact, encoder: config.EncoderConfig, scoring: config.ScoringConfig
) -> tuple[Ranking, Ranking | None]:
    """Rankings by the encoder alone, and with the model's label context and classifiers if it has some."""
    sentences = load_trained(model.path, encoder)
    documents = sentences.encode(problem.test.texts)
    labels = encode_labels(sentences, model.path, problem.labels.texts)
    if not (np.isfinite(documents).all() and np.isfinite(labels).all()):
        raise ArtifactError(f"{model.path}: gives vectors that are not finite; train again with a lower training.lr")

    def ranking(vectors: NDArray[np.float32]) -> Ranking:
        indices, scores = search(documents, vectors, scoring.retrieve, scoring.chunk, problem.candidates)
        return Ranking(*apply_filter(indices, scores, problem.filter_test, DEPTH))

    fused = ranking(fused_labels(model.path, labels)) if has_more(model.path) else None
    return ranking(labels), fused


def _peers(problem: Dataset, encoder: config.EncoderConfig, scoring: config.ScoringConfig) -> dict[str, float]:
    """Overall metrics of each peer as `peers/NAME/KEY`; a peer that cannot run is left out with a warning."""
    metrics = {}
    for name in scoring.peers:
        try:
            with tempfile.TemporaryDirectory() as work:
                task = Task(problem, encoder, config.TrainingConfig(), scoring, Path(work))
                ranking = rank_test_documents(task, PEERS[name].fit(task))
        except RamenError as error:
            warn(f"peer {name} is left out of the evaluation: {error}")
            continue
        found = measure_ranking(problem, ranking, scoring).metrics
        keys = [f"{metric}_at_{k}" for metric, depths in REPORTED.items() for k in depths]
        metrics.update({f"{PEER}{name}/{key}": found[key] for key in keys})
    return metrics


def _links(
    problem: Dataset, model: Artifact, encoder: config.EncoderConfig, scoring: config.ScoringConfig
) -> dict[str, float]:
    """Link prediction: R@100 of the training documents' raw anchors among all anchors of the set.

    Every anchor set of the dataset, but for links to test documents and to the document itself, whatever the model was
    trained on: it is not asked about the edges alone that its own pruning kept. Those that it was trained on say how
    well the encoder has taken them up, not how it does on new ones.
    """
    sentences = load_trained(model.path, encoder)
    documents = sentences.encode(problem.train.texts)
    metrics = {}
    for name, each in sorted(problem.anchor_sets.items()):
        linked = remove_edges(
            each.train, anchors_among(problem.test, each.texts), anchors_of(problem.train, each.texts)
        )
        rows = np.flatnonzero(np.diff(linked.indptr))
        if not len(rows):
            continue
        anchors = sentences.encode(each.texts.texts)
        found, _ = search(documents[rows], anchors, DEPTH, scoring.chunk)
        recall = measure(found, linked[rows], np.ones(linked.shape[1]))["r"][DEPTH - 1]
        metrics[f"links/{name}_r_at_100"] = 100.0 * float(recall)
    return metrics
