"""Build a dataset from texts and labels in memory: lists, or a pandas DataFrame."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from ramen.config import DataConfig
from ramen.data.dataset import PLACEHOLDER, AnchorSet, Dataset, Side, Texts
from ramen.data.sparse import to_binary
from ramen.errors import DataError, Defect, find_lone_surrogate, short_repr, suggest_name
from ramen.sampling import keyed_rng

if TYPE_CHECKING:
    import pandas as pd

TEXT, LABELS, SPLIT, ID = "text", "labels", "split", "id"
"""Columns of a DataFrame; the last two are optional."""
SIDES = tuple(side.role for side in Side)
"""The two sides of a graph, as the user names them."""
SPLITS = ("train", "test")
_SET_NAME = re.compile("[A-Za-z0-9_-]+")
_FILES = {
    "texts/train": "training documents",
    "texts/test": "test documents",
    "texts/labels": "labels",
    "labels/train": "labels of the training documents",
    "labels/test": "labels of the test documents",
}
"""Names of the parts in error messages, where those of a dataset on disk are file names."""


def from_frame(
    frame: pd.DataFrame,
    settings: DataConfig,
    *,
    label_texts: Sequence[str] | Mapping[Any, str] | None = None,
    graphs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Dataset:
    """Build a dataset from a DataFrame with a row per document.

    Args:
        frame: columns `text`, `labels` (a list per row), and optionally `split` and `id`. Without `id`, the frame's
            index identifies the documents.
        settings: as in `from_lists`.
        label_texts, graphs: as in `from_lists`.

    Raises:
        DataError: a column is missing, or a row is broken.
    """
    for column in (TEXT, LABELS):
        if column not in frame.columns:
            found = ", ".join(map(str, frame.columns)) or "none"
            _fail("DataFrame", f"no column {column!r}; its columns are {found}", "rename the column")
    return from_lists(
        frame[TEXT].tolist(),
        frame[LABELS].tolist(),
        settings,
        ids=(frame[ID] if ID in frame.columns else frame.index).tolist(),
        split=frame[SPLIT].tolist() if SPLIT in frame.columns else None,
        label_texts=label_texts,
        graphs=graphs,
    )


def from_lists(
    texts: Sequence[str],
    labels: Sequence[Iterable[Any]],
    settings: DataConfig,
    *,
    ids: Sequence[Any] | None = None,
    split: Sequence[str] | None = None,
    label_texts: Sequence[str] | Mapping[Any, str] | None = None,
    graphs: Mapping[str, Mapping[str, Any]] | None = None,
) -> Dataset:
    """Build a dataset from lists with an entry per document.

    Args:
        texts: text of each document.
        labels: labels of each document, named as `label_texts` says.
        settings: `test_fraction` and `seed` of the random split.
        ids: identifier of each document, unique; None = its position.
        split: "train" or "test" for each document; None = a random split.
        label_texts: None: labels are named by their texts, and those that occur are all there are. A list of texts:
            labels are named by position or text. A mapping: labels are named by its keys.
        graphs: anchor set -> side ("documents", "labels") -> edges: a mapping from a document's id, or a label as
            above, to anchor texts; or pairs (id or label, anchor text), as a list or a DataFrame of two columns.

    Returns:
        The dataset, without filters. An anchor is identified by its text.

    Raises:
        DataError: an entry is broken; the message names its row, counted from 0.
    """
    for name, column in (("labels", labels), ("ids", ids), ("split", split)):
        if column is not None and len(column) != len(texts):
            _fail(name, f"{len(column):,} entries for {len(texts):,} texts", "give one per document")
    documents = Texts(
        _identifiers(range(len(texts)) if ids is None else ids),
        [_text(text, f"row {row}", TEXT) or PLACEHOLDER for row, text in enumerate(texts)],
    )
    table = _label_table(labels, label_texts)
    pairs = [(row, table.find(label, f"row {row}")) for row, entry in enumerate(labels) for label in _list(entry, row)]
    y = _matrix(pairs, (len(documents), len(table.texts)))
    in_test = _test_documents(len(documents), split, settings)
    parts = {"train": np.flatnonzero(~in_test), "test": np.flatnonzero(in_test)}
    for name, rows in parts.items():
        if not y[rows].nnz:
            _fail(SPLIT, f"none of the {len(rows):,} {name} documents has a label", "change the split")
    if len(table.texts) < 2:
        _fail(LABELS, f"expected at least two labels, found {len(table.texts)}")
    places = {"documents": {uid: row for row, uid in enumerate(documents.uids)}, "labels": table}
    return Dataset(
        documents.select(parts["train"]),
        documents.select(parts["test"]),
        table.texts,
        y[parts["train"]],
        y[parts["test"]],
        sp.csr_matrix((len(parts["train"]), len(table.texts)), dtype=np.float32),
        sp.csr_matrix((len(parts["test"]), len(table.texts)), dtype=np.float32),
        {name: _anchor_set(name, sides, places, parts) for name, sides in sorted((graphs or {}).items())},
        files=_FILES,
    )


@dataclass(frozen=True)
class _LabelTable:
    """The labels, and by what they are named.

    Attributes:
        texts: L labels.
        place: name -> number.
    """

    texts: Texts
    place: Mapping[Any, int]

    def find(self, label: Any, where: str) -> int:
        """Return a label's number. Raises DataError if there is no such label."""
        for name in (label, label.strip()) if isinstance(label, str) else (label,):
            if isinstance(name, Hashable) and name in self.place:
                return self.place[name]
        known = [name for name in self.place if isinstance(name, str)]
        hint = suggest_name(label, known) if isinstance(label, str) and known else "add it to label_texts"
        _fail(where, f"label {short_repr(label)} is not in label_texts", hint, LABELS)


