"""Source `xc`: a folder in the layout of the Extreme Classification Repository, with OAK/MOGIC graph files.

The first existing file is read (each `.txt` also as `.txt.gz`, each `.json` also as `.json.gz`):

- texts: `trn.json`, `raw_data/train.raw.txt`, `raw/trn_X.txt`; likewise `tst`/`test` and `lbl`/`label` (`raw/Y.txt`);
- labels of documents: `trn_X_Y.npz`, `trn_X_Y.txt`, `Y.trn.npz`, else `target_ind` of `trn.json`; likewise `tst`;
- filters: `filter_labels_train.txt`, `trn_filter_labels.txt` (Renee), else none; likewise `test`/`tst`;
- groups of documents: `trn_groups.txt`, `tst_groups.txt`, one group name per document (its site, session, author), for
  data whose test documents were set aside by whole groups; without the file each document is its own group;
- anchor set S: `S_trn_X_Y.*` and `S_lbl_X_Y.*`, for oracles `S_tst_X_Y.*`; texts `raw_data/S.raw.txt` or `S.raw.txt`.
  `S_renee_*` hold a linker's predictions instead of links and are ignored.

Raw texts are `identifier->text` (split at the first arrow) if most lines have an arrow. Otherwise uids are made of file
kind and row (`train:0`). An empty text of a document or label becomes `[EMPTY]`, so that pooling has a token; the
validation counts these and warns. Anchors with an empty text are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen import config
from ramen.console import warn
from ramen.data.dataset import PLACEHOLDER, AnchorSet, Dataset, Texts
from ramen.data.sources import path_defect
from ramen.data.sources.lines import Defects, LineLimit, decoded_lines
from ramen.data.sources.matrices import ExpectedShape, read_matrix, read_pairs, read_shape
from ramen.data.sources.xc_texts import TEXT_FILES, TextFile, find_file, print_text_fields, read_raw, read_texts
from ramen.data.sparse import to_binary
from ramen.data.subset import choose_documents, restrict, select_anchors
from ramen.errors import DataError, Defect

_LABEL_FILES = {
    "train": ("trn_X_Y.npz", "trn_X_Y.txt", "Y.trn.npz"),
    "test": ("tst_X_Y.npz", "tst_X_Y.txt", "Y.tst.npz"),
}
_FILTER_FILES = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt"),
}
_GROUP_FILES = {"train": "trn_groups.txt", "test": "tst_groups.txt"}
_MATRIX_NAME = re.compile(r".+_.+_X_Y\.(?:npz|txt|txt\.gz)", re.DOTALL)
_GRAPH_NAME = re.compile(r"(?P<set>[A-Za-z0-9_-]+?)_(?:trn|lbl|tst)_X_Y\.(?:npz|txt|txt\.gz)")
_RAW_NAME = re.compile(r"(?P<list>.+)\.raw\.txt(?:\.gz)?", re.DOTALL)


def read(settings: config.DataConfig) -> Dataset:
    """Read the folder `settings.path`.

    Raises:
        DataError: one `Defect` per defect, at most `lines.MAX_DEFECTS`.
    """
    folder = Path(settings.path)
    if not folder.is_dir():
        raise DataError(path_defect(settings))
    print_text_fields(folder, settings)
    defects = Defects()
    limits = _line_limits(folder, defects)
    defects.raise_if_any()  # without limits a small compressed text file could exhaust the memory
    files = {kind: read_texts(folder, kind, settings, defects, limits.get(kind)) for kind in TEXT_FILES}
    defects.raise_if_any()  # the counts below are only valid if every line was read
    train, test, labels = files["train"].texts, files["test"].texts, files["label"].texts
    y = {kind: _read_labels(folder, kind, files[kind], len(labels), defects) for kind in _LABEL_FILES}
    defects.raise_if_any()
    filters = {kind: _read_filter(folder, kind, y[kind].shape, defects) for kind in _FILTER_FILES}
    counts = {"trn": len(train), "lbl": len(labels), "tst": len(test)}
    _warn_of_unread_files(folder)
    groups = {kind: _read_groups(folder, kind, len(files[kind].texts), settings, defects) for kind in _GROUP_FILES}
    anchor_sets = {name: _read_anchors(folder, name, counts, settings, defects) for name in anchor_set_names(folder)}
    defects.raise_if_any()
    dataset = Dataset(
        _replace_empty(train),
        _replace_empty(test),
        _replace_empty(labels),
        y["train"],
        y["test"],
        filters["train"],
        filters["test"],
        anchor_sets,
        groups=groups["train"],
        test_groups=groups["test"],
        files=_part_files(folder, files),
    )
    return _limit_documents(dataset, settings)


def anchor_set_names(folder: Path) -> list[str]:
    """Return the names of the anchor sets that have graph files in a folder, in alphabetical order."""
    matches = (_GRAPH_NAME.fullmatch(file.name) for file in folder.iterdir())
    return sorted({match["set"] for match in matches if match and not match["set"].endswith("_renee")})


def _part_files(folder: Path, files: Mapping[str, TextFile]) -> dict[str, str]:
    """Return the files of the documents, the labels and the documents' labels; see `Dataset.files`."""
    parts = {"texts/train": files["train"].file, "texts/test": files["test"].file, "texts/labels": files["label"].file}
    for kind, names in _LABEL_FILES.items():
        parts[f"labels/{kind}"] = find_file(folder, names) or files[kind].file
    return {part: str(file) for part, file in parts.items()}


