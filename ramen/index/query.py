"""Ask a published retriever, one text or a file of them, and give its answer for people or for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from ramen.artifacts import replacing
from ramen.errors import DataError, Problem, RamenError
from ramen.index.retriever import DEFAULT_K, Hit
from ramen.index.texts import text_lines, text_rows

BLOCK = 4096
"""Queries of a file answered at a time."""


def answer(text: str, *, k: int = DEFAULT_K, model: str = "ramen", version: str = "champion") -> list[Hit]:
    """The k best labels of a text, from a registered version (number or alias). Raises RamenError."""
    from ramen.index.registry import load_version

    return load_version(model, version).query([text], k)[0]


def answer_file(path: Path, out: Path, *, k: int = DEFAULT_K, model: str = "ramen", version: str = "champion") -> int:
    """Answer every query of a file.

    Args:
        path: JSON lines of `uid` and `text` (`.jsonl`, `.json`), a Parquet file with these columns, or any other text
            file: a query per line, whose uid is the number of the line.
        out: Parquet file to be written: query (uid), rank (from 1), label (uid), score (cosine); best first.
        k: labels of each query.
        model, version: registered model; version by number or alias.

    Returns:
        How many queries were answered.

    Raises:
        RamenError: no such version, `out` is no Parquet file by its name; DataError: a query is broken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ramen.index.registry import load_version
    from ramen.training.progress import Progress

    if out.suffix != ".parquet":
        raise RamenError(f"{out}: answers are written as Parquet; give a name that ends in .parquet")
    if out.resolve() == path.resolve():
        raise RamenError(f"{out}: holds the queries; give the answers another name")
    queries = list(_queries(path))
    if not queries:
        raise DataError(Problem(str(path), "expected queries, found none"))
    retriever, progress = load_version(model, version), Progress("query", len(queries), "queries")
    types = {"query": pa.string(), "rank": pa.int32(), "label": pa.string(), "score": pa.float32()}
    schema, rest = pa.schema(list(types.items())), iter(queries)
    with replacing(out) as beside, pq.ParquetWriter(beside, schema, compression="zstd") as writer:
        while block := list(islice(rest, BLOCK)):
            answers = retriever.query([text for _, text in block], k)
            rows = [
                (uid, rank, hit.uid, hit.score)
                for (uid, _), hits in zip(block, answers, strict=True)
                for rank, hit in enumerate(hits, 1)
            ]
            columns = zip(*rows, strict=True) if rows else [()] * len(types)
            writer.write_table(pa.table(dict(zip(types, columns, strict=True)), schema))
            progress.advance(len(block), "")
    return len(queries)


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    """(uid, text) of every query of a file. Raises DataError for a uid that comes twice: whose answers were they?"""
    if path.suffix in (".parquet", ".jsonl", ".json"):
        seen: dict[str, int] = {}
        for row, uid, text in text_rows(path, "query"):
            if (first := seen.setdefault(uid, row)) != row:
                expected = f"query {uid!r} is already on line {first}"
                raise DataError(Problem(str(path), expected, "give every query a uid of its own", row))
            yield uid, text
        return
    lines = enumerate(text_lines(path), 1)
    yield from ((str(number), line.strip()) for number, line in lines if line.strip())


def as_table(hits: Sequence[Hit]) -> str:
    """A plain table: rank, cosine, uid, text."""
    if not hits:
        return "no labels"
    width = max(3, *(len(hit.uid) for hit in hits))
    rows = [f"{rank:>4}  {hit.score:>6.3f}  {hit.uid:<{width}}  {hit.text}" for rank, hit in enumerate(hits, start=1)]
    return "\n".join([f"{'rank':>4}  {'cosine':>6}  {'uid':<{width}}  text", *rows])


def as_json(hits: Sequence[Hit]) -> str:
    """A JSON list of {uid, text, score}, best first."""
    return json.dumps([asdict(hit) for hit in hits], ensure_ascii=False)