def _label_table(labels: Sequence[Any], label_texts: Sequence[str] | Mapping[Any, str] | None) -> _LabelTable:
    if label_texts is None:
        distinct: set[str] = set()
        for row, entry in enumerate(labels):
            for label in _list(entry, row):
                if not isinstance(label, str):
                    _fail(
                        f"row {row}", f"expected label texts, found {short_repr(label)}", "or give label_texts", LABELS
                    )
                distinct.add(_text(label, f"row {row}", LABELS))
        names = sorted(distinct)
        if "" in distinct:
            _fail(LABELS, "a label without a text", "remove it")
        return _LabelTable(Texts(names, names), {name: number for number, name in enumerate(names)})
    if isinstance(label_texts, Mapping):
        uids = _identifiers(label_texts, "label_texts")
        texts = [_text(text, f"label {short_repr(key)}", "label_texts") for key, text in label_texts.items()]
        place: dict[Any, int] = {key: number for number, key in enumerate(label_texts)}
    else:
        texts = [_text(text, f"label {number}", "label_texts") for number, text in enumerate(label_texts)]
        uids = _identifiers(range(len(texts)))
        place = {}
        for number, text in enumerate(texts):
            if (first := place.setdefault(text, number)) != number and text:
                _fail(f"label {number}", f"{short_repr(text)} is label {first} too", "give a mapping of ids to texts")
            place[number] = number
    return _LabelTable(Texts(uids, [text or PLACEHOLDER for text in texts]), place)


def _test_documents(count: int, split: Sequence[str] | None, settings: DataConfig) -> NDArray[np.bool_]:
    """Which documents are for test, bool [documents]."""
    if split is None:
        chosen = keyed_rng(settings.seed, "in-memory split").permutation(count)
        in_test = np.zeros(count, bool)
        in_test[chosen[: max(1, round(count * settings.test_fraction))]] = True
        return in_test
    for row, name in enumerate(split):
        if name not in SPLITS:
            advice = "validation documents are held out of the training documents; name them train"
            _fail(f"row {row}", f"expected train or test, found {short_repr(name)}", advice, SPLIT)
    return np.array([name == "test" for name in split], bool)


# --- graphs --------------------------------------------------------------------------------------------------