def _warn_of_unread_files(folder: Path) -> None:
    """Warn of matrices and texts that look like a part of an anchor set but have another name or place."""
    raw_folder = folder / "raw_data"
    raw_files = sorted(raw_folder.iterdir()) if raw_folder.is_dir() else []
    for file in sorted(folder.iterdir()):
        if _MATRIX_NAME.fullmatch(file.name) and not _GRAPH_NAME.fullmatch(file.name):
            expected = "expected NAME_trn_X_Y or NAME_lbl_X_Y, with letters, digits, _ and - in NAME"
            warn(f"{file}: not read; {expected} for an anchor set")
    for file in raw_files:
        if _MATRIX_NAME.fullmatch(file.name):
            warn(f"{file}: not read; move matrices of anchor sets from {raw_folder.name} to its parent folder")
    known = {*anchor_set_names(folder), *TEXT_FILES}
    for file in (*sorted(folder.iterdir()), *raw_files):
        match = _RAW_NAME.fullmatch(file.name)
        if match and match["list"] not in known:
            name = match["list"]
            warn(f"{file}: not read; found neither {name}_trn_X_Y nor {name}_lbl_X_Y in {folder}")


def _limit_documents(dataset: Dataset, settings: config.DataConfig) -> Dataset:
    """Return the dataset with at most `data.max_documents` documents."""
    if not 0 < settings.max_documents < len(dataset.train) + len(dataset.test):
        return dataset
    train = dataset.train.uids if dataset.groups is None else dataset.groups.tolist()
    test = dataset.test.uids if dataset.test_groups is None else dataset.test_groups.tolist()
    groups = [f"train {group}" for group in train] + [f"test {group}" for group in test]
    keep = choose_documents(groups, settings.max_documents, seed=settings.seed)
    keep_train, keep_test = keep[: len(dataset.train)], keep[len(dataset.train) :]
    if not keep_train.any() or not keep_test.any():
        kept = f"{keep_train.sum()} training and {keep_test.sum()} test documents, since groups stay whole"
        fix = "raise data.max_documents, or set it to 0 to keep all"
        raise DataError(Defect(settings.path, f"data.max_documents = {settings.max_documents} keeps {kept}", fix))
    warn(f"{settings.path}: data.max_documents keeps {keep.sum():,} of {len(keep):,} documents")
    return restrict(dataset, keep_train, keep_test)


def _replace_empty(texts: Texts) -> Texts:
    return replace(texts, texts=[text or PLACEHOLDER for text in texts.texts])


def _line_limits(folder: Path, defects: Defects) -> dict[str, LineLimit]:
    """Return the line limits of the text files, from the headers of the label matrices."""
    limits: dict[str, LineLimit] = {}
    for kind, names in _LABEL_FILES.items():
        if (file := find_file(folder, names)) and (shape := read_shape(file, defects)):
            limits[kind] = LineLimit(shape[0], f"expected {shape[0]} lines (rows of {file.name})")
            limits.setdefault("label", LineLimit(shape[1], f"expected {shape[1]} lines (columns of {file.name})"))
    return limits


