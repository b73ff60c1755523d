"""Evaluate a model, an encoder, or the scores of any other method on a dataset's test documents."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.api.runs import Run
from ramen.config import ScoringConfig, parse_section
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import normalise
from ramen.errors import DataError, Defect, RamenError
from ramen.evaluation.metrics import DEPTH, apply_filter, rank_scores
from ramen.evaluation.predictions import Ranking
from ramen.evaluation.tables import measure_ranking
from ramen.index import retriever
from ramen.index.build import stored_vectors
from ramen.retrieval import RETRIEVED, search


def evaluate(model: Any, dataset: Dataset, **scoring: Any) -> dict[str, float]:
    """Return the metrics of a ranking of the test documents' labels, computed as stage `evaluate` computes them.

    Filtered pairs are removed from the ranking; on a zero-shot dataset only unseen labels compete.

    Args:
        model: one of
            - a `Run` or a `Retriever`;
            - an encoder: an object whose `encode(texts)` returns vectors, such as a SentenceTransformer. Documents and
              labels are compared by the cosine of their texts' vectors;
            - scores, CSR or float array [N', L]; of a sparse matrix the stored entries compete;
            - a ranking, int array [N', K] of label numbers, best first, padded with -1.
        dataset: whose test documents are ranked; rows and columns are `dataset.test` and `dataset.labels`.
        **scoring: knobs of section `scoring`, such as `propensity_a=0.6, propensity_b=2.6`.

    Returns:
        Percent by name: `p_at_1`, `n_at_5` (nDCG), `psp_at_5`, `r_at_100`, ..., and by slice as `tail/p_at_1`.

    Raises:
        RamenError: the scores do not fit the dataset.
    """
    settings = cast(ScoringConfig, parse_section("scoring", scoring))
    if not dataset.y_test.nnz:
        raise DataError(Defect("dataset", "expected a test document with a label, found none", "change the split"))
    indices = _ranked(model.model if isinstance(model, Run) else model, dataset)
    kept = apply_filter(indices, np.zeros(indices.shape, np.float32), dataset.filter_test, DEPTH)
    return measure_ranking(dataset, Ranking(*kept), settings).metrics


def _ranked(model: Any, dataset: Dataset) -> NDArray[np.int64]:
    """Return the competing labels of each test document, best first: int64 [N', K], padded with L."""
    if isinstance(model, retriever.Retriever):
        if list(model.uids) != dataset.labels.uids:
            raise RamenError("evaluate: the retriever's labels are not the dataset's; train or publish on this dataset")
        return _nearest(model.encoder.encode(dataset.test.texts), stored_vectors(model.index), dataset)
    if hasattr(model, "encode") and not isinstance(model, str):
        documents, labels = (
            normalise(np.asarray(model.encode(texts.texts), np.float32)) for texts in (dataset.test, dataset.labels)
        )
        return _nearest(documents, labels, dataset)
    if sp.issparse(model):
        return _by_scores(sp.csr_matrix(model), dataset)
    values = np.asarray(model)
    if values.ndim == 2 and values.dtype.kind in "iu":
        return _by_ranking(values.astype(np.int64), dataset)
    if values.ndim == 2 and values.dtype.kind == "f":
        return _by_scores(values, dataset)
    raise RamenError(
        f"evaluate: found {type(model).__name__}; expected a run, a retriever, an encoder, scores or a ranking "
        "(documents x labels)"
    )


def _nearest(documents: Any, labels: Any, dataset: Dataset) -> NDArray[np.int64]:
    return search(documents, labels, RETRIEVED, candidates=dataset.candidates)[0]


def _by_scores(scores: Any, dataset: Dataset) -> NDArray[np.int64]:
    expected = (len(dataset.test), len(dataset.labels))
    if scores.shape != expected:
        raise RamenError(f"evaluate: scores of shape {scores.shape}, expected test documents x labels {expected}")
    if dataset.candidates is not None:
        competes = np.zeros(expected[1], bool)
        competes[dataset.candidates] = True
        if sp.issparse(scores):
            kept = scores.tocoo()
            chosen = competes[kept.col]
            entries = (kept.data[chosen], (kept.row[chosen], kept.col[chosen]))
            scores = sp.csr_matrix(entries, shape=expected)
        else:
            scores = np.where(competes, scores, -np.inf)
    return rank_scores(scores, RETRIEVED)


def _by_ranking(indices: NDArray[np.int64], dataset: Dataset) -> NDArray[np.int64]:
    count = len(dataset.labels)
    if len(indices) != len(dataset.test):
        raise RamenError(f"evaluate: a ranking of {len(indices):,} documents; the dataset has {len(dataset.test):,}")
    if indices.size and indices.max() > count:
        raise RamenError(f"evaluate: label {indices.max():,}, but the dataset has {count:,} labels; number them from 0")
    indices = np.where(indices < 0, count, indices)
    ordered = np.sort(indices, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < count)
    if twice.any():
        row = int(twice.any(1).argmax())
        raise RamenError(f"evaluate: row {row} ranks label {ordered[row, 1:][twice[row]][0]} twice; rank a label once")
    if dataset.candidates is not None:
        indices = np.where(np.isin(indices, dataset.candidates), indices, count)
    return indices
