"""Text files of the source `xc`: finding them, and reading raw lines and JSON objects."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramen import config
from ramen.console import report
from ramen.data.dataset import Texts
from ramen.data.sources.lines import Defects, LineLimit, decoded_lines
from ramen.data.sources.matrices import add_invalid_value, is_valid_value
from ramen.errors import find_lone_surrogate, short_repr

TEXT_FILES = {
    "train": ("trn.json", "raw_data/train.raw.txt", "raw/trn_X.txt"),
    "test": ("tst.json", "raw_data/test.raw.txt", "raw/tst_X.txt"),
    "label": ("lbl.json", "raw_data/label.raw.txt", "raw/Y.txt"),
}
"""Kind of item -> names of its text file."""


@dataclass
class TextFile:
    """Contents of a text file.

    Attributes:
        file: its path.
        texts: one item per line.
        targets: (number of labels per row, labels of all rows), 64-bit integers; only of documents in JSON.
    """

    file: Path
    texts: Texts
    targets: tuple[array[int], array[int]] | None = None


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first path that exists, plain or with `.gz`; it may not be a file (see `Defects.check_file`)."""
    candidates = (folder / (name + suffix) for name in names for suffix in ("", ".gz"))
    return next((file for file in candidates if os.path.lexists(file)), None)


def read_texts(
    folder: Path, kind: str, settings: config.DataConfig, defects: Defects, limit: LineLimit | None
) -> TextFile:
    """Read the "train", "test" or "label" texts of a folder."""
    file = find_file(folder, TEXT_FILES[kind])
    if file is None:
        expected = f"expected one of {', '.join(TEXT_FILES[kind])} (or .gz)"
        defects.add(folder, f"no file with the {kind} texts", expected)
        return TextFile(folder, Texts([], []))
    if ".json" in file.suffixes:
        contents = _read_json(file, kind, settings, defects, limit)
    else:
        contents = TextFile(file, read_raw(file, kind, settings.encoding, defects, limit))
    if not len(contents.texts):
        defects.add(file, "expected a text on each line, found an empty file")
    return contents


def print_text_fields(folder: Path, settings: config.DataConfig) -> None:
    """Print the fields that make up a text if the folder's name decides them: renaming the folder changes the task."""
    files = [find_file(folder, names) for names in TEXT_FILES.values()]
    if settings.text != "auto" or not any(file is not None and ".json" in file.suffixes for file in files):
        return
    fields = _text_fields(settings)
    reason = f"data.text=auto: {'' if len(fields) == 1 else 'no '}'Titles' in the folder's name"
    report(f"{settings.path}: texts are {' and '.join(fields)} ({reason})")


def _text_fields(settings: config.DataConfig) -> tuple[str, ...]:
    """Return the fields of a JSON object that make up its text."""
    is_titles_folder = "Titles" in Path(settings.path).absolute().name
    title_only = settings.text == "title" or (settings.text == "auto" and is_titles_folder)
    return ("title",) if title_only else ("title", "content")


def read_raw(file: Path, kind: str, encoding: str, defects: Defects, limit: LineLimit | None) -> Texts:
    """Read a raw text file; `kind` is the prefix of generated uids. See `xc` for the format."""
    lines = [line for _, line in decoded_lines(file, encoding, defects, limit)]
    arrows = sum("->" in line for line in lines)
    if 2 * arrows <= len(lines):
        return Texts([f"{kind}:{i}" for i in range(len(lines))], [line.strip() for line in lines])
    uids, texts = [], []
    for number, line in enumerate(lines, 1):
        uid, arrow, text = line.partition("->")
        if not arrow:
            defects.add(file, "expected `identifier->text` as on the other lines, found no arrow", line=number)
        uids.append(uid.strip() if arrow else f"line {number}")
        texts.append(text.strip())
    _check_unique(file, uids, defects)
    return Texts(uids, texts)


