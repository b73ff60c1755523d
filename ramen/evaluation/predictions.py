"""Rankings of test documents as Parquet files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import DEPTH, Ints
from ramen.files import wrap_read_errors

PREDICTIONS, ENCODER_PREDICTIONS = "predictions.parquet", "encoder_predictions.parquet"
"""Rankings by the full model; by the encoder only, written if the model has label context or classifiers."""
SCHEMA = pa.schema(
    [("document", pa.string()), ("rank", pa.int32()), ("label", pa.string()), ("label_index", pa.int32()),
     ("score", pa.float32())]
)  # fmt: skip
"""Ranks start at 1; at most 100 rows per document, documents in test order."""
ROW_GROUP = 4096
"""Documents per row group of the file."""


@dataclass(frozen=True)
class Ranking:
    """The top 100 labels of each test document after filtering.

    Attributes:
        indices: int64 [N', 100], padded with L.
        scores: float32 [N', 100], padded with -inf.
    """

    indices: Ints
    scores: NDArray[np.float32]


def write_predictions(path: Path, dataset: Dataset, ranking: Ranking) -> None:
    """Write one row group per `ROW_GROUP` documents, so that memory does not grow with the number of documents."""
    documents, labels = pa.array(dataset.test.uids, pa.string()), pa.array(dataset.labels.uids, pa.string())
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for start in range(0, len(documents), ROW_GROUP):
            indices = ranking.indices[start : start + ROW_GROUP]
            row, rank = np.nonzero(indices < len(labels))
            label = indices[row, rank].astype(np.int32)
            columns = [
                documents.take(pa.array(row + start)),
                pa.array(rank + 1, pa.int32()),
                labels.take(pa.array(label)),
                pa.array(label),
                pa.array(ranking.scores[start : start + ROW_GROUP][row, rank]),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))


def read_ranked_labels(path: Path, dataset: Dataset) -> Ints:
    """Read `Ranking.indices` from a file of predictions: int64 [N', 100], padded with L.

    Raises:
        ArtifactError: the file is missing or damaged, or contains unknown documents, ranks or labels.
    """
    row_of = {uid: row for row, uid in enumerate(dataset.test.uids)}
    num_labels = dataset.shape[2]
    indices = np.full((len(row_of), DEPTH), num_labels, np.int64)
    with wrap_read_errors(path):
        table = pq.read_table(path, columns=["document", "rank", "label_index"], read_dictionary=["document"])
        parts = []
        for chunk in table["document"].chunks:  # dictionary-encoded: each uid is looked up once, not once per rank
            rows_by_code = np.array([row_of[uid] for uid in chunk.dictionary.to_pylist()], np.int64)
            parts.append(rows_by_code[chunk.indices.to_numpy()])
        rows = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        ranks, labels = table["rank"].to_numpy(), table["label_index"].to_numpy()
        if len(rows) and not (1 <= ranks.min() <= ranks.max() <= DEPTH and 0 <= labels.min() <= labels.max()):
            raise ValueError(f"expected ranks from 1 to {DEPTH} and labels of at least 0")
        if len(rows) and labels.max() >= num_labels:
            raise ValueError(f"expected labels below {num_labels:,}, found {labels.max():,}")
        indices[rows, ranks - 1] = labels
    return indices
