"""Query a published retriever with one text or a file of texts, and format or write the answers."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from ramen.data.text_files import TABLES, read_text_rows, text_lines
from ramen.errors import DataError, Defect, RamenError
from ramen.files import atomic_write
from ramen.index.retriever import DEFAULT_K, Hit

BLOCK = 4096
"""Queries of a file that are answered in one batch."""
COLUMNS = ("query", "text", "rank", "label", "label_text", "score")
"""Columns of answers: uid (or line) and text of the query, rank from 1, uid and text of the label, cosine."""


def answer(text: str, *, k: int = DEFAULT_K, model: str = "ramen", version: str = "champion") -> list[Hit]:
    """Return the k best labels of a text from a registered version (number or alias). Raises RamenError."""
    from ramen.publishing.registry import load_version

    return load_version(model, version).query([text], k)[0]


@dataclass(frozen=True)
class Query:
    """One query of a file: the line where it begins (from 1), its uid if the file has uids, its text."""

    line: int
    uid: str | None
    text: str

    @property
    def name(self) -> str:
        """The uid, else the line number: the value of the column `query` in the answers."""
        return str(self.line) if self.uid is None else self.uid


def answer_file(path: Path, out: Path, *, k: int = DEFAULT_K, model: str = "ramen", version: str = "champion") -> int:
    """Answer every query of a file.

    Args:
        path: JSON lines, CSV, TSV or Parquet with the columns `text` and optionally `uid`; any other suffix: one query
            per line. For a query with a uid, the label that is the query itself is left out, as in evaluation.
        out: file to write, with the columns `COLUMNS`, best label first; its suffix is one of `FORMATS`.
        k: labels per query.
        model, version: registered model; version by number or alias.

    Returns:
        The number of queries.

    Raises:
        RamenError: there is no such version, or `out` has another suffix; DataError: a query is broken.
    """
    from ramen.publishing.registry import load_version
    from ramen.training.progress import Progress

    if out.suffix.lower() not in FORMATS:
        formats = ", ".join(FORMATS)
        raise RamenError(f"{out}: answers cannot be written as {out.suffix or 'a file without suffix'}; use {formats}")
    if os.path.realpath(out) == os.path.realpath(path):
        raise RamenError(f"{out}: holds the queries; write the answers to another file")
    queries = list(read_queries(path))
    if not queries:
        raise DataError(Defect(str(path), "expected queries, found none"))
    retriever, progress = load_version(model, version), Progress("query", len(queries), "queries")
    remaining = iter(queries)
    with atomic_write(out) as temporary, FORMATS[out.suffix.lower()](temporary) as write:
        while block := list(islice(remaining, BLOCK)):
            exclude = [() if query.uid is None else retriever.own_labels(query.uid, query.text) for query in block]
            answers = retriever.query([query.text for query in block], k, exclude)
            write(
                [
                    (query.name, query.text, rank, hit.uid, hit.text, hit.score)
                    for query, hits in zip(block, answers, strict=True)
                    for rank, hit in enumerate(hits, 1)
                ]
            )
            progress.advance(len(block), "")
    return len(queries)


def read_queries(path: Path) -> Iterator[Query]:
    """Yield the queries of a file. Raises DataError for a uid that occurs twice: its answers would be ambiguous."""
    if path.suffix.lower() in TABLES:
        seen: dict[str, int] = {}
        for line, uid, text in read_text_rows(path, "query", uid_optional=True):
            if uid is not None and (first := seen.setdefault(uid, line)) != line:
                defect = f"query {uid!r} is already on line {first}"
                raise DataError(Defect(str(path), defect, "give every query a different uid", line))
            yield Query(line, uid, text)
        return
    lines = enumerate(text_lines(path), 1)
    yield from (Query(number, None, line.strip()) for number, line in lines if line.strip())


Row = tuple[str, str, int, str, str, float]
Write = Callable[[Sequence[Row]], None]


@contextmanager
def _open_parquet(path: Path) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = (pa.string(), pa.string(), pa.int32(), pa.string(), pa.string(), pa.float32())
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def write(rows: Sequence[Row]) -> None:
            columns = zip(*rows, strict=True) if rows else [()] * len(types)
            writer.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True)), schema))

        yield write


@contextmanager
def _open_separated(separator: str, path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, delimiter=separator, lineterminator="\n")
        writer.writerow(COLUMNS)
        yield lambda rows: writer.writerows((*row[:-1], f"{row[-1]:.6f}") for row in rows)


@contextmanager
def _open_json_lines(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as stream:
        yield lambda rows: stream.writelines(
            json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n" for row in rows
        )


FORMATS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    ".parquet": _open_parquet,
    ".csv": partial(_open_separated, ","),
    ".tsv": partial(_open_separated, "\t"),
    ".jsonl": _open_json_lines,
}
"""Suffix of a file of answers -> context manager that yields a function to write rows."""


def format_table(hits: Sequence[Hit]) -> str:
    """Return a plain-text table: rank, cosine, uid, text."""
    if not hits:
        return "no labels"
    width = max(3, *(len(hit.uid) for hit in hits))
    rows = [f"{rank:>4}  {hit.score:>6.3f}  {hit.uid:<{width}}  {hit.text}" for rank, hit in enumerate(hits, start=1)]
    return "\n".join([f"{'rank':>4}  {'cosine':>6}  {'uid':<{width}}  text", *rows])


def format_json(hits: Sequence[Hit]) -> str:
    """Return a JSON list of {uid, text, score}, best first."""
    return json.dumps([asdict(hit) for hit in hits], ensure_ascii=False)
