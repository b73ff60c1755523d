"""Rankings on disk: a Parquet table of the first labels of each test document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ramen.data.dataset import Dataset
from ramen.evaluation.metrics import DEPTH, Ints
from ramen.files import reading

PREDICTIONS, ENCODER_PREDICTIONS = "predictions.parquet", "encoder_predictions.parquet"
"""By a model's whole score; by the texts' vectors alone, written where a model ranks by more than those."""
SCHEMA = pa.schema(
    [("document", pa.string()), ("rank", pa.int32()), ("label", pa.string()), ("label_index", pa.int32()),
     ("score", pa.float32())]
)  # fmt: skip
"""Ranks start at 1; at most 100 rows a document, documents in test order."""


@dataclass(frozen=True)
class Ranking:
    """The first 100 labels of each test document after filtering.

    Attributes:
        indices: int64 [N', 100], padded with L.
        scores: float32 [N', 100], padded with -inf.
    """

    indices: Ints
    scores: NDArray[np.float32]


def write_predictions(path: Path, problem: Dataset, ranking: Ranking, chunk: int) -> None:
    """Write one row group per `chunk` documents, so that memory does not grow with their number."""
    documents, labels = pa.array(problem.test.uids, pa.string()), pa.array(problem.labels.uids, pa.string())
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for start in range(0, len(documents), chunk):
            indices = ranking.indices[start : start + chunk]
            row, place = np.nonzero(indices < len(labels))
            chosen = indices[row, place].astype(np.int32)
            columns = [
                documents.take(pa.array(row + start)),
                pa.array(place + 1, pa.int32()),
                labels.take(pa.array(chosen)),
                pa.array(chosen),
                pa.array(ranking.scores[start : start + chunk][row, place]),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))


def read_labels(path: Path, problem: Dataset) -> Ints:
    """Labels of each test document by rank, int64 [N', 100], padded with L: `Ranking.indices` as it was written.

    Raises:
        ArtifactError: the file is missing or damaged, or names documents, ranks or labels that are not there.
    """
    place = {uid: number for number, uid in enumerate(problem.test.uids)}
    num_labels = problem.shape[2]
    indices = np.full((len(place), DEPTH), num_labels, np.int64)
    with reading(path):
        table = pq.read_table(path, columns=["document", "rank", "label_index"], read_dictionary=["document"])
        chunks = table["document"].chunks  # a document's name stands once for its hundred rows
        numbers = [np.array([place[uid] for uid in chunk.dictionary.to_pylist()], np.int64) for chunk in chunks]
        found = [number[chunk.indices.to_numpy()] for number, chunk in zip(numbers, chunks, strict=True)]
        rows = np.concatenate(found) if found else np.zeros(0, np.int64)
        ranks, labels = table["rank"].to_numpy(), table["label_index"].to_numpy()
        if len(rows) and not (1 <= ranks.min() <= ranks.max() <= DEPTH and 0 <= labels.min() <= labels.max()):
            raise ValueError(f"expected ranks from 1 to {DEPTH}, and labels of at least 0")
        if len(rows) and labels.max() >= num_labels:
            raise ValueError(f"a label is not below {num_labels:,}")
        indices[rows, ranks - 1] = labels
    return indices
