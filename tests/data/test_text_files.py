"""Files of queries and labels: accepted formats, and errors with file and line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ramen.errors import DataError
from ramen.publishing.update import Changes, read_changes
from ramen.serving.query import Query, read_queries


def write_and_read(folder: Path, content: bytes | str, name: str = "queries.csv") -> list[Query]:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_queries(file))


def test_csv_header_is_not_read_as_query(tmp_path: Path) -> None:
    assert write_and_read(tmp_path, "uid,text\na,mail client\nb,web server\n") == [
        Query(2, "a", "mail client"), Query(3, "b", "web server"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text\nmail\n", [Query(2, None, "mail")]),
        ("\ufefftext,uid\r\nmail,a\r\n\r\nweb,b\r\n", [Query(2, "a", "mail"), Query(4, "b", "web")]),
        ('uid,text\na,"one, ""two""\nthree"\nb,four\n', [Query(2, "a", 'one, "two"\nthree'), Query(4, "b", "four")]),
        ("uid,clicks,text\na,3,mail", [Query(2, "a", "mail")]),
        (f"text\n{'x' * 200_000}\n", [Query(2, None, "x" * 200_000)]),
    ],
    ids=["no-uid", "bom-crlf-blank-line", "quotes-and-line-ends", "other-columns", "long-text"],
)
def test_csv_variants_are_read(content: str, expected: list[Query], tmp_path: Path) -> None:
    assert write_and_read(tmp_path, content) == expected


def test_tsv_is_read_with_uppercase_suffix(tmp_path: Path) -> None:
    assert write_and_read(tmp_path, "uid\ttext\na\tone, two\n", "queries.TSV") == [Query(2, "a", "one, two")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,query\na,mail\n", r"queries\.csv:1: expected the columns text and, optionally, uid, found 'id', 'query'"),
        ("", r"queries\.csv:1: expected the columns text and, optionally, uid, found none"),
        ("text,text\na,b\n", r"queries\.csv:1: expected the columns"),
        ("uid,text\na,mail\nb, \n", r"queries\.csv:3: not a query; text must not be empty"),
        ("uid,text\na,mail\n,web\n", r"queries\.csv:3: not a query; text must not be empty, nor uid"),
        ('uid,text\na,"x\ny"\na,web\n', r"queries\.csv:4: query 'a' is already on line 2"),
        ("uid,text\na,mail, client\n", r"queries\.csv:2: expected 2 fields, found 3; quote fields"),
        ('uid,text\na,"mail\nb,web\n', r"queries\.csv:2: not a query \(unexpected end of data\)"),
        (b"uid,text\na,mail\nb,caf\xe9\n", r"queries\.csv:3: expected UTF-8 text, found the byte 0xe9"),
    ],
)
def test_broken_csv_error_names_the_line(content: bytes | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        write_and_read(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_labels_to_add_are_read_from_csv(tmp_path: Path) -> None:
    add = tmp_path / "new.csv"
    add.write_text("uid,text\na,eins\n")
    assert read_changes(add, None) == Changes({"a": "eins"}, frozenset())
    add.write_text("text\neins\n")
    with pytest.raises(DataError, match=r"new\.csv:1: expected the columns uid and text, found 'text'"):
        read_changes(add, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, r"queries\.jsonl:2: not a query"),
        ('{"text": "\\ud800"}', r"queries\.jsonl:2 \[text\]: \\ud800 is not allowed in text; remove it"),
        ('{"uid": "a\\u0000", "text": "mail"}', r"queries\.jsonl:2 \[uid\]: \\0 is not allowed in text; remove it"),
        ('{"text": ["mail"]}', r"queries\.jsonl:2: not a query"),
    ],
)
def test_broken_json_error_names_the_line(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        write_and_read(tmp_path, '{"text": "web"}\n' + content, "queries.jsonl")


def test_parquet_with_invalid_utf8_is_refused(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"text": broken}), tmp_path / "queries.parquet")
    with pytest.raises(DataError, match=r"queries\.parquet: cannot be read \(text that is not UTF-8\)"):
        list(read_queries(tmp_path / "queries.parquet"))


@pytest.mark.parametrize("suffix", ["", ".jsonl", ".csv"])
def test_device_is_refused_as_a_file_of_texts(suffix: str, tmp_path: Path) -> None:
    endless = tmp_path / f"endless{suffix}"
    endless.symlink_to("/dev/zero")
    with pytest.raises(DataError, match="expected a file or a pipe, found a device; give a file"):
        list(read_queries(endless))


def test_pipe_that_is_not_utf8_is_refused_without_reading_it_again(tmp_path: Path) -> None:
    pipe = tmp_path / "queries.csv"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"text\ncaf\xe9\n",))
    writer.start()
    with pytest.raises(DataError, match=r"queries\.csv: expected UTF-8 text, found the byte 0xe9"):
        list(read_queries(pipe))
    writer.join()


def test_label_with_a_blank_uid_is_refused(tmp_path: Path) -> None:
    add = tmp_path / "new.jsonl"
    add.write_text('{"uid": " ", "text": "eins"}\n')
    with pytest.raises(DataError, match=r"new\.jsonl:1: not a label"):
        read_changes(add, None)