def _read_labels(folder: Path, kind: str, documents: TextFile, labels: int, defects: Defects) -> sp.csr_matrix:
    shape = len(documents.texts), labels
    file = find_file(folder, _LABEL_FILES[kind])
    if file is not None:
        return read_matrix(file, defects, ExpectedShape(*shape, f"texts of {documents.file.name}", "label texts"))
    if documents.targets is None:
        expected = f"expected one of {', '.join(_LABEL_FILES[kind])} (or .gz)"
        defects.add(folder, f"no file with the {kind} labels", expected)
        return sp.csr_matrix(shape, dtype=np.float32)
    counts, columns = (np.frombuffer(part, np.int64) for part in documents.targets)
    row = np.repeat(np.arange(len(counts)), counts)
    for entry in np.flatnonzero((columns < 0) | (columns >= labels)):
        expected = f"expected labels 0 to {labels - 1} (lines of the label file), found {columns[entry]}"
        defects.add(documents.file, expected, line=int(row[entry]) + 1, field="target_ind")
    if defects.found:
        return sp.csr_matrix(shape, dtype=np.float32)
    indptr = np.concatenate([[0], counts.cumsum()])
    return to_binary(sp.csr_matrix((np.ones(len(columns), np.float32), columns, indptr), shape=shape))


def _read_filter(folder: Path, kind: str, shape: tuple[int, int], defects: Defects) -> sp.csr_matrix:
    file = find_file(folder, _FILTER_FILES[kind])
    return sp.csr_matrix(shape, dtype=np.float32) if file is None else read_pairs(file, shape, defects)


def _read_groups(
    folder: Path, kind: str, documents: int, settings: config.DataConfig, defects: Defects
) -> NDArray[np.int64] | None:
    file = find_file(folder, [_GROUP_FILES[kind]])
    if file is None:
        return None
    expected = f"expected a line for each of {documents} {'training' if kind == 'train' else 'test'} documents"
    limit = LineLimit(documents, expected, "line i is the group of document i")
    names = [name.strip() for _, name in decoded_lines(file, settings.encoding, defects, limit)]
    for number, name in enumerate(names, 1):
        if not name:
            expected_name = "expected the name of a group, found an empty line"
            defects.add(file, expected_name, "name the group of every document", line=number)
    if len(names) != documents:
        defects.add(file, f"{expected}, found {len(names)}", limit.fix)
    # np.unique would pad all names to the longest
    return pd.factorize(np.array(names, object), sort=True)[0].astype(np.int64)


def _read_anchors(
    folder: Path, name: str, counts: dict[str, int], settings: config.DataConfig, defects: Defects
) -> AnchorSet:
    texts_file = find_file(folder, (f"raw_data/{name}.raw.txt", f"{name}.raw.txt"))
    files = {part: find_file(folder, (f"{name}_{part}_X_Y.npz", f"{name}_{part}_X_Y.txt")) for part in counts}
    first = next(file for file in files.values() if file is not None)
    first_shape = read_shape(first, defects)
    texts = Texts([], [])
    if texts_file is None:
        expected = f"expected raw_data/{name}.raw.txt or {name}.raw.txt (or .gz)"
        defects.add(folder, f"anchor set {name} has no texts", expected)
    elif first_shape is not None:
        limit = LineLimit(first_shape[1], f"expected {first_shape[1]} lines (columns of {first.name})")
        texts = read_raw(texts_file, name, settings.encoding, defects, limit)
    edges: dict[str, sp.csr_matrix | None] = {}
    for part, rows in counts.items():
        file = files[part]
        kind = {"trn": "train", "lbl": "label", "tst": "test"}[part]
        shape = ExpectedShape(rows, len(texts), f"texts of {kind}", f"{name} texts")
        edges[part] = None
        if file is not None:
            is_shape_known = texts_file is not None and first_shape is not None
            edges[part] = read_matrix(file, defects, shape if is_shape_known else None)
        elif part != "tst":
            fix = "a set needs train and label edges; write an empty matrix if there are none"
            defects.add(folder, f"anchor set {name} has no {name}_{part}_X_Y.txt (or .npz)", fix)
            edges[part] = sp.csr_matrix((rows, len(texts)), dtype=np.float32)
    anchors = AnchorSet(texts, edges["trn"], edges["lbl"], edges["tst"])
    keep = np.array([bool(text) for text in texts.texts], bool)
    return anchors if defects.found or keep.all() else select_anchors(anchors, keep)
