"""Source `xc`: a folder in the layout of the Extreme Classification Repository, with OAK/MOGIC graph files.

What is looked for, the first that is there (each `.txt` also as `.txt.gz`, each `.json` also as `.json.gz`):

- texts: `trn.json`, `raw_data/train.raw.txt`, `raw/trn_X.txt`; `tst`/`test` and `lbl`/`label` (`raw/Y.txt`) likewise;
- labels of documents: `trn_X_Y.npz`, `trn_X_Y.txt`, `Y.trn.npz`, else `target_ind` of `trn.json`; `tst` likewise;
- filters: `filter_labels_train.txt`, `trn_filter_labels.txt` (Renee), else none; `test`/`tst` likewise;
- groups of documents: `trn_groups.txt`, `tst_groups.txt`, a name for each document (its site, session, author), where
  test documents were set aside by whole groups; without the file each document is its own group;
- anchor set S: `S_trn_X_Y.*` and `S_lbl_X_Y.*`, for oracles `S_tst_X_Y.*`; texts `raw_data/S.raw.txt` or `S.raw.txt`.
  `S_renee_*` are a linker's predictions, not links, and are left alone.

Raw texts are `identifier->text` (split at the first arrow) when most lines hold an arrow. Without identifiers, uids
are made from file kind and row (`train:0`). A document or label with an empty text gets the text `[EMPTY]`, so that
pooling has a token; the validation counts these and warns. Anchors with an empty text are dropped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen import config
from ramen.console import warn
from ramen.data.dataset import PLACEHOLDER, AnchorSet, Dataset, Texts
from ramen.data.sources import missing
from ramen.data.sources.lines import Defects, LineLimit, decoded_lines
from ramen.data.sources.matrices import Expected, add_uncountable, countable, read_matrix, read_pairs, read_shape
from ramen.data.sparse import binary
from ramen.data.subset import choose, restrict, select_anchors
from ramen.errors import DataError, Defect, lone_surrogate, shown

_TEXTS = {
    "train": ("trn.json", "raw_data/train.raw.txt", "raw/trn_X.txt"),
    "test": ("tst.json", "raw_data/test.raw.txt", "raw/tst_X.txt"),
    "label": ("lbl.json", "raw_data/label.raw.txt", "raw/Y.txt"),
}
_MATRICES = {
    "train": ("trn_X_Y.npz", "trn_X_Y.txt", "Y.trn.npz"),
    "test": ("tst_X_Y.npz", "tst_X_Y.txt", "Y.tst.npz"),
}
_FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
_GROUPS = {"train": "trn_groups.txt", "test": "tst_groups.txt"}
_MATRIX = re.compile(r".+_.+_X_Y\.(?:npz|txt|txt\.gz)", re.DOTALL)
_RAW = re.compile(r"(?P<list>.+)\.raw\.txt(?:\.gz)?", re.DOTALL)
_LISTS = ("train", "test", "label")
_GRAPH = re.compile(r"(?P<set>[A-Za-z0-9_-]+?)_(?:trn|lbl|tst)_X_Y\.(?:npz|txt|txt\.gz)")


@dataclass
class _Rows:
    """What one text file holds: `targets` (labels per row, all labels; 8-byte ints) only for documents in JSON."""

    file: Path
    texts: Texts
    targets: tuple[array[int], array[int]] | None = None


def read(settings: config.DataConfig) -> Dataset:
    """Read the folder `settings.path`.

    Raises:
        DataError: one problem per defect, at most `lines.MAX_DEFECTS`.
    """
    folder = Path(settings.path)
    if not folder.is_dir():
        raise DataError(missing(settings))
    _say_fields(folder, settings)
    defects = Defects()
    limits = _line_limits(folder, defects)
    defects.raise_if_any()  # without the limits a small packed list of texts may fill the memory
    rows = {kind: _read_texts(folder, kind, settings, defects, limits.get(kind)) for kind in _TEXTS}
    defects.raise_if_any()  # counts below are only comparable when every line was read
    train, test, labels = rows["train"], rows["test"], rows["label"]
    y = {kind: _read_labels(folder, kind, rows[kind], len(labels.texts), defects) for kind in _MATRICES}
    defects.raise_if_any()
    filters = {kind: _read_filter(folder, kind, y[kind].shape, defects) for kind in _FILTERS}
    counts = {"trn": len(train.texts), "lbl": len(labels.texts), "tst": len(test.texts)}
    _warn_of_lost_graphs(folder)
    groups = {kind: _read_groups(folder, kind, len(rows[kind].texts), settings, defects) for kind in _GROUPS}
    anchor_sets = {name: _read_anchors(folder, name, counts, settings, defects) for name in anchor_set_names(folder)}
    defects.raise_if_any()
    problem = Dataset(
        _without_empty(train.texts),
        _without_empty(test.texts),
        _without_empty(labels.texts),
        y["train"],
        y["test"],
        filters["train"],
        filters["test"],
        anchor_sets,
        groups=groups["train"],
        test_groups=groups["test"],
        files=_files(folder, rows),
    )
    return _subset(problem, settings)


def _files(folder: Path, rows: Mapping[str, _Rows]) -> dict[str, str]:
    """The file of each list of documents or labels, and of the documents' labels; see `Problem.files`."""
    texts = {"texts/train": "train", "texts/test": "test", "texts/labels": "label"}
    labels = {f"labels/{kind}": _find(folder, names) or rows[kind].file for kind, names in _MATRICES.items()}
    return {part: str(file) for part, file in (*((p, rows[kind].file) for p, kind in texts.items()), *labels.items())}


