"""Retriever: an encoder, the index of its label vectors, and the label table.

The three belong together because vectors of different encoders cannot be compared. On disk they are two directories:
the encoder's, and one with `index.faiss`, `labels.parquet` and `retriever.json`. `retriever.json` lists the size and
sha256 of every file in both; `Retriever.load` verifies them all before it opens any.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ramen.artifacts import is_safe_relative_path, manifest_types
from ramen.config import EncoderConfig
from ramen.errors import ArtifactError, RamenError
from ramen.files import check_type, read_json, read_texts, sha256, shorten, write_text, write_texts
from ramen.index.build import read_index, write_index

FORMAT = 1
INDEX_FILE = "index.faiss"
LABELS_FILE = "labels.parquet"
FACTS_FILE = "retriever.json"
DEFAULT_K = 10
"""Labels returned per text by default."""
MAX_LABELS = 1000
"""Labels returned, or excluded, per text at most over HTTP."""


class TextEncoder(Protocol):
    """Encodes texts as vectors."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return float32 [n, D], unit-norm rows."""


@dataclass(frozen=True)
class Hit:
    """One retrieved label; `score` is the cosine."""

    uid: str
    text: str
    score: float


class Retriever:
    """Finds the best labels of a text.

    Args:
        encoder: the encoder that made the label vectors in the index.
        index: a faiss index; id i is label i.
        uids, texts: the label table.
        identity: which field identifies a query with a label, "uid" or "text"; "" if queries are never labels.

    Raises:
        ArtifactError: the index and the label table differ in size.
    """

    def __init__(
        self, encoder: TextEncoder, index: Any, uids: Sequence[str], texts: Sequence[str], identity: str = ""
    ) -> None:
        if not len(uids) == len(texts) == index.ntotal:
            raise ArtifactError(
                f"index holds {index.ntotal} labels, the label table {len(uids)}; run `ramen publish-index` again"
            )
        self.encoder = encoder
        self.index = index
        self.uids = uids
        self.texts = texts
        self.identity = identity

    def __len__(self) -> int:
        return len(self.uids)

    @classmethod
    def load(cls, encoder_dir: Path, index_dir: Path) -> Retriever:
        """Verify every file against `retriever.json`, then open encoder, index and label table.

        Raises:
            ArtifactError: a file is missing, damaged, or of another format.
        """
        facts = read_facts(index_dir)
        _check_files(index_dir, facts["files"])
        _check_files(encoder_dir, facts["encoder"])
        from ramen.encoder.loading import load_trained

        encoder = load_trained(encoder_dir, EncoderConfig())
        identity = str(facts["index"].get("identity", ""))
        return cls(encoder, read_index(index_dir / INDEX_FILE), *read_texts(index_dir / LABELS_FILE), identity)

    def query(
        self, texts: Sequence[str], k: int = DEFAULT_K, exclude: Sequence[Collection[str]] = ()
    ) -> list[list[Hit]]:
        """Return the k best labels of each text, best first; fewer if the index has fewer labels.

        Args:
            texts: queries.
            k: labels per text.
            exclude: for each text, uids of labels that are left out; empty = none for any text.

        Raises:
            RamenError: k is below 1, or a text is not valid Unicode.
        """
        if k < 1:
            raise RamenError(f"k = {k}: expected at least 1")
        if not len(texts):
            return []
        for text in texts:
            check_unicode(text)
        depth = min(k + max(map(len, exclude), default=0), len(self))
        scores_nk, ids_nk = self.index.search(self.encoder.encode(list(texts)), depth)
        hits_of_text = [self._make_hits(scores, ids) for scores, ids in zip(scores_nk, ids_nk, strict=True)]
        exclude = exclude or [()] * len(hits_of_text)
        return [first_hits(hits, k, excluded) for hits, excluded in zip(hits_of_text, exclude, strict=True)]

    @cached_property
    def _uids_of_text(self) -> dict[str, list[str]]:
        uids_of_text: dict[str, list[str]] = {}
        for uid, text in zip(self.uids, self.texts, strict=True):
            uids_of_text.setdefault(" ".join(text.split()), []).append(uid)
        return uids_of_text

    def own_labels(self, uid: str, text: str) -> Collection[str]:
        """Return the uids of labels that are the query itself, by the same rule as in training (`data.filters`)."""
        if self.identity == "uid":
            return (uid,)
        return self._uids_of_text.get(" ".join(text.split()), ()) if self.identity == "text" else ()

    def _make_hits(self, scores: NDArray[np.float32], ids: NDArray[np.int64]) -> list[Hit]:
        # lexsort puts equal scores in label order; HNSW pads with id -1 when it finds too few labels
        order = [i for i in np.lexsort((ids, -scores)) if ids[i] >= 0]
        return [Hit(self.uids[ids[i]], self.texts[ids[i]], float(scores[i])) for i in order]


