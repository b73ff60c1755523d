"""One tree of errors with the documented exit codes, and problems that read as one line."""

from __future__ import annotations

import pytest

from ramen import errors
from ramen.errors import DataError, Problem, RamenError


def test_exit_codes_are_as_documented() -> None:
    classes = [error for error in RamenError.__subclasses__() if error.__module__ == errors.__name__]
    codes = {error.__name__: error.exit_code for error in classes}
    for name, code in codes.items():
        assert f"{name} ({code})" in (errors.__doc__ or "")
    assert len(set(codes.values()) | {RamenError.exit_code}) == len(codes) + 1


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem("a.txt", "too long"), "a.txt: too long"),
        (Problem("a.txt", "too long", "cut it", 3, "text"), "a.txt:3 [text]: too long; cut it"),
        (Problem("a.txt", "empty", field="text"), "a.txt [text]: empty"),
    ],
)
def test_a_problem_is_one_line(problem: Problem, line: str) -> None:
    assert str(problem) == line


def test_a_data_error_has_a_line_per_problem() -> None:
    error = DataError(Problem("a", "x"), Problem("b", "y", line=2))
    assert str(error).splitlines() == ["a: x", "b:2: y"]