def anchor_set_names(folder: Path) -> list[str]:
    """Names of the anchor sets that have graph files in a folder, in alphabetical order."""
    matches = (_GRAPH.fullmatch(file.name) for file in folder.iterdir())
    return sorted({match["set"] for match in matches if match and not match["set"].endswith("_renee")})


def _warn_of_lost_graphs(folder: Path) -> None:
    """Name matrices and texts that by their names or places are no part of an anchor set, though they look like it."""
    inside = folder / "raw_data"
    further = sorted(inside.iterdir()) if inside.is_dir() else []
    for file in sorted(folder.iterdir()):
        if _MATRIX.fullmatch(file.name) and not _GRAPH.fullmatch(file.name):
            expected = "expected NAME_trn_X_Y or NAME_lbl_X_Y, with letters, digits, _ and - in NAME"
            warn(f"{file}: not read; {expected} for an anchor set")
    for file in further:
        if _MATRIX.fullmatch(file.name):
            warn(f"{file}: not read; the matrices of an anchor set lie beside {inside.name}, not in it")
    known = {*anchor_set_names(folder), *_LISTS}
    for file in (*sorted(folder.iterdir()), *further):
        match = _RAW.fullmatch(file.name)
        if match and match["list"] not in known:
            name = match["list"]
            warn(f"{file}: not read; there is neither {name}_trn_X_Y nor {name}_lbl_X_Y in {folder}")


def _subset(problem: Dataset, settings: config.DataConfig) -> Dataset:
    if not 0 < settings.max_documents < len(problem.train) + len(problem.test):
        return problem
    train = problem.train.uids if problem.groups is None else problem.groups.tolist()
    test = problem.test.uids if problem.test_groups is None else problem.test_groups.tolist()
    groups = [f"train {each}" for each in train] + [f"test {each}" for each in test]
    keep = choose(groups, settings.max_documents, seed=settings.seed)
    kept = keep[: len(problem.train)].sum(), keep[len(problem.train) :].sum()
    if not all(kept):
        found = f"{kept[0]} training and {kept[1]} test documents, since groups stay whole"
        mend = "raise data.max_documents, or set it to 0 to keep all"
        raise DataError(Defect(settings.path, f"data.max_documents = {settings.max_documents} keeps {found}", mend))
    warn(f"{settings.path}: {keep.sum():,} of {len(keep):,} documents are kept, by data.max_documents")
    return restrict(problem, keep[: len(problem.train)], keep[len(problem.train) :])


