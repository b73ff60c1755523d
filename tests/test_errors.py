"""Errors: exit codes, one-line messages, escaping of foreign text."""

from __future__ import annotations

import pickle

import pytest

from ramen import errors
from ramen.console import report, warn
from ramen.errors import DataError, Defect, RamenError


def test_exit_codes_match_the_module_docstring() -> None:
    classes = [error for error in RamenError.__subclasses__() if error.__module__ == errors.__name__]
    codes = {error.__name__: error.exit_code for error in classes}
    for name, code in codes.items():
        assert f"{name} ({code})" in (errors.__doc__ or "")
    assert len(set(codes.values()) | {RamenError.exit_code}) == len(codes) + 1


@pytest.mark.parametrize(
    ("defect", "line"),
    [
        (Defect("a.txt", "too long"), "a.txt: too long"),
        (Defect("a.txt", "too long", "cut it", 3, "text"), "a.txt:3 [text]: too long; cut it"),
        (Defect("a.txt", "empty", field="text"), "a.txt [text]: empty"),
    ],
)
def test_defect_is_one_line(defect: Defect, line: str) -> None:
    assert str(defect) == line


def test_data_error_has_one_line_per_defect() -> None:
    error = DataError(Defect("a", "x"), Defect("b", "y", line=2))
    assert str(error).splitlines() == ["a: x", "b:2: y"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\nb\r\x1b[31m\x07\x9b", r"a\nb\r\x1b[31m\x07\x9b"),
        ("a\u2028b\u2029\x85c", r"a\u2028b\u2029\x85c"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\ud800 caf\udce9", r"\ud800 caf\xe9"),
        ("ラーメン é \u200d 😀 \u3000", "ラーメン é \u200d 😀 \u3000"),
    ],
)
def test_message_is_one_line_of_printable_text(text: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.printable(text) == str(RamenError(text)) == line
    assert str(DataError(Defect(text, "x"), Defect("f", text))).splitlines() == [f"{line}: x", f"f: {line}"]
    assert errors.error_lines(str(RamenError(text))) == [f"error: {line}"]
    warn(text)
    assert capsys.readouterr().err == f"warning: {line}\n"
    report(text)
    assert capsys.readouterr().err == f"{line}\n"


def test_long_value_is_shortened() -> None:
    line = str(RamenError(f"x.txt: {'a' * 10**6}; do this"))
    assert len(line) < 1100 and line.startswith("x.txt: aaa") and line.endswith("aaa; do this")
    assert "(999,016 characters left out)" in line
    assert errors.short_repr("a" * 100) == "'" + "a" * 79 + "..."
    assert errors.short_repr(10**5000).startswith("a number of thousands")


def test_number_of_a_system_error_is_removed() -> None:
    full = OSError(28, "No space left on device", "/data/x")
    assert str(RamenError(f"ingest: {full}; no output was changed")) == (
        "ingest: /data/x: No space left on device; no output was changed"
    )
    assert str(RamenError(str(OSError(28, "No space left on device")))) == "No space left on device"


def test_data_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(DataError(Defect("a\nb", "x"), Defect("c", "y"))))
    assert str(error).splitlines() == [r"a\nb: x", "c: y"] and len(error.defects) == 2
