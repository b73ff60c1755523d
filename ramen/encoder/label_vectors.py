"""Vectors by which labels are ranked: their texts' vectors, with what a model learnt per label beside the text.

A model folder may hold label offsets (DEXA), a context of graph neighbours, and a classifier per label (NGAME's second
stage). All end up in one vector per label, so that retrieval stays one inner product: offsets and context are added
before the norm is taken, and a document's fused score, `(1 - share) * encoder + share * classifier`, is linear in the
document's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ramen.encoder.model import SentenceEncoder
from ramen.errors import ArtifactError
from ramen.files import RERUN, read_tensors

OFFSETS_FILE = "label_offsets.safetensors"
CONTEXT_FILE = "label_context.safetensors"
CLASSIFIER_FILE = "classifier.safetensors"
LABEL_FILES = (OFFSETS_FILE, CONTEXT_FILE, CLASSIFIER_FILE)
"""Files about labels: an index holds what they say, so a published encoder goes without them."""

Vectors = NDArray[np.float32]


def write_offsets(folder: Path, table: Vectors, row_of: NDArray[np.int64]) -> None:
    """Write label offsets: `table` float32 [K, D], `row_of` int64 [L]."""
    save_file({"table": table, "row_of": row_of}, folder / OFFSETS_FILE)


def write_classifier(folder: Path, weight: Vectors, share: float) -> None:
    """Write classifiers: `weight` float32 [L, D], unit norm; `share` of the classifier in the fused score."""
    save_file({"weight": weight, "share": np.array([share], np.float32)}, folder / CLASSIFIER_FILE)


def write_context(folder: Path, vectors: Vectors) -> None:
    """Write what graph neighbours add to the labels' vectors: float32 [L, D]."""
    save_file({"vectors": vectors}, folder / CONTEXT_FILE)


def read_offsets(folder: Path) -> dict[str, NDArray[np.generic]] | None:
    """`table` and `row_of` of a model folder, None if it has no offsets."""
    path = folder / OFFSETS_FILE
    return read_tensors(path, ("table", "row_of")) if path.is_file() else None


def has_more(folder: Path) -> bool:
    """Whether a model ranks labels by more than the encoder: by context or classifiers."""
    return (folder / CONTEXT_FILE).is_file() or (folder / CLASSIFIER_FILE).is_file()


def encode_labels(encoder: SentenceEncoder, folder: Path, texts: Sequence[str]) -> Vectors:
    """Vectors of labels by their texts alone, offsets included: float32 [L, D], unit norm."""
    vectors = encoder.encode(texts)
    offsets = read_offsets(folder)
    if offsets is None:
        return vectors
    file, (labels, width) = folder / OFFSETS_FILE, vectors.shape
    rows = _of_shape(file, "row_of", offsets["row_of"], (labels,), "iu")
    table = _of_shape(file, "table", offsets["table"], (len(offsets["table"]), width))
    if labels and not (rows.min() >= 0 and rows.max() < len(table)):
        raise ArtifactError(f"{file}: row_of names rows outside of its table of {len(table):,}; {RERUN}")
    return _normalised(vectors + np.asarray(table, np.float32)[rows])


def _of_shape(file: Path, name: str, array: Any, shape: tuple[int, ...], kinds: str = "f") -> Any:
    """An array of a model's file. Raises ArtifactError for another shape, or values that are no finite numbers."""
    if array.shape != shape or array.dtype.kind not in kinds or not np.isfinite(array).all():
        raise ArtifactError(
            f"{file}: {name} is {array.dtype} of shape {array.shape}, expected finite numbers of shape {shape}; {RERUN}"
        )
    return array


def fused_labels(folder: Path, vectors: Vectors) -> Vectors:
    """Vectors whose inner product with a document is the model's whole score; `vectors` themselves without more.

    Args:
        folder: the model.
        vectors: float32 [L, D] from `encode_labels`.

    Returns:
        float32 [L, D], of norm at most 1.
    """
    if (folder / CONTEXT_FILE).is_file():
        context = read_tensors(folder / CONTEXT_FILE, ("vectors",))["vectors"]
        vectors = with_context(vectors, _of_shape(folder / CONTEXT_FILE, "vectors", context, vectors.shape))
    if not (file := folder / CLASSIFIER_FILE).is_file():
        return vectors
    found = read_tensors(file, ("share", "weight"))
    share = np.float32(_of_shape(file, "share", found["share"], (1,))[0])
    weight = _of_shape(file, "weight", found["weight"], vectors.shape)
    return np.asarray((1 - share) * vectors + share * weight, np.float32)


def with_context(vectors: Vectors, context: Vectors) -> Vectors:
    """Labels' vectors and their context together: float32 [L, D], unit norm."""
    return _normalised(vectors + context)


def _normalised(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)