def _without_empty(texts: Texts) -> Texts:
    return replace(texts, texts=[text or PLACEHOLDER for text in texts.texts])


def _find(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of the named paths that exists, as it is or gzipped; it may be no file (see `Defects.check_file`)."""
    candidates = (folder / (name + end) for name in names for end in ("", ".gz"))
    return next((file for file in candidates if os.path.lexists(file)), None)


# --- texts ---------------------------------------------------------------------------------------------------


def _line_limits(folder: Path, defects: Defects) -> dict[str, LineLimit]:
    """Lines that the lists of documents and labels may have, as the headers of the label matrices state them."""
    limits: dict[str, LineLimit] = {}
    for kind, names in _MATRICES.items():
        if (file := _find(folder, names)) and (shape := read_shape(file, defects)):
            limits[kind] = LineLimit(shape[0], f"expected {shape[0]} lines (rows of {file.name})")
            limits.setdefault("label", LineLimit(shape[1], f"expected {shape[1]} lines (columns of {file.name})"))
    return limits


def _read_texts(
    folder: Path, kind: str, settings: config.DataConfig, defects: Defects, limit: LineLimit | None
) -> _Rows:
    file = _find(folder, _TEXTS[kind])
    if file is None:
        defects.add(folder, f"no file with the {kind} texts", f"expected one of {', '.join(_TEXTS[kind])} (or .gz)")
        return _Rows(folder, Texts([], []))
    json = ".json" in file.suffixes
    rows = (
        _read_json(file, kind, settings, defects, limit)
        if json
        else _Rows(file, _read_raw(file, kind, settings.encoding, defects, limit))
    )
    if not len(rows.texts):
        defects.add(file, "expected a text on each line, found an empty file")
    return rows


def _read_raw(file: Path, kind: str, encoding: str, defects: Defects, limit: LineLimit | None) -> Texts:
    lines = [line for _, line in decoded_lines(file, encoding, defects, limit)]
    arrows = sum("->" in line for line in lines)
    if 2 * arrows <= len(lines):
        return Texts([f"{kind}:{i}" for i in range(len(lines))], [line.strip() for line in lines])
    uids, texts = [], []
    for number, line in enumerate(lines, 1):
        uid, arrow, text = line.partition("->")
        if not arrow:
            defects.add(file, "expected `identifier->text`, as on the other lines, found no arrow", line=number)
        uids.append(uid.strip() if arrow else f"line {number}")
        texts.append(text.strip())
    _check_unique(file, uids, defects)
    return Texts(uids, texts)


def _fields(settings: config.DataConfig) -> tuple[str, ...]:
    """Fields of a JSON object that make a text."""
    of_titles = "Titles" in Path(settings.path).absolute().name
    title_only = settings.text == "title" or (settings.text == "auto" and of_titles)
    return ("title",) if title_only else ("title", "content")


def _say_fields(folder: Path, settings: config.DataConfig) -> None:
    """What is read of JSON objects where the folder's name decided it: a renamed folder is another task."""
    found = [_find(folder, names) for names in _TEXTS.values()]
    if settings.text != "auto" or not any(file is not None and ".json" in file.suffixes for file in found):
        return
    holds = "" if len(_fields(settings)) == 1 else "no "
    said = f"texts are {' and '.join(_fields(settings))} (data.text=auto: {holds}'Titles' in the folder's name)"
    print(f"{settings.path}: {said}", file=sys.stderr, flush=True)


def _read_json(file: Path, kind: str, settings: config.DataConfig, defects: Defects, limit: LineLimit | None) -> _Rows:
    fields = _fields(settings)
    uids: list[str] = []
    texts: list[str] = []
    titles: list[str] = []
    counts, flat = array("q"), array("q")
    for number, line in decoded_lines(file, settings.encoding, defects, limit):
        item = _parse_json(file, line, number, defects)
        uid = item.get("uid")
        uids.append(f"{kind}:{number - 1}" if uid is None else str(uid))
        titles.append((item.get("title") or "").strip())
        texts.append(" ".join(part for name in fields if (part := (item.get(name) or "").strip())))
        if kind != "label":
            row = _targets(file, item, number, defects)
            counts.append(len(row))
            flat.extend(row)
    _check_unique(file, uids, defects)
    read = Texts(uids, texts, None if texts == titles else titles)
    return _Rows(file, read, None if kind == "label" else (counts, flat))


def _parse_json(file: Path, line: str, number: int, defects: Defects) -> dict[str, Any]:
    """The object on a line: `title` is text, `content` text or null, `uid` text, a whole number or null."""
    instead = {"uid": f"line {number}"}
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else error
        if number == 1:  # an array or an indented object, say: no line of the file is an object
            defects.add_unreadable(file, f"not a JSON object ({cause})", "write one object a line", line=number)
        defects.add(file, f"not a JSON object ({cause})", line=number)
        return instead
    if not isinstance(item, dict) or not isinstance(item.get("title"), str):
        defects.add(file, "expected a JSON object with a text `title`", line=number, field="title")
        return instead
    if type(item.get("uid")) not in (str, int, type(None)):
        expected = f"expected a text or a whole number, found {shown(item['uid'])}"
        defects.add(file, expected, line=number, field="uid")
        return instead
    if not isinstance(item.get("content"), str | None):
        defects.add(file, f"expected a text, found {shown(item['content'])}", line=number, field="content")
        return instead
    if "\\u" in line:
        for field in ("uid", "title", "content"):
            if lone := lone_surrogate(str(item.get(field))):
                mend = "write both halves of the character, or remove it"
                defects.add(file, f"{lone} is half of a character", mend, line=number, field=field)
                return instead
    return item


def _targets(file: Path, item: dict[str, Any], number: int, defects: Defects) -> list[int]:
    """Label indices of a document whose `target_rel` is not zero, sorted."""
    if "target_rel" in item and "target_ind" not in item:
        defects.add(file, f"no `target_ind` beside `target_rel`; there are {', '.join(item)}", line=number)
        return []
    found = item.get("target_ind", [])
    weights = item.get("target_rel") or [1.0] * len(found if isinstance(found, list) else [])
    whole = isinstance(found, list) and all(type(label) is int and abs(label) < 2**63 for label in found)
    weighted = isinstance(weights, list) and all(isinstance(weight, int | float) for weight in weights)
    if not whole or not weighted or len(weights) != len(found):
        expected = "expected a list of integers, and as many numbers in `target_rel`"
        defects.add(file, expected, line=number, field="target_ind")
        return []
    if len(set(found)) != len(found):
        defects.add(file, "a label twice in a row", line=number, field="target_ind")
    for weight in (weight for weight in weights if not countable(weight)):
        add_uncountable(file, weight, defects, line=number, field="target_rel")
    return sorted({label for label, weight in zip(found, weights, strict=True) if weight})


def _check_unique(file: Path, uids: list[str], defects: Defects) -> None:
    seen: dict[str, int] = {}
    for number, uid in enumerate(uids, 1):
        if not uid.strip():
            defects.add(file, "expected an identifier, found none", line=number, field="uid")
        elif (first := seen.setdefault(uid, number)) != number:
            expected = f"{uid!r} is already on line {first}"
            defects.add(file, expected, "identifiers must differ", line=number, field="uid")


# --- matrices ------------------------------------------------------------------------------------------------


def _read_labels(folder: Path, kind: str, rows: _Rows, labels: int, defects: Defects) -> sp.csr_matrix:
    shape = len(rows.texts), labels
    file = _find(folder, _MATRICES[kind])
    if file is not None:
        return read_matrix(file, defects, Expected(*shape, f"texts of {rows.file.name}", "label texts"))
    if rows.targets is None:
        defects.add(folder, f"no file with the {kind} labels", f"expected one of {', '.join(_MATRICES[kind])} (or .gz)")
        return sp.csr_matrix(shape, dtype=np.float32)
    counts, flat = (np.frombuffer(part, np.int64) for part in rows.targets)
    row = np.repeat(np.arange(len(counts)), counts)
    for entry in np.flatnonzero((flat < 0) | (flat >= labels)):
        expected = f"expected labels 0 to {labels - 1} (lines of the label file), found {flat[entry]}"
        defects.add(rows.file, expected, line=int(row[entry]) + 1, field="target_ind")
    if defects.found:
        return sp.csr_matrix(shape, dtype=np.float32)
    indptr = np.concatenate([[0], counts.cumsum()])
    return binary(sp.csr_matrix((np.ones(len(flat), np.float32), flat, indptr), shape=shape))


def _read_filter(folder: Path, kind: str, shape: tuple[int, int], defects: Defects) -> sp.csr_matrix:
    file = _find(folder, _FILTERS[kind])
    return sp.csr_matrix(shape, dtype=np.float32) if file is None else read_pairs(file, shape, defects)


def _read_groups(
    folder: Path, kind: str, documents: int, settings: config.DataConfig, defects: Defects
) -> NDArray[np.int64] | None:
    file = _find(folder, [_GROUPS[kind]])
    if file is None:
        return None
    split = "training" if kind == "train" else "test"
    expected = f"expected a line for each of {documents} {split} documents"
    limit = LineLimit(documents, expected, "line i is the group of document i")
    names = [name.strip() for _, name in decoded_lines(file, settings.encoding, defects, limit)]
    for number, name in enumerate(names, 1):
        if not name:
            defects.add(file, "expected the name of a group, found an empty line", "name every document's", line=number)
    if len(names) != documents:
        defects.add(file, f"{expected}, found {len(names)}", limit.mend)
    return pd.factorize(np.array(names, object), sort=True)[0].astype(np.int64)  # np.unique pads all to the longest


def _read_anchors(
    folder: Path, name: str, counts: dict[str, int], settings: config.DataConfig, defects: Defects
) -> AnchorSet:
    texts_file = _find(folder, (f"raw_data/{name}.raw.txt", f"{name}.raw.txt"))
    files = {part: _find(folder, (f"{name}_{part}_X_Y.npz", f"{name}_{part}_X_Y.txt")) for part in counts}
    first = next(file for file in files.values() if file is not None)
    stated = read_shape(first, defects)
    texts = Texts([], [])
    if texts_file is None:
        expected = f"anchor set {name} has no texts"
        defects.add(folder, expected, f"expected raw_data/{name}.raw.txt or {name}.raw.txt (or .gz)")
    elif stated is not None:
        limit = LineLimit(stated[1], f"expected {stated[1]} lines (columns of {first.name})")
        texts = _read_raw(texts_file, name, settings.encoding, defects, limit)
    edges: dict[str, sp.csr_matrix | None] = {}
    for part, rows in counts.items():
        file = files[part]
        source = {"trn": "train", "lbl": "label", "tst": "test"}[part]
        shape = Expected(rows, len(texts), f"texts of {source}", f"{name} texts")
        edges[part] = None
        if file is not None:
            edges[part] = read_matrix(file, defects, shape if texts_file is not None and stated is not None else None)
        elif part != "tst":
            mend = "a set needs train and label edges; write an empty matrix if there are none"
            defects.add(folder, f"anchor set {name} has no {name}_{part}_X_Y.txt (or .npz)", mend)
            edges[part] = sp.csr_matrix((rows, len(texts)), dtype=np.float32)
    anchors = AnchorSet(texts, edges["trn"], edges["lbl"], edges["tst"])
    keep = np.array([bool(text) for text in texts.texts], bool)
    return anchors if defects.found or keep.all() else select_anchors(anchors, keep)
