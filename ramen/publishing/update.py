"""Publish a new version of a retriever with labels added or removed, without training.

The encoder and the trained parts of the index (inverted lists, codes) stay. New labels are ranked by their text only:
label context and classifiers exist only for labels that the model was trained on.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramen.config import IndexConfig
from ramen.data.text_files import read_text_rows, text_lines
from ramen.errors import DataError, Defect, RamenError
from ramen.files import read_texts
from ramen.index.build import ann_recall, stored_vectors, update_index
from ramen.index.retriever import FACTS_FILE, INDEX_FILE, LABELS_FILE, Retriever, read_facts, write_retriever
from ramen.index.statistics import RECALL_DEPTH, measure_latency, sample_evenly, total_bytes, version_tags
from ramen.publishing.gate import ORIGIN_PREFIX, UPDATED_TAG, evaluation_tags
from ramen.publishing.publish import Published, publish
from ramen.publishing.registry import (
    connect,
    is_metric,
    load_version,
    resolve_version,
    translate_store_errors,
    version_folders,
)
from ramen.retrieval import search
from ramen.tracking import open_tracker, tracking_is_off

RECALL_SAMPLE = 2000
SMOKE_SAMPLE = 3


@dataclass(frozen=True)
class Changes:
    """Labels to add and to remove.

    Attributes:
        added: uid -> text; a known uid gets the new text.
        removed: uids.
    """

    added: Mapping[str, str]
    removed: frozenset[str]

    def digest(self) -> str:
        """Return the sha256 of the changes: 12 hex digits."""
        text = json.dumps([sorted(self.added.items()), sorted(self.removed)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_changes(add: Path | None, remove: Path | None) -> Changes:
    """Read labels to add (JSON lines, CSV, TSV or Parquet with `uid` and `text`) and to remove (one uid per line).

    Raises:
        DataError: a line is broken, or a uid is listed twice or in both files.
    """
    added: dict[str, str] = {}
    for line, uid, text in read_text_rows(add, "label") if add else ():
        assert uid is not None
        if uid in added:
            raise DataError(Defect(str(add), f"label {uid!r} is listed twice", "list every label once", line=line))
        added[uid] = text
    removed: set[str] = set()
    if remove:
        removed = {line.strip() for line in text_lines(remove) if line.strip()}
    for path, labels in ((add, added), (remove, removed)):
        if path and not labels:
            raise DataError(Defect(str(path), "expected labels, found none"))
    if both := sorted(removed & set(added)):
        raise DataError(Defect(str(remove), f"label {both[0]!r} is also in {add}", "list it in one of the two files"))
    return Changes(added, frozenset(removed))


def publish_update(version: str, changes: Changes, settings: IndexConfig) -> Published:
    """Publish a version with changed labels, in a separate MLflow run.

    Args:
        version: number or alias of the version to start from.
        changes: labels to add and to remove.
        settings: names and gate.

    Raises:
        RamenError: as in `build_update` and `publish`, or tracking is off; nothing is registered then.
    """
    if tracking_is_off():
        raise RamenError("index-update: registers a version in MLflow, but tracking is off; unset RAMEN_TRACKING")
    with build_update(settings.model, version, changes, settings) as built, open_tracker("index-update") as track:
        folder, encoder_dir, tags = built
        assert track.run_id is not None
        track.tags({key: tags[key] for key in (UPDATED_TAG, "labels.added", "labels.removed")})
        sample = _smoke_texts(folder)
        return publish(folder, encoder_dir, run_id=track.run_id, settings=settings, tags=tags, sample=sample)


@contextmanager
def build_update(
    name: str, version: str, changes: Changes, settings: IndexConfig
) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """Build the changed retriever in a temporary folder.

    Yields:
        The retriever's folder, the encoder's folder, and the tags for the new version.

    Raises:
        RamenError: there is no such version, it lacks a uid to remove, nothing would change, or no label would be left.
    """
    number = resolve_version(name, version)
    with translate_store_errors(f"reading {name} version {number}"):
        old_tags = connect().get_model_version(name, str(number)).tags
    old = load_version(name, str(number))
    with version_folders(name, number) as (encoder_dir, index_dir), tempfile.TemporaryDirectory() as scratch:
        old_facts = read_facts(index_dir)
        keep, new_uids, new_texts = _plan_rows(name, number, old, changes)
        no_vectors = np.zeros((0, old.index.d), np.float32)
        new_nD = old.encoder.encode(new_texts) if new_uids else no_vectors
        index = update_index(old.index, keep, new_nD)
        uids = [old.uids[i] for i in keep] + new_uids
        texts = [old.texts[i] for i in keep] + new_texts
        updated = Retriever(old.encoder, index, uids, texts, old.identity)
        folder = Path(scratch)
        facts = old_facts["index"] | {"labels": len(uids), "updated_from": f"{name}/{number}"}
        write_retriever(folder, index, uids, texts, encoder_files=old_facts["encoder"], facts=facts)
        sample = sample_evenly(texts, RECALL_SAMPLE)
        labels_LD = stored_vectors(index)
        queries_nD, k = updated.encoder.encode(sample), min(RECALL_DEPTH, len(uids))
        recall = ann_recall(index, queries_nD, search(queries_nD, labels_LD, k)[0], k)
        # this recall is relative to the stored vectors; the old version's tag includes what compression lost
        recall = min(recall, float(old_tags["ann_recall"])) if "ann_recall" in old_tags else recall
        size = total_bytes(encoder_dir, old_facts["encoder"]) + total_bytes(folder, (INDEX_FILE, LABELS_FILE))
        tags = version_tags(facts, recall=recall, latency=measure_latency(updated, labels_LD, sample), size=size)
        # metrics of the old labels do not describe the new version; the gate reads them under the prefix ORIGIN
        origin = evaluation_tags(old_tags)
        tags |= {f"{ORIGIN_PREFIX}{key}": value for key, value in origin.items() if key == "dataset" or is_metric(key)}
        tags |= {"dataset": f"{old_tags.get('dataset', '')}+{changes.digest()}", "model": old_tags.get("model", "")}
        tags |= {UPDATED_TAG: str(number), "labels.added": str(len(changes.added)),
                 "labels.removed": str(len(changes.removed))}  # fmt: skip
        yield folder, encoder_dir, tags


def _plan_rows(
    name: str, number: int, old: Retriever, changes: Changes
) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Return the rows that stay, and the uids and texts that are appended after them."""
    row_of = {uid: row for row, uid in enumerate(old.uids)}
    if missing := sorted(changes.removed - set(row_of)):
        raise RamenError(f"{name} version {number}: has no label {missing[0]!r} to remove; delete it from the list")
    new = {uid: text for uid, text in changes.added.items() if uid not in row_of or old.texts[row_of[uid]] != text}
    dropped = {row_of[uid] for uid in changes.removed} | {row_of[uid] for uid in new if uid in row_of}
    if not new and not dropped:
        raise RamenError(f"{name} version {number}: already has exactly these labels; there is nothing to publish")
    keep = np.array([row for row in range(len(old)) if row not in dropped], np.int64)
    if not len(keep) and not new:
        raise RamenError(f"{name} version {number}: the update would remove every label; keep or add at least one")
    return keep, list(new), list(new.values())


def _smoke_texts(folder: Path) -> Sequence[str]:
    """Return some label texts of a retriever's folder, as smoke queries for the new version."""
    assert (folder / FACTS_FILE).is_file()
    texts = read_texts(folder / LABELS_FILE)[1]
    return [text for text in texts if text.strip()][:SMOKE_SAMPLE]
