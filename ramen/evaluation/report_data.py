"""Content of the report, read from artifacts: facts, training history, graphs, samples, metrics of the base."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ramen import config
from ramen.artifacts import Artifact
from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import PEER, Ints
from ramen.evaluation.predictions import PREDICTIONS, Ranking
from ramen.evaluation.quantiles import QUANTILES
from ramen.evaluation.report import GraphSize, Report, Sample, SampleLabel
from ramen.evaluation.tables import Measurements, count_unlabelled
from ramen.evaluation.uncertainty import GAIN, GAIN_SE, Gain
from ramen.files import check_type, read_json, wrap_read_errors
from ramen.graph.metadata import read_graphs
from ramen.retrieval import RETRIEVED

SAMPLES = 12
"""Sample predictions in the report."""
LABELS_PER_LIST = 5
"""Labels shown per sample and run; twice as many relevant labels."""
MAX_TEXT_LENGTH = 200
"""Characters of a text in the report; longer texts are cut."""
_HISTORY_TYPES: Mapping[str, Any] = {
    "epoch": int,
    "phase": str,
    "round": int,
    "loss": float | None,
    "task_loss": float | None,
    "val_p_at_1": float | None,
    "edges_kept": dict[str, float],
    "lambda": dict[str, float],
}
"""Keys of a record of history.json that the report shows -> type; missing keys leave gaps."""


def build_report(
    dataset: Dataset,
    ranking: Ranking,
    measured: Measurements,
    scoring: config.ScoringConfig,
    model: Artifact,
    pruned_graph: Artifact,
    base: Artifact | None,
    gains: Mapping[str, Gain],
) -> Report:
    """Build the content of the report.

    Args:
        ranking: rankings of the test documents.
        measured: measurements of `ranking`.
        base: evaluation of the base run; None = no base.
        gains: metric -> gain of this run over the base.
    """
    num_test, num_labels = dataset.shape[1:]
    base_bins = None if base is None else _read_base_bins(base, measured.bins)
    note = (
        f"Labels are sorted by training frequency and cut into bins of about equal training volume (rule "
        f"pyxclib, target {QUANTILES} bins, empty bins left out). Contributions sum to the "
        f"overall value; label-averaged recall does not."
    )
    if base is not None and base_bins is None:
        note += " The base has different bins and is not shown."
    return Report(
        lead=f"{num_test:,} test documents, {num_labels:,} labels" + (", compared with the base run." if base else "."),
        metrics=measured.metrics,
        labels=measured.sizes,
        bins=measured.bins,
        bins_note=note,
        facts=_list_facts(dataset, scoring, model),
        base=None if base is None else read_base_metrics(base),
        base_bins=base_bins,
        gains=gains,
        error_note=_describe_errors(dataset),
        history=read_history(model.path),
        graphs=_read_graph_sizes(pruned_graph.path),
        samples=_draw_samples(dataset, ranking, measured.frequency, SAMPLES, base),
    )


def _describe_errors(dataset: Dataset) -> str:
    documents = f"{len(dataset.test):,} test documents"
    if dataset.test_groups is None:
        return f"paired over the {documents}, which are treated as independent"
    groups = len(np.unique(dataset.test_groups))
    return f"paired over the {documents} and clustered by their {groups:,} groups"


def _list_facts(dataset: Dataset, scoring: config.ScoringConfig, model: Artifact) -> list[tuple[str, str]]:
    num_train, num_test, num_labels = dataset.shape
    return [
        ("training documents", f"{num_train:,}"),
        ("test documents", f"{num_test:,}"),
        ("test documents without a label", f"{count_unlabelled(dataset):,}"),
        ("labels", f"{num_labels:,}"),
        ("test pairs", f"{dataset.y_test.nnz:,}"),
        ("filtered test pairs", f"{dataset.filter_test.nnz:,}"),
        ("propensity", f"A = {scoring.propensity_a:g}, B = {scoring.propensity_b:g}, N = {num_train:,}"),
        ("retrieved before filtering", f"{RETRIEVED:,}"),
        ("model", model.digest[:16]),
    ]


def read_base_metrics(base: Artifact) -> dict[str, float]:
    """Read the metrics of a base run, without those of its peers and of its own base."""
    metrics = read_json(base.path / "metrics.json", dict[str, float])
    return {key: value for key, value in metrics.items() if not key.startswith(("base/", PEER, GAIN, GAIN_SE))}


def _read_base_bins(base: Artifact, bins: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]] | None:
    """Read the base's table by bin; None if its bins differ."""
    file = base.path / "quantiles.csv"
    with wrap_read_errors(file), file.open(encoding="utf-8", newline="") as stream:
        rows = {row.pop("bin"): row for row in csv.DictReader(stream)}
        table = {name: {key: float(value) for key, value in row.items() if value} for name, row in rows.items()}
        labels = {name: row["labels"] for name, row in table.items()}
    return table if labels == {name: row["labels"] for name, row in bins.items()} else None