def check_unicode(text: str) -> None:
    """Raise RamenError for a text with a lone surrogate, which tokenizers reject and UTF-8 cannot encode.

    It comes from a command line that is not UTF-8 or from JSON such as "\\ud800".
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RamenError(
            f"query: character {error.start + 1} is a lone surrogate (U+{ord(text[error.start]):04X}); give valid UTF-8"
        ) from None


def first_hits(hits: Sequence[Hit], k: int, exclude: Collection[str]) -> list[Hit]:
    """Return the first k hits that are not excluded."""
    return [hit for hit in hits if hit.uid not in exclude][:k]


def write_retriever(
    folder: Path,
    index: Any,
    uids: Sequence[str],
    texts: Sequence[str],
    *,
    encoder_files: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Write index, label table and, last, `retriever.json`.

    Args:
        folder: existing directory.
        index, uids, texts: as in `Retriever`.
        encoder_files: relative name -> {bytes, sha256} of the encoder's directory.
        facts: kind, parameters and width of the index. No times: equal content must give an equal file.
    """
    write_index(index, folder / INDEX_FILE)
    write_texts(folder / LABELS_FILE, uids, texts)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in (INDEX_FILE, LABELS_FILE)
    }
    table = {"format": FORMAT, "index": dict(facts), "files": files, "encoder": dict(encoder_files)}
    write_text(folder / FACTS_FILE, json.dumps(table, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_facts(folder: Path) -> dict[str, Any]:
    """Read `retriever.json`. Raises ArtifactError when it is missing, broken or of another format."""
    path, remedy = folder / FACTS_FILE, "run `ramen publish-index` again"
    if not path.exists():
        raise ArtifactError(f"{path}: missing, so {folder} is not a retriever; run `ramen publish-index`")
    facts: dict[str, Any] = read_json(path, dict[str, Any], remedy=remedy)
    if facts.get("format") != FORMAT:
        raise ArtifactError(f"{path}: expected format {FORMAT}, found {shorten(facts.get('format'))}; {remedy}")
    files = manifest_types()["files"]
    for key, form in {"index": dict[str, Any], "files": files, "encoder": files}.items():
        check_type(facts.get(key), form, f"{path}: {key}", remedy)
    for name in (*facts["files"], *facts["encoder"]):
        if not is_safe_relative_path(name):
            raise ArtifactError(f"{path}: {shorten(name)} is not a path inside the retriever; {remedy}")
    if missing := {INDEX_FILE, LABELS_FILE} - set(facts["files"]):
        raise ArtifactError(f"{path}: files: does not list {sorted(missing)[0]}; {remedy}")
    return facts


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{file}: listed in {FACTS_FILE} but missing; run `ramen publish-index` again")
        if file.stat().st_size != expected["bytes"] or sha256(file) != expected["sha256"]:
            raise ArtifactError(
                f"{file}: differs from {FACTS_FILE}: damaged or edited; run `ramen publish-index` again"
            )
