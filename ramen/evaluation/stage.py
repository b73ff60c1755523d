"""Stage `evaluate`: rank labels for the test documents and write metrics, predictions and the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen import config
from ramen.artifacts import Artifact, Draft, open_artifact
from ramen.console import warn
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors, has_context_or_classifier
from ramen.encoder.loading import load_trained
from ramen.errors import ArtifactError, DataError, Defect, RamenError
from ramen.evaluation.figures import png
from ramen.evaluation.metrics import DEPTH, ENCODER, PEER, REPORTED, apply_filter
from ramen.evaluation.metrics import compute_metrics as compute_metrics
from ramen.evaluation.per_document import compute_contributions, read_contributions
from ramen.evaluation.predictions import ENCODER_PREDICTIONS, PREDICTIONS, Ranking, write_predictions
from ramen.evaluation.report import Report, make_figures, render
from ramen.evaluation.report_data import build_report
from ramen.evaluation.tables import count_documents, measure_ranking, write_tables
from ramen.evaluation.uncertainty import PER_DOCUMENT, flat_gains, paired_gains
from ramen.files import write_text
from ramen.graph.cleaning import anchors_among, match_anchors, remove_edges
from ramen.peers import PEERS, Task
from ramen.peers.evaluation import rank_test_documents
from ramen.retrieval import RETRIEVED, search
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
    predictions.parquet, per_document.parquet (contributions to the metrics), figures/*.png and report.html; also
    encoder_predictions.parquet for a model with label context or classifiers. Test documents without a label count as
    0, as in pyxclib (except in FN).

    Returns:
        Overall and slice metrics in percent; with a base also `gain/METRIC` and its standard error `gain_se/METRIC`.
        metrics.json additionally has the base's metrics under `base/`.

    Raises:
        DataError: there is no test document with a label.
        ArtifactError: the model produces non-finite vectors, or `scoring.base` is not an evaluation of this dataset.
    """
    data = Dataset.read(dataset.path)
    if not data.y_test.nnz:
        defect = "expected at least one test document with a label, found none"
        raise DataError(Defect(f"{dataset.path}/labels/test.npz", defect, "ingest again with a larger test split"))
    base = _open_base(scoring, dataset)  # preflight checked its propensity parameters
    encoder_ranking, fused_ranking = _rank_labels(data, model, encoder)
    ranking = fused_ranking or encoder_ranking
    measured = measure_ranking(data, ranking, scoring)
    if fused_ranking:  # published NGAME results are fused; the encoder's own metrics are reported alongside
        encoder_metrics = measure_ranking(data, encoder_ranking, scoring).metrics
        measured.metrics.update({f"{ENCODER}{key}": value for key, value in encoder_metrics.items()})
    documents = compute_contributions(
        data, ranking.indices, scoring.propensity_a, scoring.propensity_b, {"dataset": dataset.digest}
    )
    gains = paired_gains(documents, read_contributions(data, base.path)) if base else {}
    measured.metrics.update(flat_gains(gains))
    measured.metrics.update(_evaluate_peers(data, encoder, scoring))
    report = build_report(data, ranking, measured, scoring, model, pruned_graph, base, gains)

    if scoring.links:
        measured.metrics.update(_predict_links(data, model, encoder))

    write_tables(evaluation.path, data, measured, scoring, report.base)
    write_predictions(evaluation.path / PREDICTIONS, data, ranking)
    documents.write(evaluation.path / PER_DOCUMENT)
    if fused_ranking:
        write_predictions(evaluation.path / ENCODER_PREDICTIONS, data, encoder_ranking)
    _write_report(evaluation.path, report)
    evaluation.counts.update(count_documents(data, measured, scoring) | {"test_groups": documents.group_count})
    if base:
        evaluation.counts["base"] = base.digest
    return measured.metrics


def _open_base(scoring: config.ScoringConfig, dataset: Artifact) -> Artifact | None:
    """Open the evaluation `scoring.base`, if it is set. Raises ArtifactError if it is of another dataset."""
    if not scoring.base:
        return None
    base = open_artifact(scoring.base, "evaluation")
    if base.manifest["inputs"].get("dataset") != dataset.digest:
        raise ArtifactError(
            f"scoring.base = {scoring.base}: is an evaluation of another dataset than {dataset.path}; evaluate the "
            "base on this dataset or unset scoring.base"
        )
    return base


def _rank_labels(data: Dataset, model: Artifact, encoder: config.EncoderConfig) -> tuple[Ranking, Ranking | None]:
    """Rank the labels by the encoder only, and with the model's label context and classifiers (None = it has none)."""
    sentences = load_trained(model.path, encoder)
    documents = sentences.encode(data.test.texts)
    labels = encode_labels(sentences, model.path, data.labels.texts)
    if not (np.isfinite(documents).all() and np.isfinite(labels).all()):
        raise ArtifactError(f"{model.path}: the model's vectors are not finite; train again with a lower training.lr")

    def rank(vectors: NDArray[np.float32]) -> Ranking:
        indices, scores = search(documents, vectors, RETRIEVED, candidates=data.candidates)
        return Ranking(*apply_filter(indices, scores, data.filter_test, DEPTH))

    fused = rank(fuse_label_vectors(model.path, labels)) if has_context_or_classifier(model.path) else None
    return rank(labels), fused


def _evaluate_peers(data: Dataset, encoder: config.EncoderConfig, scoring: config.ScoringConfig) -> dict[str, float]:
    """Return the overall metrics of each peer as `peers/NAME/KEY`; peers that cannot run are skipped with a warning."""
    metrics = {}
    keys = [f"{metric}_at_{k}" for metric, depths in REPORTED.items() for k in depths]
    for name in scoring.peers:
        try:
            with tempfile.TemporaryDirectory() as work:
                task = Task(data, encoder, config.TrainingConfig(), scoring, Path(work))
                ranking = rank_test_documents(task, PEERS[name].fit(task))
        except RamenError as error:
            warn(f"peer {name} is left out of the evaluation: {error}")
            continue
        peer_metrics = measure_ranking(data, ranking, scoring).metrics
        metrics.update({f"{PEER}{name}/{key}": peer_metrics[key] for key in keys})
    return metrics


def _predict_links(data: Dataset, model: Artifact, encoder: config.EncoderConfig) -> dict[str, float]:
    """Return `links/SET_r_at_100`: R@100 of the training documents' raw anchors among all anchors of each set.

    All raw edges count, except those to test documents and to the document itself, whether or not pruning kept them for
    training. The model was trained on some of them, so this measures how well it fits the graph, not generalisation.
    """
    sentences = load_trained(model.path, encoder)
    documents = sentences.encode(data.train.texts)
    metrics = {}
    for name, anchor_set in sorted(data.anchor_sets.items()):
        texts = anchor_set.texts
        edges = remove_edges(anchor_set.train, anchors_among(data.test, texts), match_anchors(data.train, texts))
        rows = np.flatnonzero(np.diff(edges.indptr))
        if not len(rows):
            continue
        ranked, _ = search(documents[rows], sentences.encode(texts.texts), DEPTH)
        recall = compute_metrics(ranked, edges[rows], np.ones(edges.shape[1]))["r"][DEPTH - 1]
        metrics[f"links/{name}_r_at_100"] = 100.0 * float(recall)
    return metrics


def _write_report(folder: Path, report: Report) -> None:
    """Write figures/*.png and report.html."""
    images = {name: png(figure) for name, figure in make_figures(report).items()}
    (folder / "figures").mkdir()
    for name, image in images.items():
        (folder / "figures" / f"{name}.png").write_bytes(image)
    write_text(folder / "report.html", render(report, images))
