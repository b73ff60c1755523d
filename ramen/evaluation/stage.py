"""Stage `evaluate`: retrieve labels for the test documents, measure, write metrics, predictions and the report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramen import config
from ramen.artifacts import Artifact, Draft, open_artifact, write_json, write_text
from ramen.data.dataset import Problem
from ramen.encoder.labels import encode_labels, fused_labels, has_more
from ramen.encoder.loading import load_trained
from ramen.errors import ArtifactError, DataError
from ramen.errors import Problem as Defect
from ramen.evaluation.contents import Measured, gather, unlabelled
from ramen.evaluation.figures import png
from ramen.evaluation.metrics import DEPTH, ENCODER, apply_filter, inverse_propensity, label_recall
from ramen.evaluation.metrics import evaluate as measure
from ramen.evaluation.predictions import ENCODER_PREDICTIONS, PREDICTIONS, Ranking, write_predictions
from ramen.evaluation.quantiles import LABEL_DEPTHS, by_bin, equi_volume_bins, head_torso_tail, overall_and_thirds
from ramen.evaluation.report import SLICES, make_figures, render
from ramen.graph.cleaning import anchors_among, anchors_of, remove_edges
from ramen.retrieval import search
from ramen.tracking import Tracker


def evaluate(
    *,
    dataset: Artifact,
    pruned_graph: Artifact,
    model: Artifact,
    evaluation: Draft,
    encoder: config.Encoder,
    scoring: config.Scoring,
    track: Tracker,
) -> dict[str, float]:
    """Evaluate a model on the test documents.

    Writes metrics.json, propensity.json, quantiles.csv, plots/quantiles.csv (bin, metric, value),
    predictions.parquet, figures/*.png and report.html; encoder_predictions.parquet for a model with label context or
    classifiers. Test documents without a label are kept and count 0, as in pyxclib (FN alone leaves them out).

    Returns:
        Overall and slice metrics in percent; metrics.json also holds the base's under `base/`.

    Raises:
        DataError: there is no test document, or none has a label.
        ArtifactError: the model gives vectors that are not finite; `scoring.base` is no evaluation of this dataset
            with these propensity parameters.
    """
    problem = Problem.read(dataset.path)
    if not problem.y_test.nnz:
        defect = "expected at least one test document with a label, found none"
        raise DataError(Defect(f"{dataset.path}/labels/test.npz", defect, "ingest again with a larger test split"))
    base = _open_base(scoring, dataset)
    alone, fused = _retrieve(problem, model, encoder, scoring)
    ranking = fused or alone
    measured = _measure(problem, ranking, scoring)
    if fused:  # as published NGAME figures are; those of the encoder alone belong beside
        theirs = _measure(problem, alone, scoring).metrics
        measured.metrics.update({f"{ENCODER}{key}": value for key, value in theirs.items()})
    report = gather(problem, ranking, measured, scoring, model, pruned_graph, base)

    if scoring.links:
        measured.metrics.update(_links(problem, model, encoder, scoring))

    _write_tables(evaluation.path, problem, measured, scoring, report.base)
    write_predictions(evaluation.path / PREDICTIONS, problem, ranking, scoring.chunk)
    if fused:
        write_predictions(evaluation.path / ENCODER_PREDICTIONS, problem, alone, scoring.chunk)
    figures = make_figures(report)
    images = {name: png(figure) for name, figure in figures.items()}
    (evaluation.path / "figures").mkdir()
    for name, image in images.items():
        (evaluation.path / "figures" / f"{name}.png").write_bytes(image)
    write_text(evaluation.path / "report.html", render(report, images))
    evaluation.counts.update(_counts(problem, measured, scoring))
    if base:
        evaluation.counts["base"] = base.digest
    return measured.metrics


def _open_base(scoring: config.Scoring, dataset: Artifact) -> Artifact | None:
    """The base's evaluation, if one is named; its numbers must be comparable."""
    if not scoring.base:
        return None
    base = open_artifact(scoring.base, "evaluation")
    if base.manifest["inputs"].get("dataset") != dataset.digest:
        raise ArtifactError(f"scoring.base = {scoring.base}: was evaluated on another dataset than {dataset.path}")
    theirs = json.loads((base.path / "propensity.json").read_text(encoding="utf-8"))
    if (theirs["a"], theirs["b"]) != (scoring.propensity_a, scoring.propensity_b):
        raise ArtifactError(
            f"scoring.base = {scoring.base}: its propensity is a={theirs['a']}, b={theirs['b']}, here "
            f"a={scoring.propensity_a}, b={scoring.propensity_b}; evaluate both with the same"
        )
    return base


def _retrieve(
    problem: Problem, model: Artifact, encoder: config.Encoder, scoring: config.Scoring
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


def _links(problem: Problem, model: Artifact, encoder: config.Encoder, scoring: config.Scoring) -> dict[str, float]:
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


def _measure(problem: Problem, ranking: Ranking, scoring: config.Scoring) -> Measured:
    indices, y = ranking.indices, problem.y_test
    frequency = np.asarray(problem.y_train.sum(axis=0)).ravel().astype(np.int64)
    inv_p = inverse_propensity(problem.y_train, scoring.propensity_a, scoring.propensity_b)
    thirds = head_torso_tail(frequency)
    cut = equi_volume_bins(frequency, scoring.quantiles, scoring.quantile_rule)
    bins = {str(i): labels for i, labels in enumerate((labels for labels in cut if len(labels)), 1)}
    metrics = overall_and_thirds(indices, y, inv_p, frequency)
    metrics |= {f"label_r_at_{k}": 100.0 * float(np.nanmean(label_recall(indices, y, k))) for k in LABEL_DEPTHS}
    sizes = {"overall": len(frequency)} | {name: len(labels) for name, labels in thirds.items()}
    return Measured(metrics, by_bin(indices, y, inv_p, frequency, bins), frequency, sizes)


def _counts(problem: Problem, measured: Measured, scoring: config.Scoring) -> dict[str, Any]:
    num_train, num_test, num_labels = problem.shape
    return {
        "train_documents": num_train,
        "test_documents": num_test,
        "test_documents_without_label": unlabelled(problem),
        "labels": num_labels,
        **{f"{name}_labels": measured.sizes[name] for name in SLICES},
        "propensity_a": scoring.propensity_a,
        "propensity_b": scoring.propensity_b,
    }


def _write_tables(
    path: Path,
    problem: Problem,
    measured: Measured,
    scoring: config.Scoring,
    base: Mapping[str, float] | None,
) -> None:
    metrics = measured.metrics | {f"base/{key}": value for key, value in (base or {}).items()}
    propensity = {"a": scoring.propensity_a, "b": scoring.propensity_b, "N": problem.shape[0]}
    write_json(path / "metrics.json", metrics)
    write_json(path / "propensity.json", propensity)
    columns = list(dict.fromkeys(key for row in measured.bins.values() for key in row))
    wide = [[name, *(row.get(key, "") for key in columns)] for name, row in measured.bins.items()]
    long = [[name, key, value] for name, row in measured.bins.items() for key, value in row.items() if "_at_" in key]
    write_text(path / "quantiles.csv", _csv(["bin", *columns], wide))
    write_text(path / "plots" / "quantiles.csv", _csv(["bin", "metric", "value"], long))


def _csv(header: list[str], rows: Iterable[list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return stream.getvalue()
