"""Stage `publish-index`: encode labels, build and measure the index, register it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ramen import config
from ramen.artifacts import Artifact, Draft
from ramen.data.dataset import Texts
from ramen.errors import ConfigError, RamenError, suggest_name
from ramen.files import read_json, write_text
from ramen.index.build import ann_recall, build_index, tune_nprobe
from ramen.index.retriever import INDEX_FILE, LABELS_FILE, Retriever, write_retriever
from ramen.index.statistics import RECALL_DEPTH, index_facts, measure_latency, sample_evenly, total_bytes, version_tags
from ramen.publishing.holdout_comparison import CompareWithChampion, compare_on_holdout
from ramen.publishing.publish import CONTENTS_TAG, contents_digest, publish, try_promote_existing
from ramen.retrieval import search
from ramen.tracking import REGISTRATION_NEEDS_TRACKING, Tracker

RECALL_SAMPLE = 10_000
"""Queries on which the recall of the index is measured."""
SMOKE_SAMPLE = 3
"""Queries that a new version must answer before promotion."""
TAGGED_SLICES = ("head", "torso", "tail")


def publish_index(
    *,
    dataset: Artifact,
    model: Artifact,
    evaluation: Artifact,
    retriever: Draft,
    encoder: config.EncoderConfig,
    index: config.IndexConfig,
    track: Tracker,
) -> dict[str, float]:
    """Index the labels, measure recall against exact retrieval, register the retriever, move the alias.

    Writes `index.faiss`, `labels.parquet` (uid, text), `retriever.json` (their checksums and the encoder's), and
    `receipt.json` (what was registered).

    Raises:
        RamenError: registration is requested but tracking is off, or it failed; the alias has not moved.
    """
    if index.model and track.run_id is None:
        raise RamenError(REGISTRATION_NEEDS_TRACKING)
    evaluation_tags = _evaluation_tags(evaluation, index) if index.model else {}
    from ramen.encoder.label_vectors import LABEL_FILES, encode_labels, fuse_label_vectors
    from ramen.encoder.loading import load_trained

    labels = Texts.read(dataset.path / "texts" / "labels.parquet")
    test_texts = Texts.read(dataset.path / "texts" / "test.parquet").texts
    queries = sample_evenly(test_texts or labels.texts, RECALL_SAMPLE)
    trained = load_trained(model.path, encoder)
    labels_LD = fuse_label_vectors(model.path, encode_labels(trained, model.path, labels.texts))
    built = build_index(labels_LD, index)
    recall_k = min(RECALL_DEPTH, len(labels))
    queries_nD = trained.encode(queries)
    exact_nk, _ = search(queries_nD, labels_LD, recall_k)
    if not index.nprobe:
        tune_nprobe(built, queries_nD, exact_nk, recall_k, index.min_recall)
    recall = ann_recall(built, queries_nD, exact_nk, recall_k)

    identity = dataset.counts.get("filtered_pairs", {}).get("identity", "")
    facts = index_facts(built, index, labels_LD) | {"identity": identity}
    encoder_files = {name: file for name, file in model.manifest["files"].items() if name not in LABEL_FILES}
    write_retriever(retriever.path, built, labels.uids, labels.texts, encoder_files=encoder_files, facts=facts)
    latency = measure_latency(Retriever(trained, built, labels.uids, labels.texts), labels_LD, queries)
    track.log(latency)
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
        size = total_bytes(model.path, encoder_files) + total_bytes(retriever.path, (INDEX_FILE, LABELS_FILE))
        tags = version_tags(facts, recall=recall, latency=latency, size=size)
        inputs = evaluation_tags | {"dataset": dataset.digest, "model": model.digest}
        tags |= inputs | {CONTENTS_TAG: contents_digest(inputs | {"index": facts})}
        compare = partial(compare_on_holdout, dataset=dataset.path, evaluation=evaluation.path)
        receipt["registered"], registered = _register(retriever, model, index, track, tags, queries, compare)
        metrics |= registered
    write_text(retriever.path / "receipt.json", json.dumps(receipt, indent=1, sort_keys=True) + "\n")
    retriever.counts.update(labels=len(labels), dimension=facts["dimension"], kind=facts["kind"])
    return metrics


def _register(
    retriever: Draft,
    model: Artifact,
    index: config.IndexConfig,
    track: Tracker,
    tags: dict[str, str],
    queries: Sequence[str],
    compare: CompareWithChampion,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Register the retriever, or reuse an unchanged version; return the receipt's entry and the metrics."""
    assert track.run_id is not None
    sample = sample_evenly(queries, SMOKE_SAMPLE)
    published = try_promote_existing(
        tags[CONTENTS_TAG], settings=index, sample=sample, compare_with_champion=compare
    ) or publish(
        retriever.path,
        model.path,
        run_id=track.run_id,
        settings=index,
        tags=tags,
        sample=sample,
        compare_with_champion=compare,
    )
    version = f"{published.name}/{published.version}"
    track.tags({"ramen.model_version": version, "ramen.gate": published.refused or "passed"})
    entry = {
        "name": published.name,
        "version": published.version,
        "alias": published.alias,
        "refused": published.refused or None,
        "note": published.note or None,
    }
    return entry, {"version": float(published.version), "promoted": float(published.alias is not None)}


def _evaluation_tags(evaluation: Artifact, index: config.IndexConfig) -> dict[str, str]:
    """Return the metrics to tag: overall, head, torso, tail, and those that `index.gate` compares.

    Raises:
        ConfigError: `index.gate` names a metric that the evaluation lacks.
    """
    metrics = read_json(evaluation.path / "metrics.json", dict[str, float | None])
    for metric in index.gate:
        if metric not in metrics:
            raise ConfigError(f"index.gate: {metric}: not in {evaluation.path}; {suggest_name(metric, metrics)}")
    tagged = {key for key in metrics if "/" not in key or key.split("/")[0] in TAGGED_SLICES} | set(index.gate)
    return {key: str(metrics[key]) for key in sorted(tagged & set(metrics)) if _is_finite_number(metrics[key])}


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