def read_history(model: Path) -> list[dict[str, Any]]:
    """Read a model's training history; empty if it has none (it was not trained by ramen).

    Raises:
        ArtifactError: history.json is damaged.
    """
    file = model / "history.json"
    history: list[dict[str, Any]] = read_json(file, list[dict[str, Any]]) if file.exists() else []
    for number, record in enumerate(history):
        for key in _HISTORY_TYPES.keys() & record.keys():
            check_type(record[key], _HISTORY_TYPES[key], f"{file}: {number}: {key}")
    return history


def _read_graph_sizes(path: Path) -> list[GraphSize]:
    side_names = {"train": "documents", "labels": "labels"}
    return [
        GraphSize(f"{name}, {side_names[side]}", *graph.shape, graph.num_edges, int(graph.original.sum()))
        for name, sides in read_graphs(path).items()
        for side, graph in sides.items()
    ]


def _draw_samples(
    dataset: Dataset, ranking: Ranking, frequency: Ints, count: int, base: Artifact | None
) -> list[Sample]:
    """Draw labelled test documents with a fixed seed, so that all runs on a dataset show the same documents."""
    labelled = np.flatnonzero(np.diff(dataset.y_test.indptr))
    rows = np.sort(np.random.default_rng(0).permutation(labelled)[:count])
    base_labels = {} if base is None or not len(rows) else _read_top_labels(base, [dataset.test.uids[i] for i in rows])
    samples = []
    for row in rows:
        uid = dataset.test.uids[row]
        relevant = dataset.y_test.indices[slice(*dataset.y_test.indptr[row : row + 2])]
        relevant = relevant[np.argsort(-frequency[relevant], kind="stable")]
        predicted = ranking.indices[row, :LABELS_PER_LIST]
        listed = relevant[: 2 * LABELS_PER_LIST]
        samples.append(
            Sample(
                uid,
                _shorten(dataset.test.texts[row]),
                truth=_list_labels(dataset, frequency, listed, predicted),
                run=_list_labels(dataset, frequency, predicted, relevant),
                base=None if base is None else _list_labels(dataset, frequency, base_labels.get(uid, []), relevant),
                more=len(relevant) - len(listed),
            )
        )
    return samples


def _list_labels(dataset: Dataset, frequency: Ints, labels: Iterable[int], hits: Iterable[int]) -> list[SampleLabel]:
    """Return labels for display, without padding; those among `hits` are marked."""
    marked = {int(label) for label in hits}
    return [
        SampleLabel(_shorten(dataset.labels.texts[label]), int(frequency[label]), int(label) in marked)
        for label in labels
        if label < dataset.shape[2]
    ]


def _shorten(text: str) -> str:
    return shorten(text, MAX_TEXT_LENGTH, placeholder=" …")


def _read_top_labels(base: Artifact, uids: list[str]) -> dict[str, list[int]]:
    """Read the base's top labels of some documents; label numbers are those of the same dataset."""
    file = base.path / PREDICTIONS
    top: dict[str, list[int]] = {}
    with wrap_read_errors(file):
        table = pq.read_table(
            file,
            columns=["document", "label_index"],
            filters=[("document", "in", uids), ("rank", "<=", LABELS_PER_LIST)],
        )
        for uid, label in zip(table["document"].to_pylist(), table["label_index"].to_pylist(), strict=True):
            top.setdefault(uid, []).append(label)
    return top
