"""Write documents, labels and anchors in the layout of the source `xc`.

It is the layout of the Extreme Classification Repository with the graph files of OAK and MOGIC.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Links = Mapping[str, Sequence[str]]
"""Identifier -> identifiers."""


def split(identifiers: Iterable[str], count: int, seed: int) -> dict[str, list[str]]:
    """Sample documents and split them: a fifth is for test; returns sorted lists `train` and `test`."""
    rng = random.Random(seed)
    candidates = sorted(identifiers)
    chosen = sorted(rng.sample(candidates, min(count, len(candidates))))
    test = set(rng.sample(chosen, len(chosen) // 5))
    return {"train": [uid for uid in chosen if uid not in test], "test": sorted(test)}


def write_folder(
    out: Path,
    documents: Mapping[str, Sequence[str]],
    labels_of: Links,
    texts: Mapping[str, str],
    anchors_of: Mapping[str, Links],
) -> None:
    """Write texts, pairs, filters (documents that are also labels) and all anchor sets, and print the counts.

    The folder is renamed to its final name when it is complete.

    Args:
        out: output folder; must not exist.
        documents: `train` and `test` -> identifiers.
        labels_of: document -> labels.
        texts: identifier -> text; the identifier is the text of an anchor that is missing here.
        anchors_of: anchor set -> document or label -> anchors.

    Raises:
        SystemExit: the folder exists, or there are no test documents.
    """
    if out.exists():
        raise SystemExit(f"error: {out} already exists; delete it or give another folder")
    if not documents["test"]:
        raise SystemExit("error: found fewer than five documents with labels; check the input folder")
    labels = sorted({label for part in documents.values() for uid in part for label in labels_of[uid]})
    rows = {"trn": documents["train"], "tst": documents["test"], "lbl": labels}
    draft = out.with_name(f".{out.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "raw_data").mkdir(parents=True)
    label_ids = {label: i for i, label in enumerate(labels)}
    for name, uids in {**documents, "label": labels}.items():
        _write_texts(draft / "raw_data" / f"{name}.raw.txt", uids, texts)
    for name, short in (("train", "trn"), ("test", "tst")):
        _write_matrix(draft / f"{short}_X_Y.txt", [labels_of[uid] for uid in documents[name]], label_ids)
        self_pairs = [f"{i} {label_ids[uid]}\n" for i, uid in enumerate(documents[name]) if uid in label_ids]
        (draft / f"filter_labels_{name}.txt").write_text("".join(self_pairs), encoding="utf-8")
    for name, linked in anchors_of.items():
        edges = {short: [sorted(set(linked.get(uid, ())) - {uid}) for uid in part] for short, part in rows.items()}
        anchors = sorted({anchor for part in edges.values() for row in part for anchor in row})
        _write_texts(draft / "raw_data" / f"{name}.raw.txt", anchors, texts)
        for short, part in edges.items():
            _write_matrix(draft / f"{name}_{short}_X_Y.txt", part, {anchor: i for i, anchor in enumerate(anchors)})
    draft.rename(out)
    frequency = Counter(label for uid in documents["train"] for label in labels_of[uid])
    rare = sum(frequency[label] <= 5 for label in labels)
    count = f"{len(documents['train'])} + {len(documents['test'])} documents, {len(labels)} labels"
    print(f"{out}: {count}, {rare} of them with <= 5 training documents")


def _write_texts(path: Path, uids: Iterable[str], texts: Mapping[str, str]) -> None:
    path.write_text("".join(f"{uid}->{texts.get(uid, uid)}\n" for uid in uids), encoding="utf-8")


def _write_matrix(path: Path, rows: Sequence[Sequence[str]], columns: Mapping[str, int]) -> None:
    lines = "".join(" ".join(f"{column}:1" for column in sorted(columns[uid] for uid in row)) + "\n" for row in rows)
    path.write_text(f"{len(rows)} {len(columns)}\n{lines}", encoding="utf-8")