def _read_json(
    file: Path, kind: str, settings: config.DataConfig, defects: Defects, limit: LineLimit | None
) -> TextFile:
    fields = _text_fields(settings)
    uids: list[str] = []
    texts: list[str] = []
    titles: list[str] = []
    counts, labels = array("q"), array("q")
    for number, line in decoded_lines(file, settings.encoding, defects, limit):
        item = _parse_json(file, line, number, defects)
        uid = item.get("uid")
        uids.append(f"{kind}:{number - 1}" if uid is None else str(uid))
        titles.append((item.get("title") or "").strip())
        texts.append(" ".join(part for name in fields if (part := (item.get(name) or "").strip())))
        if kind != "label":
            row = _parse_targets(file, item, number, defects)
            counts.append(len(row))
            labels.extend(row)
    _check_unique(file, uids, defects)
    items = Texts(uids, texts, None if texts == titles else titles)
    return TextFile(file, items, None if kind == "label" else (counts, labels))


def _parse_json(file: Path, line: str, number: int, defects: Defects) -> dict[str, Any]:
    """Parse the object on a line: `title` is a string, `content` a string or null, `uid` a string, integer or null."""
    placeholder = {"uid": f"line {number}"}
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else error
        if number == 1:  # probably an array or an indented object
            defects.add_unreadable(file, f"not a JSON object ({cause})", "write one object per line", line=number)
        defects.add(file, f"not a JSON object ({cause})", line=number)
        return placeholder
    if not isinstance(item, dict) or not isinstance(item.get("title"), str):
        defects.add(file, "expected a JSON object with a string `title`", line=number, field="title")
        return placeholder
    if type(item.get("uid")) not in (str, int, type(None)):
        expected = f"expected a string or an integer, found {short_repr(item['uid'])}"
        defects.add(file, expected, line=number, field="uid")
        return placeholder
    if not isinstance(item.get("content"), str | None):
        defects.add(file, f"expected a string, found {short_repr(item['content'])}", line=number, field="content")
        return placeholder
    if "\\u" in line:
        for field in ("uid", "title", "content"):
            if surrogate := find_lone_surrogate(str(item.get(field))):
                fix = "write the whole surrogate pair, or remove it"
                defects.add(file, f"unpaired surrogate {surrogate}", fix, line=number, field=field)
                return placeholder
    return item


def _parse_targets(file: Path, item: dict[str, Any], number: int, defects: Defects) -> list[int]:
    """Return the label indices of a document whose `target_rel` is not zero, sorted."""
    if "target_rel" in item and "target_ind" not in item:
        defects.add(file, f"expected `target_ind` next to `target_rel`, found {', '.join(item)}", line=number)
        return []
    labels = item.get("target_ind", [])
    weights = item.get("target_rel") or [1.0] * len(labels if isinstance(labels, list) else [])
    are_indices = isinstance(labels, list) and all(type(label) is int and abs(label) < 2**63 for label in labels)
    are_weights = isinstance(weights, list) and all(isinstance(weight, int | float) for weight in weights)
    if not are_indices or not are_weights or len(weights) != len(labels):
        expected = "expected a list of integers, and as many numbers in `target_rel`"
        defects.add(file, expected, line=number, field="target_ind")
        return []
    if len(set(labels)) != len(labels):
        defects.add(file, "duplicate label", "list each label once", line=number, field="target_ind")
    for weight in (weight for weight in weights if not is_valid_value(weight)):
        add_invalid_value(file, weight, defects, line=number, field="target_rel")
    return sorted({label for label, weight in zip(labels, weights, strict=True) if weight})


def _check_unique(file: Path, uids: list[str], defects: Defects) -> None:
    seen: dict[str, int] = {}
    for number, uid in enumerate(uids, 1):
        if not uid.strip():
            defects.add(file, "expected an identifier, found none", line=number, field="uid")
        elif (first := seen.setdefault(uid, number)) != number:
            expected = f"{uid!r} is already on line {first}"
            defects.add(file, expected, "make the identifiers unique", line=number, field="uid")
