from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from ramen.config import IndexConfig
from ramen.index.build import build_index
from ramen.index.request_batching import RequestBatcher
from ramen.index.retriever import Retriever

LABELS = np.eye(16, dtype=np.float32)


class Gate:
    """An encoder of numbers that stands still until it is opened, and refuses the text "bad"."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.open = threading.Event()
        self.entered = threading.Event()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(len(texts))
        self.entered.set()
        self.open.wait(20)
        if "bad" in texts:
            raise ValueError("bad text")
        return np.stack([LABELS[int(text)] + 0.1 * LABELS[(int(text) + 1) % 16] for text in texts])


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def combiner(gate: Gate) -> RequestBatcher:
    names = [f"l{i}" for i in range(16)]
    return RequestBatcher(Retriever(gate, build_index(LABELS, IndexConfig(kind="flat")), names, names))


def test_requests_that_wait_together_exclude_their_own_labels(gate: Gate, combiner: RequestBatcher) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(combiner.query, ["9"], 1)
        gate.entered.wait(20)
        waiting = [pool.submit(combiner.query, ["0"], 2, left_out) for left_out in ((), ("l0",), ("l1", "l0"))]
        time.sleep(0.2)
        gate.open.set()
        found = [[hit.uid for hit in request.result()[0]] for request in waiting]
        assert first.result()[0][0].uid == "l9"
    assert found[0] == ["l0", "l1"] and found[1][0] == "l1" and "l0" not in found[1]
    assert len(found[2]) == 2 and not {"l0", "l1"} & set(found[2])
    assert len(gate.batches) == 2, "one batch"


def test_requests_that_wait_are_encoded_together_and_each_gets_its_own_answer(
    gate: Gate, combiner: RequestBatcher
) -> None:
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(combiner.query, ["0"], 1)
        assert gate.entered.wait(10)
        rest = [pool.submit(combiner.query, [str(i), str(i + 1)], 1 + i % 2) for i in range(1, 11)]
        while len(combiner._waiting) < 10:
            time.sleep(0.01)
        gate.open.set()
        assert [hit.uid for hit in first.result()[0]] == ["l0"]
        for i, future in enumerate(rest, 1):
            k = 1 + i % 2
            wanted = [[f"l{i}", f"l{i + 1}"][:k], [f"l{i + 1}", f"l{(i + 2) % 16}"][:k]]
            assert [[hit.uid for hit in hits] for hits in future.result()] == wanted
    assert gate.batches == [1, 20]


def test_error_reaches_the_request_that_caused_it_and_no_other(gate: Gate, combiner: RequestBatcher) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(combiner.query, ["0"], 1)
        assert gate.entered.wait(10)
        good, bad = pool.submit(combiner.query, ["3"], 1), pool.submit(combiner.query, ["bad"], 1)
        while len(combiner._waiting) < 2:
            time.sleep(0.01)
        gate.open.set()
        assert first.result() and good.result()[0][0].uid == "l3"
        with pytest.raises(ValueError, match="bad text"):
            bad.result()
    assert combiner.query(["5"], 1)[0][0].uid == "l5", "it goes on"


def test_many_texts_at_once_are_answered_in_turns(
    gate: Gate, combiner: RequestBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.index.request_batching.BATCH", 5)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(combiner.query, ["0"], 1)
        assert gate.entered.wait(10)
        rest = [pool.submit(combiner.query, [str(i)] * 3, 1) for i in range(1, 8)]
        while len(combiner._waiting) < 7:
            time.sleep(0.01)
        gate.open.set()
        assert first.result()
        assert [future.result()[2][0].uid for future in rest] == [f"l{i}" for i in range(1, 8)]
    assert gate.batches == [1, 6, 6, 6, 3]
