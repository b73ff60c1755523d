"""Add and remove labels of a published retriever, as a new version; the encoder stays as it is.

What was trained into the index (graph parameters, inverted lists, codes) is kept. New labels are ranked by their text
alone; context and classifiers exist only for labels that were there when the model was trained.
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
from ramen.index.build import ann_recall, changed, held_vectors
from ramen.index.retriever import FACTS_FILE, INDEX_FILE, LABELS_FILE, Retriever, read_facts, write_retriever
from ramen.index.statistics import evenly, folder_bytes, latencies, version_tags
from ramen.publishing.gate import ORIGIN, UPDATED_TAG, evaluated
from ramen.publishing.publish import Published, publish
from ramen.publishing.registry import connect, is_metric, load_version, plain_errors, resolve_version, version_folders
from ramen.retrieval import search
from ramen.tracking import open_tracker, tracking_is_off

RECALL_SAMPLE = 2000
SMOKE_SAMPLE = 3


@dataclass(frozen=True)
class Changes:
    """Labels to add (or to give another text) and to remove.

    Attributes:
        added: uid -> text.
        removed: uids.
    """

    added: Mapping[str, str]
    removed: frozenset[str]

    def digest(self) -> str:
        """sha256 (12 hex digits) of the changes."""
        text = json.dumps([sorted(self.added.items()), sorted(self.removed)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_changes(add: Path | None, remove: Path | None) -> Changes:
    """Read labels to add (JSON lines, CSV, TSV or Parquet with `uid` and `text`) and to remove (a uid per line).

    Raises:
        DataError: a line is broken, a uid comes twice, or is both added and removed.
    """
    added: dict[str, str] = {}
    for where, uid, text in read_text_rows(add, "label") if add else ():
        assert uid is not None
        if uid in added:
            raise DataError(Defect(str(add), f"label {uid!r} comes twice", "give every label once", line=where))
        added[uid] = text
    removed: set[str] = set()
    if remove:
        removed = {line.strip() for line in text_lines(remove) if line.strip()}
    for path, given in ((add, added), (remove, removed)):
        if path and not given:
            raise DataError(Defect(str(path), "expected labels, found none"))
    if both := sorted(removed & set(added)):
        raise DataError(Defect(str(remove), f"label {both[0]!r} is also in {add}", "a label is added or removed"))
    return Changes(added, frozenset(removed))


def publish_update(version: str, changes: Changes, settings: IndexConfig) -> Published:
    """Publish a version with other labels, under an MLflow run of its own.

    Args:
        version: number or alias of the version to start from.
        changes: labels to add and to remove.
        settings: names and gate.

    Raises:
        RamenError: as `updated` and `publish`, or tracking is off; nothing is registered then.
    """
    if tracking_is_off():
        raise RamenError("an updated index is registered in MLflow, but tracking is off: unset RAMEN_TRACKING")
    with updated(settings.model, version, changes, settings) as made, open_tracker("index-update") as track:
        folder, encoder_dir, tags = made
        assert track.run_id is not None
        track.tags({key: tags[key] for key in (UPDATED_TAG, "labels.added", "labels.removed")})
        return publish(folder, encoder_dir, run_id=track.run_id, settings=settings, tags=tags, sample=sample_of(folder))


@contextmanager
def updated(
    name: str, version: str, changes: Changes, settings: IndexConfig
) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """Make the changed retriever in a temporary folder.

    Yields:
        its folder, the encoder's folder, and the tags of the version to come.

    Raises:
        RamenError: no such version, a uid to remove is not in it, nothing would change, or no label would be left.
    """
    number = resolve_version(name, version)
    with plain_errors(f"reading {name} version {number}"):
        before = connect().get_model_version(name, str(number)).tags
    old = load_version(name, str(number))
    with version_folders(name, number) as (encoder_dir, index_dir), tempfile.TemporaryDirectory() as scratch:
        facts = read_facts(index_dir)
        keep, new = _plan(name, number, old, changes)
        vectors = old.encoder.encode(new[1]) if new[0] else np.zeros((0, facts["index"]["dimension"]), np.float32)
        index = changed(old.index, keep, vectors)
        uids = [old.uids[i] for i in keep] + new[0]
        texts = [old.texts[i] for i in keep] + new[1]
        now = Retriever(old.encoder, index, uids, texts, old.identity)
        folder = Path(scratch)
        said = facts["index"] | {"labels": len(uids), "updated_from": f"{name}/{number}"}
        write_retriever(folder, index, uids, texts, encoder_files=facts["encoder"], facts=said)
        sample = evenly(texts, RECALL_SAMPLE)
        rows = held_vectors(index)
        queries_nD, k = now.encoder.encode(sample), min(settings.recall_k, len(uids))
        recall = ann_recall(index, queries_nD, search(queries_nD, rows, k)[0], k)
        # what a compressed index holds finds itself; what its codes lost, the version that it came from was asked
        recall = min(recall, float(before["ann_recall"])) if "ann_recall" in before else recall
        size = folder_bytes(encoder_dir, facts["encoder"]) + folder_bytes(folder, (INDEX_FILE, LABELS_FILE))
        tags = version_tags(said, recall=recall, speed=latencies(now, rows, sample), size=size)
        # other labels make other figures: what was measured on the old ones is the origin's, for the gate alone
        origin = evaluated(before)
        tags |= {f"{ORIGIN}{key}": value for key, value in origin.items() if key == "dataset" or is_metric(key)}
        tags |= {"dataset": f"{before.get('dataset', '')}+{changes.digest()}", "model": before.get("model", "")}
        tags |= {UPDATED_TAG: str(number), "labels.added": str(len(changes.added)),
                 "labels.removed": str(len(changes.removed))}  # fmt: skip
        yield folder, encoder_dir, tags


def _plan(
    name: str, number: int, old: Retriever, changes: Changes
) -> tuple[NDArray[np.int64], tuple[list[str], list[str]]]:
    """Rows that stay, and the uids and texts that come after them."""
    row_of = {uid: row for row, uid in enumerate(old.uids)}
    if missing := sorted(changes.removed - set(row_of)):
        raise RamenError(f"{name} version {number} has no label {missing[0]!r} to remove; take it off the list")
    new = {uid: text for uid, text in changes.added.items() if uid not in row_of or old.texts[row_of[uid]] != text}
    gone = {row_of[uid] for uid in changes.removed} | {row_of[uid] for uid in new if uid in row_of}
    if not new and not gone:
        raise RamenError(f"{name} version {number} already has exactly these labels; nothing to publish")
    keep = np.array([row for row in range(len(old)) if row not in gone], np.int64)
    if not len(keep) and not new:
        raise RamenError(f"this would remove every label of {name} version {number}")
    return keep, (list(new), list(new.values()))


def sample_of(folder: Path) -> Sequence[str]:
    """Some label texts of a retriever's folder, to ask the new version with."""
    assert (folder / FACTS_FILE).is_file()
    texts = read_texts(folder / LABELS_FILE)[1]
    return [text for text in texts if text.strip()][:SMOKE_SAMPLE]
