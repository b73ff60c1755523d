"""Files of texts that a published retriever is given: labels to add, queries to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ramen.artifacts import read_texts
from ramen.errors import DataError, Problem, undecoded


def text_rows(path: Path, item: str) -> Iterator[tuple[int, str, str]]:
    """(row, uid, text) of every row, from 1: of JSON lines of `uid` and `text`, or a Parquet file with these columns.

    Args:
        path: the file.
        item: what a row is, for messages.

    Raises:
        DataError: the file cannot be read, or a row is broken; empty lines are passed over.
    """
    for number, uid, text in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path, item):
        if not (isinstance(uid, str) and isinstance(text, str) and uid and text.strip()):
            raise DataError(Problem(str(path), f"not a {item}", _form(path), line=number))
        yield number, uid, text


def text_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file. Raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines
    except OSError as error:
        raise DataError(Problem(str(path), f"cannot be read ({error})")) from None
    except UnicodeDecodeError as error:
        line, byte = undecoded(error)
        raise DataError(
            Problem(str(path), f"expected UTF-8 text, found the byte {byte}", "save it as that", line)
        ) from None


def _form(path: Path) -> str:
    parquet = path.suffix == ".parquet"
    return ("uid and text are texts" if parquet else 'a line is {"uid": "...", "text": "..."}') + ", neither empty"


def _json_rows(path: Path, item: str) -> Iterator[tuple[int, object, object]]:
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = row["uid"], row["text"]
        except (ValueError, KeyError, TypeError):
            raise DataError(Problem(str(path), f"not a {item}", _form(path), line=number)) from None
        yield number, *found


def _parquet_rows(path: Path) -> Iterator[tuple[int, object, object]]:
    import pyarrow

    try:
        uids, texts = read_texts(path)
    except (OSError, pyarrow.ArrowException) as error:
        why = str(error).splitlines()[0]
        raise DataError(Problem(str(path), f"cannot be read ({why})", "give columns uid and text")) from None
    for number, (uid, text) in enumerate(zip(uids, texts, strict=True), 1):
        yield number, uid, text
