"""What a person and a log reader see of a long loop."""

from __future__ import annotations

import io
import re

import pytest

from ramen.training import progress
from ramen.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_parsable_line_per_interval_and_a_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress("warmup", 1000, "documents", 200, stream)
    for _ in range(8):
        now[0] += 4.0
        shown.advance(100, "epoch 1/2 loss 0.5000 lambda 0.1 memory 1.0 GiB")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3, "every ten seconds, and at the end"
    pattern = (
        r"warmup (\d+)/1000 documents (\d+)/s eta (\d+:\d\d:\d\d) epoch 1/2 loss 0\.5000 lambda 0\.1 memory 1\.0 GiB"
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert all(found), lines
    assert [m.group(1) for m in found if m] == ["500", "800", "1000"]
    assert {m.group(2) for m in found if m} == {"25"}, "what was done before a resume does not count for the rate"
    assert [m.group(3) for m in found if m] == ["0:00:20", "0:00:08", "0:00:00"]


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = Terminal()
    shown = Progress("retrain", 300, "documents", 0, stream)
    for _ in range(3):
        now[0] += 1.0
        shown.advance(100, "loss 0.1")
    text = stream.getvalue()
    assert text.count("\r") == 3 and text.count("\n") == 1 and text.endswith("\n")
