"""What the report shows, gathered from the artifacts: facts, training history, graphs, samples, the base's numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from ramen.evaluation.report import GraphFacts, Item, Report, Sample
from ramen.evaluation.uncertainty import GAIN, GAIN_SE, Gain
from ramen.files import checked, read_json, reading
from ramen.graph.metadata import read_graphs

SHOWN = 5
"""Labels per sample and run in the report."""
LONGEST = 200
"""Characters of a text in the report; full-text documents are cut."""
Bins = dict[str, dict[str, float]]
_RECORD: Mapping[str, Any] = {
    "epoch": int,
    "phase": str,
    "round": int,
    "loss": float | None,
    "task_loss": float | None,
    "val_p_at_1": float | None,
    "edges_kept": dict[str, float],
    "lambda": dict[str, float],
}
"""Keys of a record of the training history that the report shows; those that are missing leave gaps."""


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        metrics: flat, percent, with slices.
        bins: table by quantile, non-empty bins.
        frequency: int64 [L], training documents per label.
        sizes: labels in head, torso, tail and overall.
    """

    metrics: dict[str, float]
    bins: Bins
    frequency: Ints
    sizes: dict[str, int]


def gather(
    problem: Dataset,
    ranking: Ranking,
    measured: Measured,
    scoring: config.ScoringConfig,
    model: Artifact,
    pruned_graph: Artifact,
    base: Artifact | None,
    gained: Mapping[str, Gain],
) -> Report:
    """Everything the report needs; `base` is the evaluation of the base run, `gained` what this run gains over it."""
    num_test, num_labels = problem.shape[1:]
    base_bins = None if base is None else _base_bins(base, measured.bins)
    note = (
        f"Labels sorted by training frequency and cut into bins of about equal training volume (rule "
        f"{scoring.quantile_rule}, aiming at {scoring.quantiles}; empty bins left out). Contributions add up to the "
        f"overall value; label-averaged recall does not."
    )
    if base is not None and base_bins is None:
        note += " The base was cut into other bins and is not shown."
    return Report(
        lead=f"{num_test:,} test documents against {num_labels:,} labels"
        + (", compared with the base run." if base else "."),
        metrics=measured.metrics,
        labels=measured.sizes,
        bins=measured.bins,
        bins_note=note,
        facts=_facts(problem, scoring, model),
        base=None if base is None else base_metrics(base),
        base_bins=base_bins,
        gains=gained,
        error_note=_error_note(problem),
        history=_history(model.path),
        graphs=_graph_facts(pruned_graph.path),
        samples=_samples(problem, ranking, measured.frequency, scoring.samples, base),
    )


def _error_note(problem: Dataset) -> str:
    """How the standard errors are computed."""
    documents = f"{len(problem.test):,} test documents"
    if problem.test_groups is None:
        return f"paired over the {documents}, each taken as independent"
    groups = len(np.unique(problem.test_groups))
    return f"paired over the {documents} and clustered by their {groups:,} groups"


def unlabelled(problem: Dataset) -> int:
    """Test documents without a label."""
    return int((np.diff(problem.y_test.indptr) == 0).sum())


def _facts(problem: Dataset, scoring: config.ScoringConfig, model: Artifact) -> list[tuple[str, str]]:
    num_train, num_test, num_labels = problem.shape
    return [
        ("training documents", f"{num_train:,}"),
        ("test documents", f"{num_test:,}"),
        ("test documents without a label", f"{unlabelled(problem):,}"),
        ("labels", f"{num_labels:,}"),
        ("test pairs", f"{problem.y_test.nnz:,}"),
        ("filtered test pairs", f"{problem.filter_test.nnz:,}"),
        ("propensity", f"A = {scoring.propensity_a:g}, B = {scoring.propensity_b:g}, N = {num_train:,}"),
        ("retrieved before filtering", f"{scoring.retrieve:,}"),
        ("model", model.digest[:16]),
    ]


