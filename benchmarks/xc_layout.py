"""Writes documents, labels and links as the folder that the source `xc` reads (the Extreme Classification Repository's
layout with the graph files of OAK and MOGIC)."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Links = Mapping[str, Sequence[str]]
"""Identifier -> identifiers."""


def split(able: Iterable[str], count: int, seed: int) -> dict[str, list[str]]:
    """A sample of documents, a fifth of them for test: `train` and `test`, sorted."""
    rng = random.Random(seed)
    all_of_them = sorted(able)
    chosen = sorted(rng.sample(all_of_them, min(count, len(all_of_them))))
    tested = set(rng.sample(chosen, len(chosen) // 5))
    return {"train": [each for each in chosen if each not in tested], "test": sorted(tested)}


def write_folder(
    out: Path,
    documents: Mapping[str, Sequence[str]],
    labels_of: Links,
    texts: Mapping[str, str],
    anchors_of: Mapping[str, Links],
) -> None:
    """Write texts, pairs, filters (a document that is a label) and every anchor set, and print the counts.

    The folder appears when it is whole; one that is there already, or a set without documents, ends the script.

    Args:
        out: the folder, which must not be there.
        documents: `train` and `test` identifiers.
        labels_of: document -> labels.
        texts: identifier -> text; an anchor without one is its own text.
        anchors_of: set -> document or label -> anchors.
    """
    if out.exists():
        raise SystemExit(f"error: {out} is there already; remove it or name another")
    if not documents["test"]:
        raise SystemExit(
            "error: fewer than five documents with labels found; is the folder that is read the right one?"
        )
    labels = sorted({label for part in documents.values() for each in part for label in labels_of[each]})
    rows = {"trn": documents["train"], "tst": documents["test"], "lbl": labels}
    draft = out.with_name(f".{out.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "raw_data").mkdir(parents=True)
    place = {label: i for i, label in enumerate(labels)}
    for name, each in {**documents, "label": labels}.items():
        _write_texts(draft / "raw_data" / f"{name}.raw.txt", each, texts)
    for name, short in (("train", "trn"), ("test", "tst")):
        _write_matrix(draft / f"{short}_X_Y.txt", [labels_of[each] for each in documents[name]], place)
        own = [f"{i} {place[each]}\n" for i, each in enumerate(documents[name]) if each in place]
        (draft / f"filter_labels_{name}.txt").write_text("".join(own), encoding="utf-8")
    for name, linked in anchors_of.items():
        edges = {short: [sorted(set(linked.get(each, ())) - {each}) for each in part] for short, part in rows.items()}
        anchors = sorted({anchor for part in edges.values() for row in part for anchor in row})
        _write_texts(draft / "raw_data" / f"{name}.raw.txt", anchors, texts)
        for short, part in edges.items():
            _write_matrix(draft / f"{name}_{short}_X_Y.txt", part, {anchor: i for i, anchor in enumerate(anchors)})
    draft.rename(out)
    frequency = Counter(label for each in documents["train"] for label in labels_of[each])
    rare = sum(frequency[label] <= 5 for label in labels)
    count = f"{len(documents['train'])} + {len(documents['test'])} documents, {len(labels)} labels"
    print(f"{out}: {count}, {rare} of them with <= 5 training documents")


def _write_texts(path: Path, uids: Iterable[str], texts: Mapping[str, str]) -> None:
    path.write_text("".join(f"{uid}->{texts.get(uid, uid)}\n" for uid in uids), encoding="utf-8")


def _write_matrix(path: Path, rows: Sequence[Sequence[str]], place: Mapping[str, int]) -> None:
    lines = "".join(" ".join(f"{column}:1" for column in sorted(place[each] for each in row)) + "\n" for row in rows)
    path.write_text(f"{len(rows)} {len(place)}\n{lines}", encoding="utf-8")
