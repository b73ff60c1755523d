"""Label vectors for retrieval: the vectors of the labels' texts and the parameters that a model learnt per label.

A model folder may hold label offsets (DEXA), a label context (a mean over graph neighbours) and a classifier per label
(NGAME's second stage). All are fused into one vector per label, so that retrieval remains one inner product: offsets
and context are added before normalisation, and a document's fused score,
`(1 - share) * encoder + share * classifier`, is linear in the document's vector.
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
"""Files with parameters per label. A published encoder omits them: its index holds the fused vectors."""

Vectors = NDArray[np.float32]


def write_offsets(folder: Path, table: Vectors, row_of: NDArray[np.int64]) -> None:
    """Write label offsets: `table` float32 [K, D], `row_of` int64 [L], the row of each label."""
    save_file({"table": table, "row_of": row_of}, folder / OFFSETS_FILE)


def write_classifier(folder: Path, weight: Vectors, share: float) -> None:
    """Write classifiers: `weight` float32 [L, D], unit norm; `share`: weight of the classifier in the fused score."""
    save_file({"weight": weight, "share": np.array([share], np.float32)}, folder / CLASSIFIER_FILE)


def write_context(folder: Path, vectors: Vectors) -> None:
    """Write the label context: float32 [L, D], added to the labels' vectors."""
    save_file({"vectors": vectors}, folder / CONTEXT_FILE)


def read_offsets(folder: Path) -> dict[str, NDArray[np.generic]] | None:
    """Read `table` and `row_of` of a model folder; None if it has no offsets."""
    path = folder / OFFSETS_FILE
    return read_tensors(path, ("table", "row_of")) if path.is_file() else None


def has_context_or_classifier(folder: Path) -> bool:
    """Return whether a model also ranks labels by a context or classifiers, not only by its encoder."""
    return (folder / CONTEXT_FILE).is_file() or (folder / CLASSIFIER_FILE).is_file()


def encode_labels(encoder: SentenceEncoder, folder: Path, texts: Sequence[str]) -> Vectors:
    """Encode labels from their texts and offsets, without context and classifiers: float32 [L, D], unit norm."""
    vectors = encoder.encode(texts)
    offsets = read_offsets(folder)
    if offsets is None:
        return vectors
    file, (labels, width) = folder / OFFSETS_FILE, vectors.shape
    rows = _check_array(file, "row_of", offsets["row_of"], (labels,), "iu")
    table = _check_array(file, "table", offsets["table"], (len(offsets["table"]), width))
    if labels and not (rows.min() >= 0 and rows.max() < len(table)):
        raise ArtifactError(f"{file}: row_of has values outside of its table of {len(table):,} rows; {RERUN}")
    return normalise(vectors + np.asarray(table, np.float32)[rows])


def _check_array(file: Path, name: str, array: Any, shape: tuple[int, ...], kinds: str = "f") -> Any:
    """Return `array`. Raises ArtifactError unless it has the given shape and kind and finite values."""
    if array.shape != shape or array.dtype.kind not in kinds or not np.isfinite(array).all():
        raise ArtifactError(
            f"{file}: {name} is {array.dtype} of shape {array.shape}, expected finite numbers of shape {shape}; {RERUN}"
        )
    return array


def fuse_label_vectors(folder: Path, vectors: Vectors) -> Vectors:
    """Add a model's context and classifiers to label vectors; the inner product with a document is its fused score.

    Args:
        folder: model folder.
        vectors: float32 [L, D] from `encode_labels`; returned unchanged if the model has neither.

    Returns:
        float32 [L, D], norms at most 1.
    """
    if (folder / CONTEXT_FILE).is_file():
        context = read_tensors(folder / CONTEXT_FILE, ("vectors",))["vectors"]
        vectors = add_context(vectors, _check_array(folder / CONTEXT_FILE, "vectors", context, vectors.shape))
    if not (file := folder / CLASSIFIER_FILE).is_file():
        return vectors
    arrays = read_tensors(file, ("share", "weight"))
    share = np.float32(_check_array(file, "share", arrays["share"], (1,))[0])
    weight = _check_array(file, "weight", arrays["weight"], vectors.shape)
    return np.asarray((1 - share) * vectors + share * weight, np.float32)


def add_context(vectors: Vectors, context: Vectors) -> Vectors:
    """Add the label context to label vectors: float32 [L, D], unit norm."""
    return normalise(vectors + context)


def normalise(vectors: Vectors) -> Vectors:
    """Scale each row to unit norm; a row of zeros stays as it is."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)
