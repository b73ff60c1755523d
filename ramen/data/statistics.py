"""Statistics of a dataset: sizes, degrees and text lengths, for the manifest, the tracker and the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.data.dataset import PLACEHOLDER, Dataset, Texts

FEW_DOCUMENTS = 5
"""A label with at most this many training documents counts as rare."""


def iter_texts(dataset: Dataset) -> Iterator[tuple[str, Texts]]:
    """Yield (name, texts) of documents, labels and anchors; the name is the path in the artifact without its suffix."""
    for name in ("train", "test", "labels"):
        yield f"texts/{name}", getattr(dataset, name)
    for name, anchors in dataset.anchor_sets.items():
        yield f"anchors/{name}/texts", anchors.texts


def iter_matrices(dataset: Dataset) -> Iterator[tuple[str, sp.csr_matrix, tuple[int, int]]]:
    """Yield (name, matrix, expected shape) of every matrix; names as in `iter_texts`."""
    documents = {"train": len(dataset.train), "test": len(dataset.test)}
    for folder, prefix in (("labels", "y"), ("filters", "filter")):
        for part, rows in documents.items():
            yield f"{folder}/{part}", getattr(dataset, f"{prefix}_{part}"), (rows, len(dataset.labels))
    for name, anchors in dataset.anchor_sets.items():
        columns = len(anchors.texts)
        yield f"anchors/{name}/train", anchors.train, (len(dataset.train), columns)
        yield f"anchors/{name}/labels", anchors.labels, (len(dataset.labels), columns)
        if anchors.test is not None:
            yield f"anchors/{name}/test", anchors.test, (len(dataset.test), columns)


def compute_statistics(dataset: Dataset) -> dict[str, Any]:
    """Return the contents of `validation/statistics.json`: text lengths, degrees per matrix, rare labels."""
    documents = np.bincount(dataset.y_train.indices, minlength=len(dataset.labels))
    return {
        "texts": {name: _text_facts(texts) for name, texts in iter_texts(dataset)},
        "relations": {name: _matrix_facts(matrix) for name, matrix, _ in iter_matrices(dataset)},
        "labels": {
            "without_training_documents": int((documents == 0).sum()),
            f"with_at_most_{FEW_DOCUMENTS}_training_documents": int((documents <= FEW_DOCUMENTS).sum()),
            "test_pairs_with_a_label_seen_in_training": int((documents[dataset.y_test.indices] > 0).sum()),
        },
        "filtered_positives": {
            "train": int(dataset.y_train.multiply(dataset.filter_train).nnz),
            "test": int(dataset.y_test.multiply(dataset.filter_test).nnz),
        },
    }


def count_items(dataset: Dataset) -> dict[str, Any]:
    """Return the counts that the manifest records."""
    return {
        "documents": len(dataset.train),
        "test_documents": len(dataset.test),
        "labels": len(dataset.labels),
        "pairs": int(dataset.y_train.nnz),
        "test_pairs": int(dataset.y_test.nnz),
        "anchor_sets": {
            name: {
                "anchors": len(anchors.texts),
                "train_edges": int(anchors.train.nnz),
                "label_edges": int(anchors.labels.nnz),
            }
            for name, anchors in dataset.anchor_sets.items()
        },
    }


def summary_metrics(dataset: Dataset) -> dict[str, float]:
    """Return flat metrics: counts, labels per document, and `anchors/S`, `edges/S/train`, `edges/S/labels` of set S."""
    counts = count_items(dataset)
    metrics = {key: float(value) for key, value in counts.items() if key != "anchor_sets"}
    metrics["labels_per_document"] = dataset.y_train.nnz / max(len(dataset.train), 1)
    for name, facts in counts["anchor_sets"].items():
        metrics[f"anchors/{name}"] = float(facts["anchors"])
        metrics[f"edges/{name}/train"] = float(facts["train_edges"])
        metrics[f"edges/{name}/labels"] = float(facts["label_edges"])
    return metrics


def _text_facts(texts: Texts) -> dict[str, Any]:
    lengths = np.fromiter(map(len, texts.texts), np.int64, len(texts))
    placeholders = sum(text == PLACEHOLDER for text in texts.texts)
    return {"count": len(texts), "placeholders": placeholders, "characters": _quantiles(lengths)}


def _matrix_facts(matrix: sp.csr_matrix) -> dict[str, Any]:
    row_degrees = np.diff(matrix.indptr)
    column_degrees = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return {
        "rows": int(matrix.shape[0]),
        "columns": int(matrix.shape[1]),
        "entries": int(matrix.nnz),
        "empty_rows": int((row_degrees == 0).sum()),
        "unused_columns": int((column_degrees == 0).sum()),
        "per_row": _quantiles(row_degrees),
        "per_column": _quantiles(column_degrees),
    }


def _quantiles(values: NDArray[np.int64]) -> dict[str, float]:
    if not len(values):
        return {}
    levels = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    quantiles = {name: float(np.quantile(values, level)) for name, level in levels.items()}
    return {**quantiles, "mean": float(values.mean())}
