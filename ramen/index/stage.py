"""Stage `publish-index`: label embeddings -> index -> measured -> registered."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ramen
from ramen import config
from ramen.artifacts import Artifact, Draft, write_text
from ramen.data.dataset import Texts
from ramen.errors import RamenError
from ramen.index.build import ann_recall, build_index, exact_ids
from ramen.index.retriever import INDEX_FILE, Retriever, write_retriever
from ramen.tracking import Tracker

RECALL_SAMPLE = 10_000
LATENCY_SAMPLE = 100
SMOKE_SAMPLE = 3


def publish_index(
    *,
    dataset: Artifact,
    model: Artifact,
    evaluation: Artifact,
    retriever: Draft,
    encoder: config.Encoder,
    index: config.Index,
    track: Tracker,
) -> dict[str, float]:
    """Index the labels, measure recall against exact retrieval, register the retriever, move the alias.

    Writes `index.faiss`, `labels.parquet` (uid, text), `retriever.json` (their checksums and the encoder's), and
    `receipt.json` (what was registered).

    Raises:
        RamenError: registration is asked for but tracking is off, or it failed; the alias is where it was.
    """
    if index.model and track.run_id is None:
        raise RamenError(
            "publish-index registers in MLflow, but tracking is off: unset RAMEN_TRACKING, or set index.model to "
            "'' to write the retriever without registering it"
        )
    from ramen.encoder.labels import LABEL_FILES, encode_labels, fused_labels
    from ramen.encoder.loading import load_encoder

    labels = Texts.read(dataset.path / "texts" / "labels.parquet")
    queries = _sample(Texts.read(dataset.path / "texts" / "test.parquet").texts or labels.texts, RECALL_SAMPLE)
    sentences = load_encoder(model.path, encoder.model_copy(update={"name": str(model.path)}))
    labels_LD = fused_labels(model.path, encode_labels(sentences, model.path, labels.texts))
    built = build_index(labels_LD, index)
    recall_k = min(index.recall_k, len(labels))
    recall = _recall(built, labels_LD, sentences.encode(queries), recall_k)

    facts = _facts(index, labels_LD)
    files = {name: file for name, file in model.manifest["files"].items() if name not in LABEL_FILES}
    write_retriever(retriever.path, built, labels.uids, labels.texts, encoder_files=files, facts=facts)
    track.log({"query_ms": _query_ms(Retriever(sentences, built, labels.uids, labels.texts), queries)})
    receipt: dict[str, Any] = {
        **facts,
        f"ann_recall_at_{recall_k}": recall,
        "model": model.digest,
        "dataset": dataset.digest,
        "registered": None,
    }
    metrics = {
        f"ann_recall_at_{recall_k}": recall,
        "index_bytes": float((retriever.path / INDEX_FILE).stat().st_size),
    }
    if index.model:
        tags = _tags(index, receipt, recall, evaluation)
        receipt["registered"], registered = _register(retriever, model, index, track, tags, queries)
        metrics |= registered
    write_text(retriever.path / "receipt.json", json.dumps(receipt, indent=1, sort_keys=True) + "\n")
    retriever.counts.update(labels=len(labels), dimension=facts["dimension"], kind=index.kind)
    return metrics


def _register(
    retriever: Draft, model: Artifact, index: config.Index, track: Tracker, tags: dict[str, str], queries: Sequence[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The receipt's entry and the metrics of a registration."""
    from ramen.index.publishing import publish

    assert track.run_id is not None
    published = publish(
        retriever.path,
        model.path,
        run_id=track.run_id,
        settings=index,
        tags=tags,
        sample=_sample(queries, SMOKE_SAMPLE),
    )
    version = f"{published.name}/{published.version}"
    track.tags({"ramen.model_version": version, "ramen.gate": published.refused or "passed"})
    entry = {
        "name": published.name,
        "version": published.version,
        "alias": published.alias,
        "refused": published.refused or None,
    }
    return entry, {"version": float(published.version), "promoted": float(published.alias is not None)}


def _facts(index: config.Index, labels_LD: NDArray[np.float32]) -> dict[str, Any]:
    """Content facts of an index: what it is and how it was built."""
    facts: dict[str, Any] = {
        "kind": index.kind,
        "metric": "inner_product",
        "unit_norm": bool(np.allclose(np.linalg.norm(labels_LD, axis=1), 1.0, atol=1e-3)),
        "labels": int(labels_LD.shape[0]),
        "dimension": int(labels_LD.shape[1]),
    }
    if index.kind == "hnsw":
        facts |= {"m": index.hnsw_m, "ef_construction": index.ef_construction, "ef_search": index.ef_search}
    return facts


def _tags(index: config.Index, receipt: dict[str, Any], recall: float, evaluation: Artifact) -> dict[str, str]:
    """Tags of the registered version; headline metrics only, slices stay in the evaluation."""
    measured = json.loads((evaluation.path / "metrics.json").read_text(encoding="utf-8"))
    headline = {key: str(value) for key, value in measured.items() if "/" not in key and _is_number(value)}
    return headline | {
        "ann_recall": str(recall),
        "dataset": receipt["dataset"],
        "index": index.kind,
        "model": receipt["model"],
        "ramen.version": ramen.__version__,
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _recall(built: Any, labels_LD: NDArray[np.float32], queries_nD: NDArray[np.float32], k: int) -> float:
    return ann_recall(built, queries_nD, exact_ids(labels_LD, queries_nD, k), k)


def _query_ms(retriever: Retriever, queries: Sequence[str]) -> float:
    """Mean wall-clock milliseconds of one query, asked one at a time: encoding and search."""
    asked = _sample(queries, LATENCY_SAMPLE)
    retriever.query(asked[:1])
    start = time.perf_counter()
    for text in asked:
        retriever.query([text])
    return (time.perf_counter() - start) / len(asked) * 1000


def _sample(texts: Sequence[str], size: int) -> list[str]:
    """At most `size` texts, evenly spaced."""
    if len(texts) <= size:
        return list(texts)
    return [texts[i] for i in np.linspace(0, len(texts) - 1, size).astype(int)]