def _anchor_set(
    name: str, sides: Mapping[str, Any], places: Mapping[str, Any], parts: Mapping[str, NDArray[np.int64]]
) -> AnchorSet:
    where = f"graphs[{name!r}]"
    if not _SET_NAME.fullmatch(name):
        _fail(where, "expected a name of letters, digits, _ and -")
    if not isinstance(sides, Mapping) or not sides or set(sides) - set(SIDES):
        found = ", ".join(map(str, sides)) if isinstance(sides, Mapping) else short_repr(sides)
        _fail(where, f"expected a mapping with the keys documents, labels or both, found {found or 'nothing'}")
    edges = {side: list(_edges(sides[side], f"{where}[{side!r}]")) if side in sides else [] for side in SIDES}
    texts = sorted({anchor for pairs in edges.values() for _, _, anchor in pairs})
    column = {text: number for number, text in enumerate(texts)}
    entries = {
        side: [(_row(item, side, places, at), column[anchor]) for at, item, anchor in pairs]
        for side, pairs in edges.items()
    }
    documents = _matrix(entries["documents"], (len(places["documents"]), len(texts)))
    labels = _matrix(entries["labels"], (len(places["labels"].texts), len(texts)))
    return AnchorSet(Texts(texts, texts), documents[parts["train"]], labels, documents[parts["test"]])


def _edges(edges: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (place for messages, item, anchor text) of every edge."""
    if is_frame(edges):
        if edges.shape[1] != 2:
            _fail(where, f"expected a DataFrame of two columns (item, anchor), found {edges.shape[1]}")
        edges = zip(edges.iloc[:, 0].tolist(), edges.iloc[:, 1].tolist(), strict=True)
    elif isinstance(edges, Mapping):
        edges = (
            (item, anchor)
            for item, anchors in edges.items()
            for anchor in ([anchors] if isinstance(anchors, str) else anchors)
        )
    for number, pair in enumerate(edges):
        at = f"{where}, edge {number}"
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            _fail(at, f"expected a pair (item, anchor text), found {short_repr(pair)}")
        item, anchor = pair
        if not (text := _text(anchor, at, "anchor")):
            _fail(at, "an anchor without a text", "remove the edge")
        yield at, item, text


def _row(item: Any, side: str, places: Mapping[str, Any], where: str) -> int:
    """Return the number of a document or label. Raises DataError if there is none."""
    if side == "labels":
        return int(places[side].find(item, where))
    try:
        return int(places[side][str(item)])
    except KeyError:
        _fail(where, f"no document has the id {short_repr(item)}", "remove the edge, or add the document")


# --- values --------------------------------------------------------------------------------------------------


def _text(value: Any, where: str, field: str) -> str:
    """Return a text without blanks at its ends. Raises DataError if it is none."""
    if not isinstance(value, str):
        _fail(where, f"expected a text, found {short_repr(value)}", field=field)
    if lone := find_lone_surrogate(value):
        _fail(where, f"{lone} is half of a character", "remove it", field)
    return value.strip()


def _list(entry: Any, row: int) -> list[Any]:
    """Return a document's labels. Raises DataError for anything but a list, tuple, set or array."""
    if not isinstance(entry, list | tuple | set | frozenset | np.ndarray):
        _fail(f"row {row}", f"expected a list of labels, found {short_repr(entry)}", "[] stands for no label", LABELS)
    return entry.tolist() if isinstance(entry, np.ndarray) else list(entry)


def _identifiers(ids: Iterable[Any], name: str = ID) -> list[str]:
    """Return identifiers as texts. Raises DataError if one is empty or occurs twice."""
    found: dict[str, int] = {}
    for row, value in enumerate(ids):
        uid = str(value)
        if not uid.strip():
            _fail(f"row {row}", "expected an identifier, found none", field=name)
        if (first := found.setdefault(uid, row)) != row:
            _fail(f"row {row}", f"{short_repr(value)} identifies row {first} too", "identifiers must differ", name)
    return list(found)


def _matrix(pairs: Sequence[tuple[int, int]], shape: tuple[int, int]) -> sp.csr_matrix:
    """Return the pairs (row, column) as CSR with ones."""
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
    return to_binary(sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=shape))


def is_frame(value: object) -> TypeGuard[pd.DataFrame]:
    """Whether a value is a pandas DataFrame."""
    import pandas as pd

    return isinstance(value, pd.DataFrame)


def _fail(where: str, found: str, advice: str = "", field: str | None = None) -> NoReturn:
    raise DataError(Defect(where, found, advice, field=field))
