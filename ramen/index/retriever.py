"""The retriever: encoder, index and label table together, because vectors of another encoder mean nothing.

On disk it is two places: the encoder's directory, and a directory with `index.faiss`, `labels.parquet` and
`retriever.json`. The last lists size and sha256 of every file of both; nothing is opened before they agree.
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

from ramen.artifacts import is_inside, manifest_forms
from ramen.config import EncoderConfig
from ramen.errors import ArtifactError, RamenError
from ramen.files import checked, read_json, read_texts, sha256, shown, write_text, write_texts
from ramen.index.build import read_index, write_index

FORMAT = 1
INDEX_FILE = "index.faiss"
LABELS_FILE = "labels.parquet"
FACTS_FILE = "retriever.json"
DEFAULT_K, MOST_LABELS = 10, 1000
"""Labels a text is answered with, unless told otherwise, and at most over HTTP."""


class TextEncoder(Protocol):
    """What turns texts into vectors."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [n, D], unit-norm rows."""


@dataclass(frozen=True)
class Hit:
    """One retrieved label; `score` is the cosine."""

    uid: str
    text: str
    score: float


class Retriever:
    """Answers texts with labels.

    Args:
        encoder: the encoder whose label embeddings are in the index.
        index: a faiss index; id i is label i.
        uids, texts: the label table.
        identity: by what a query is recognised as a label, "uid" or "text"; "" = no query is one.
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
        """Check every file against `retriever.json`, then open encoder, index and label table.

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
        """The k best labels of each text, best first; fewer when there are fewer labels.

        Args:
            texts: queries.
            k: labels of each.
            exclude: uids of labels that are left out, for each text; empty = none of any.

        Raises:
            RamenError: k is below 1, or a text is no valid Unicode.
        """
        if k < 1:
            raise RamenError(f"k = {k}: at least 1 label must be asked for")
        if not len(texts):
            return []
        for text in texts:
            check_unicode(text)
        depth = min(k + max(map(len, exclude), default=0), len(self))
        scores_nk, ids_nk = self.index.search(self.encoder.encode(list(texts)), depth)
        found = [self._hits(scores, ids) for scores, ids in zip(scores_nk, ids_nk, strict=True)]
        return [
            first_hits(hits, k, left_out) for hits, left_out in zip(found, exclude or [()] * len(found), strict=True)
        ]

    @cached_property
    def _uids_of_text(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for uid, text in zip(self.uids, self.texts, strict=True):
            found.setdefault(" ".join(text.split()), []).append(uid)
        return found

    def own_labels(self, uid: str, text: str) -> Collection[str]:
        """Uids of the labels that are the query itself, as training recognised them (`data.filters`)."""
        if self.identity == "uid":
            return (uid,)
        return self._uids_of_text.get(" ".join(text.split()), ()) if self.identity == "text" else ()

    def _hits(self, scores: NDArray[np.float32], ids: NDArray[np.int64]) -> list[Hit]:
        # lexsort: equal scores come in label order; HNSW pads with id -1 when its graph runs out
        order = [i for i in np.lexsort((ids, -scores)) if ids[i] >= 0]
        return [Hit(self.uids[ids[i]], self.texts[ids[i]], float(scores[i])) for i in order]


def check_unicode(text: str) -> None:
    """Raise RamenError for a text with a lone surrogate, which no tokenizer and no UTF-8 file takes.

    A command line that is not UTF-8, and JSON such as "\\ud800", give one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RamenError(
            f"query: character {error.start + 1} is a lone surrogate (U+{ord(text[error.start]):04X}); give valid UTF-8"
        ) from None


def first_hits(hits: Sequence[Hit], k: int, exclude: Collection[str]) -> list[Hit]:
    """The first k hits that are not excluded."""
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
        facts: what a reader may want to know (kind, parameters, width); content only, no times.
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
    path, again = folder / FACTS_FILE, "run `ramen publish-index` again"
    if not path.exists():
        raise ArtifactError(f"{path}: missing: not a retriever; run `ramen publish-index`")
    facts: dict[str, Any] = read_json(path, dict[str, Any], remedy=again)
    if facts.get("format") != FORMAT:
        raise ArtifactError(f"{path}: format {shown(facts.get('format'))}, this version reads {FORMAT}; {again}")
    files = manifest_forms()["files"]
    for key, form in {"index": dict[str, Any], "files": files, "encoder": files}.items():
        checked(facts.get(key), form, f"{path}: {key}", again)
    for name in (*facts["files"], *facts["encoder"]):
        if not is_inside(name):
            raise ArtifactError(f"{path}: {shown(name)} is not a path inside the retriever; {again}")
    if lost := {INDEX_FILE, LABELS_FILE} - set(facts["files"]):
        raise ArtifactError(f"{path}: files: does not list {sorted(lost)[0]}; {again}")
    return facts


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, though listed in {FACTS_FILE}; run `ramen publish-index` again")
        if file.stat().st_size != expected["bytes"] or sha256(file) != expected["sha256"]:
            raise ArtifactError(
                f"{file}: differs from {FACTS_FILE}: damaged or edited; run `ramen publish-index` again"
            )
