"""Stage `publish-index`: label embeddings -> index -> measured -> registered."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ramen import config
from ramen.artifacts import Artifact, Draft
from ramen.data.dataset import Texts
from ramen.errors import ConfigError, RamenError, nearest
from ramen.files import read_json, write_text
from ramen.index.build import ann_recall, build_index, tune
from ramen.index.retriever import INDEX_FILE, LABELS_FILE, Retriever, write_retriever
from ramen.index.statistics import evenly, folder_bytes, latencies, retriever_facts, version_tags
from ramen.publishing.holdout_comparison import Ask, compare_on_holdout
from ramen.publishing.publish import CONTENTS_TAG, contents, publish, publish_again
from ramen.retrieval import search
from ramen.tracking import UNTRACKED, Tracker

RECALL_SAMPLE = 10_000
SMOKE_SAMPLE = 3
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
        RamenError: registration is asked for but tracking is off, or it failed; the alias is where it was.
    """
    if index.model and track.run_id is None:
        raise RamenError(UNTRACKED)
    evaluated = _evaluated(evaluation, index) if index.model else {}
    from ramen.encoder.label_vectors import LABEL_FILES, encode_labels, fused_labels
    from ramen.encoder.loading import load_trained

    labels = Texts.read(dataset.path / "texts" / "labels.parquet")
    queries = evenly(Texts.read(dataset.path / "texts" / "test.parquet").texts or labels.texts, RECALL_SAMPLE)
    sentences = load_trained(model.path, encoder)
    labels_LD = fused_labels(model.path, encode_labels(sentences, model.path, labels.texts))
    built = build_index(labels_LD, index)
    recall_k = min(index.recall_k, len(labels))
    queries_nD = sentences.encode(queries)
    exact_nk, _ = search(queries_nD, labels_LD, recall_k)
    if not index.nprobe:
        tune(built, queries_nD, exact_nk, recall_k, index.min_recall)
    recall = ann_recall(built, queries_nD, exact_nk, recall_k)

    identity = dataset.counts.get("filtered_pairs", {}).get("identity", "")
    facts = retriever_facts(built, index, labels_LD) | {"identity": identity}
    files = {name: file for name, file in model.manifest["files"].items() if name not in LABEL_FILES}
    write_retriever(retriever.path, built, labels.uids, labels.texts, encoder_files=files, facts=facts)
    speed = latencies(Retriever(sentences, built, labels.uids, labels.texts), labels_LD, queries)
    track.log(speed)
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
        size = folder_bytes(model.path, files) + folder_bytes(retriever.path, (INDEX_FILE, LABELS_FILE))
        tags = version_tags(facts, recall=recall, speed=speed, size=size)
        made_of = evaluated | {"dataset": dataset.digest, "model": model.digest}
        tags |= made_of | {CONTENTS_TAG: contents(made_of | {"index": facts})}
        ask = compare_on_holdout(dataset.path, evaluation.path)
        receipt["registered"], registered = _register(retriever, model, index, track, tags, queries, ask)
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
    ask: Ask,
) -> tuple[dict[str, Any], dict[str, float]]:
    """The receipt's entry and the metrics of a registration."""
    assert track.run_id is not None
    sample = evenly(queries, SMOKE_SAMPLE)
    published = publish_again(tags[CONTENTS_TAG], settings=index, sample=sample, ask=ask) or publish(
        retriever.path, model.path, run_id=track.run_id, settings=index, tags=tags, sample=sample, ask=ask
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


def _evaluated(evaluation: Artifact, index: config.IndexConfig) -> dict[str, str]:
    """The evaluation as tags: the headline, head, torso and tail, and whatever the gate compares.

    Raises:
        ConfigError: the gate compares what was not measured.
    """
    measured = read_json(evaluation.path / "metrics.json", dict[str, float | None])
    for metric in index.gate:
        if metric not in measured:
            raise ConfigError(f"index.gate: {metric}: not in {evaluation.path}; {nearest(metric, measured)}")
    wanted = {key for key in measured if "/" not in key or key.split("/")[0] in TAGGED_SLICES} | set(index.gate)
    return {key: str(measured[key]) for key in sorted(wanted & set(measured)) if _is_number(measured[key])}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
