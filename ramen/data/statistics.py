"""Facts about a problem: sizes, degrees and lengths, for the manifest, the tracker and the reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import PLACEHOLDER, Dataset, Texts

FEW_DOCUMENTS = 5
"""A label with this many training documents or fewer is counted as rare."""


def text_lists(problem: Dataset) -> Iterator[tuple[str, Texts]]:
    """(name, texts) of documents, labels and anchors; the name is the path inside the dataset without its end."""
    for name in ("train", "test", "labels"):
        yield f"texts/{name}", getattr(problem, name)
    for name, anchors in problem.anchor_sets.items():
        yield f"anchors/{name}/texts", anchors.texts


def relations(problem: Dataset) -> Iterator[tuple[str, sp.csr_matrix, tuple[int, int]]]:
    """(name, matrix, shape that its texts call for) of every matrix; names as in `text_lists`."""
    documents = {"train": len(problem.train), "test": len(problem.test)}
    for folder, prefix in (("labels", "y"), ("filters", "filter")):
        for part, rows in documents.items():
            yield f"{folder}/{part}", getattr(problem, f"{prefix}_{part}"), (rows, len(problem.labels))
    for name, anchors in problem.anchor_sets.items():
        columns = len(anchors.texts)
        yield f"anchors/{name}/train", anchors.train, (len(problem.train), columns)
        yield f"anchors/{name}/labels", anchors.labels, (len(problem.labels), columns)
        if anchors.test is not None:
            yield f"anchors/{name}/test", anchors.test, (len(problem.test), columns)


def statistics(problem: Dataset) -> dict[str, Any]:
    """Everything `validation/statistics.json` holds: lengths per text list, degrees per matrix, the label tail."""
    documents = np.bincount(problem.y_train.indices, minlength=len(problem.labels))
    return {
        "texts": {name: _text_facts(texts) for name, texts in text_lists(problem)},
        "relations": {name: _relation_facts(matrix) for name, matrix, _ in relations(problem)},
        "labels": {
            "without_training_documents": int((documents == 0).sum()),
            f"with_at_most_{FEW_DOCUMENTS}_training_documents": int((documents <= FEW_DOCUMENTS).sum()),
            "test_pairs_with_a_label_seen_in_training": int((documents[problem.y_test.indices] > 0).sum()),
        },
        "filtered_positives": {
            "train": int(problem.y_train.multiply(problem.filter_train).nnz),
            "test": int(problem.y_test.multiply(problem.filter_test).nnz),
        },
    }


def counts(problem: Dataset) -> dict[str, Any]:
    """The compact part of the statistics that the manifest records."""
    return {
        "documents": len(problem.train),
        "test_documents": len(problem.test),
        "labels": len(problem.labels),
        "pairs": int(problem.y_train.nnz),
        "test_pairs": int(problem.y_test.nnz),
        "anchor_sets": {
            name: {
                "anchors": len(anchors.texts),
                "train_edges": int(anchors.train.nnz),
                "label_edges": int(anchors.labels.nnz),
            }
            for name, anchors in problem.anchor_sets.items()
        },
    }


def headline(problem: Dataset) -> dict[str, float]:
    """Flat metrics: counts, labels per document, and per anchor set `anchors/S`, `edges/S/train`, `edges/S/labels`."""
    found = counts(problem)
    metrics = {key: float(value) for key, value in found.items() if key != "anchor_sets"}
    metrics["labels_per_document"] = problem.y_train.nnz / max(len(problem.train), 1)
    for name, facts in found["anchor_sets"].items():
        metrics[f"anchors/{name}"] = float(facts["anchors"])
        metrics[f"edges/{name}/train"] = float(facts["train_edges"])
        metrics[f"edges/{name}/labels"] = float(facts["label_edges"])
    return metrics


def _text_facts(texts: Texts) -> dict[str, Any]:
    lengths = np.fromiter(map(len, texts.texts), np.int64, len(texts))
    placeholders = sum(text == PLACEHOLDER for text in texts.texts)
    return {"count": len(texts), "placeholders": placeholders, "characters": _spread(lengths)}


def _relation_facts(matrix: sp.csr_matrix) -> dict[str, Any]:
    of_rows = np.diff(matrix.indptr)
    of_columns = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return {
        "rows": int(matrix.shape[0]),
        "columns": int(matrix.shape[1]),
        "entries": int(matrix.nnz),
        "empty_rows": int((of_rows == 0).sum()),
        "unused_columns": int((of_columns == 0).sum()),
        "per_row": _spread(of_rows),
        "per_column": _spread(of_columns),
    }


def _spread(values: NDArray[np.int64]) -> dict[str, float]:
    if not len(values):
        return {}
    quantiles = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: float(np.quantile(values, share)) for name, share in quantiles.items()}
    return {**found, "mean": float(values.mean())}
