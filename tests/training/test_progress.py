"""Progress reports in logs and on terminals."""

from __future__ import annotations

import io
import re

import pytest

from ramen.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_a_parsable_line_per_interval_and_a_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ramen.training.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    reporter = Progress("warmup", 1000, "documents", 200, stream)
    for _ in range(8):
        now[0] += 4.0
        reporter.advance(100, "epoch 1/2 loss 0.5000 lambda 0.1 memory 1.0 GiB")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3, "every ten seconds, and at the end"
    pattern = (
        r"warmup (\d+)/1000 documents (\d+)/s eta (\d+:\d\d:\d\d) epoch 1/2 loss 0\.5000 lambda 0\.1 memory 1\.0 GiB"
    )
    matches = [re.fullmatch(pattern, line) for line in lines]
    assert all(matches), lines
    assert [match.group(1) for match in matches if match] == ["500", "800", "1000"]
    assert {match.group(2) for match in matches if match} == {"25"}, "items finished before resuming do not count"
    assert [match.group(3) for match in matches if match] == ["0:00:20", "0:00:08", "0:00:00"]


def test_terminal_gets_one_rewritten_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ramen.training.progress.time.monotonic", lambda: now[0])
    stream = Terminal()
    reporter = Progress("retrain", 300, "documents", 0, stream)
    for _ in range(3):
        now[0] += 1.0
        reporter.advance(100, "loss 0.1")
    text = stream.getvalue()
    assert text.count("\r") == 3 and text.count("\n") == 1 and text.endswith("\n")
