"""Read files of queries to answer and of labels to add to a published index."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ramen.errors import DataError, Defect, find_lone_surrogate, locate_decoding_error

SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> separator; the first line is a header."""
TABLES = (".jsonl", ".json", ".parquet", *SEPARATORS)
"""Suffixes of files with named columns."""


def read_text_rows(path: Path, item: str, *, uid_optional: bool = False) -> Iterator[tuple[int, str | None, str]]:
    """Yield (line, uid, text) of every row of JSON lines, CSV, TSV or Parquet with the columns `uid` and `text`.

    Args:
        path: the file; its suffix is one of `TABLES`.
        item: name of a row in messages, such as "query".
        uid_optional: whether the column `uid` may be missing; the uid is None then.

    Yields:
        The line (Parquet: row) where the row begins, from 1; its uid; its text. Empty lines are skipped.

    Raises:
        DataError: the file cannot be read, a column is missing, or a row is broken or has an empty text or uid.
    """
    suffix = path.suffix.lower()
    if suffix in SEPARATORS:
        rows = _csv_rows(path, item, uid_optional)
    else:
        rows = _parquet_rows(path, uid_optional) if suffix == ".parquet" else _json_rows(path, item, uid_optional)
    for line, uid, text in rows:
        named = (isinstance(uid, str) and uid.strip()) or (uid is None and uid_optional)
        if not (named and isinstance(text, str) and text.strip()):
            raise DataError(Defect(str(path), f"not a {item}", _row_format(path, uid_optional), line=line))
        for field, value in (("uid", uid or ""), ("text", text)):
            if character := find_lone_surrogate(str(value)) or ("\\0" if "\0" in str(value) else ""):
                raise DataError(Defect(str(path), f"{character} is not allowed in text", "remove it", line, field))
        yield line, uid, text  # type: ignore[misc]


def text_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file. Raises DataError if it cannot be read."""
    _refuse_device(path)
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a text may contain U+2028
    except OSError as error:
        raise DataError(Defect(str(path), f"cannot be read ({error})")) from None
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, error, locate_decoding_error(error)[0])) from None


def _refuse_device(path: Path) -> None:
    """Raise DataError for a device such as /dev/zero, which may never end."""
    if path.is_char_device() or path.is_block_device():
        raise DataError(Defect(str(path), "expected a file or a pipe, found a device", "give a file"))


def _not_utf8(path: Path, error: UnicodeDecodeError, line: int | None = None) -> Defect:
    byte = locate_decoding_error(error)[1]
    return Defect(str(path), f"expected UTF-8 text, found the byte {byte}", "save it as UTF-8", line)


def _row_format(path: Path, uid_optional: bool) -> str:
    """Return what a valid row of the file looks like, for messages."""
    suffix = path.suffix.lower()
    if suffix in SEPARATORS:
        return "text must not be empty, nor uid if there is such a column"
    if suffix == ".parquet":
        return "uid and text must be non-empty strings"
    optional = "; uid is optional" if uid_optional else ""
    return 'a line is {"uid": "...", "text": "..."} with non-empty values' + optional


def _check_columns(path: Path, found: list[str], uid_optional: bool) -> None:
    """Raise DataError for a table without the expected columns."""
    needed = ["text"] if uid_optional else ["uid", "text"]
    if all(found.count(name) == 1 for name in needed) and found.count("uid") <= 1:
        return
    expected = "text and, optionally, uid" if uid_optional else "uid and text"
    shown = ", ".join(map(repr, found)) or "none"
    raise DataError(Defect(str(path), f"expected the columns {expected}, found {shown}", "rename the columns", line=1))


def _csv_rows(path: Path, item: str, uid_optional: bool) -> Iterator[tuple[int, object, object]]:
    """Yield rows of a CSV or TSV file, read as a stream because a quoted field may contain line ends."""
    _refuse_device(path)
    csv.field_size_limit(sys.maxsize)  # the default of 131,072 characters is too short for full texts
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=SEPARATORS[path.suffix.lower()], strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_columns(path, header, uid_optional)
            text, uid = header.index("text"), header.index("uid") if "uid" in header else None
            line = reader.line_num + 1
            for row in reader:
                if len(row) not in (0, len(header)):
                    expected = f"expected {len(header)} fields, found {len(row)}"
                    raise DataError(Defect(str(path), expected, "quote fields that contain the separator", line))
                if row:
                    yield line, None if uid is None else row[uid].strip(), row[text]
                line = reader.line_num + 1
    except OSError as error:
        raise DataError(Defect(str(path), f"cannot be read ({error})")) from None
    except UnicodeDecodeError as error:
        if path.is_file():  # a pipe cannot be read again
            text_lines(path)  # raises with the line number
        raise DataError(_not_utf8(path, error)) from None
    except csv.Error as error:
        raise DataError(Defect(str(path), f"not a {item} ({error})", "fix the CSV quoting", line)) from None


def _json_rows(path: Path, item: str, uid_optional: bool) -> Iterator[tuple[int, object, object]]:
    for number, line in enumerate(text_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            uid, text = row.get("uid") if uid_optional else row["uid"], row["text"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(Defect(str(path), f"not a {item}", _row_format(path, uid_optional), line=number)) from None
        yield number, uid, text


def _parquet_rows(path: Path, uid_optional: bool) -> Iterator[tuple[int, object, object]]:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        _check_columns(path, names := pq.read_schema(path).names, uid_optional)
        table = pq.read_table(path, columns=[name for name in ("uid", "text") if name in names])
        texts = table["text"].to_pylist()
        uids = table["uid"].to_pylist() if "uid" in names else [None] * len(table)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        why = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).splitlines()[0]
        raise DataError(Defect(str(path), f"cannot be read ({why})", "give a Parquet file")) from None
    yield from ((number, *row) for number, row in enumerate(zip(uids, texts, strict=True), 1))