def base_metrics(base: Artifact) -> dict[str, float]:
    """The metrics of a base run, without those of the run's base and peers."""
    metrics = read_json(base.path / "metrics.json", dict[str, float])
    return {key: value for key, value in metrics.items() if not key.startswith(("base/", PEER, GAIN, GAIN_SE))}


def _base_bins(base: Artifact, bins: Bins) -> Bins | None:
    """The base's table by quantile, None if its bins are not the same."""
    file = base.path / "quantiles.csv"
    with reading(file), file.open(encoding="utf-8", newline="") as stream:
        rows = {row.pop("bin"): row for row in csv.DictReader(stream)}
        table = {name: {key: float(value) for key, value in row.items() if value} for name, row in rows.items()}
        labels = {name: row["labels"] for name, row in table.items()}
    same = labels == {name: row["labels"] for name, row in bins.items()}
    return table if same else None


def _history(model: Path) -> list[dict[str, Any]]:
    """Training history of the model; empty if it carries none (a foreign model). Raises ArtifactError if damaged."""
    file = model / "history.json"
    history: list[dict[str, Any]] = read_json(file, list[dict[str, Any]]) if file.exists() else []
    for number, record in enumerate(history):
        for key in _RECORD.keys() & record.keys():
            checked(record[key], _RECORD[key], f"{file}: {number}: {key}")
    return history


def _graph_facts(path: Path) -> list[GraphFacts]:
    names = {"train": "documents", "labels": "labels"}
    return [
        GraphFacts(f"{name}, {names[side]}", *graph.shape, graph.num_edges, int(graph.original.sum()))
        for name, sides in read_graphs(path).items()
        for side, graph in sides.items()
    ]


def _samples(problem: Dataset, ranking: Ranking, frequency: Ints, count: int, base: Artifact | None) -> list[Sample]:
    """Labelled test documents drawn with a fixed seed, so that runs on one dataset show the same."""
    labelled = np.flatnonzero(np.diff(problem.y_test.indptr))
    chosen = np.sort(np.random.default_rng(0).permutation(labelled)[:count])
    theirs = {} if base is None or not len(chosen) else _base_predictions(base, [problem.test.uids[i] for i in chosen])
    samples = []
    for document in chosen:
        uid = problem.test.uids[document]
        truth = problem.y_test.indices[slice(*problem.y_test.indptr[document : document + 2])]
        truth = truth[np.argsort(-frequency[truth], kind="stable")]
        own = ranking.indices[document, :SHOWN]
        samples.append(
            Sample(
                uid,
                _clip(problem.test.texts[document]),
                _items(problem, frequency, truth[: 2 * SHOWN], own),
                _items(problem, frequency, own, truth),
                None if base is None else _items(problem, frequency, theirs.get(uid, []), truth),
                more=max(len(truth) - 2 * SHOWN, 0),
            )
        )
    return samples


def _items(problem: Dataset, frequency: Ints, labels: Iterable[int], hits: Iterable[int]) -> list[Item]:
    marked = {int(label) for label in hits}
    return [
        Item(_clip(problem.labels.texts[label]), int(frequency[label]), int(label) in marked)
        for label in labels
        if label < problem.shape[2]
    ]


def _clip(text: str) -> str:
    return shorten(text, LONGEST, placeholder=" …")


def _base_predictions(base: Artifact, uids: list[str]) -> dict[str, list[int]]:
    """First labels of the base for some documents; the same dataset numbers labels the same."""
    file = base.path / PREDICTIONS
    found: dict[str, list[int]] = {}
    with reading(file):
        table = pq.read_table(
            file, columns=["document", "label_index"], filters=[("document", "in", uids), ("rank", "<=", SHOWN)]
        )
        for uid, label in zip(table["document"].to_pylist(), table["label_index"].to_pylist(), strict=True):
            found.setdefault(uid, []).append(label)
    return found
