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


class BlockingEncoder:
    """Encodes numbers, blocks until `unblocked` is set, and raises for the text "bad"."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.unblocked = threading.Event()
        self.entered = threading.Event()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(len(texts))
        self.entered.set()
        self.unblocked.wait(20)
        if "bad" in texts:
            raise ValueError("bad text")
        return np.stack([LABELS[int(text)] + 0.1 * LABELS[(int(text) + 1) % 16] for text in texts])


@pytest.fixture
def encoder() -> BlockingEncoder:
    return BlockingEncoder()


@pytest.fixture
def batcher(encoder: BlockingEncoder) -> RequestBatcher:
    names = [f"l{i}" for i in range(16)]
    return RequestBatcher(Retriever(encoder, build_index(LABELS, IndexConfig(kind="flat")), names, names))


def test_each_request_of_a_batch_excludes_its_own_uids(encoder: BlockingEncoder, batcher: RequestBatcher) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.query, ["9"], 1)
        encoder.entered.wait(20)
        pending = [pool.submit(batcher.query, ["0"], 2, exclude) for exclude in ((), ("l0",), ("l1", "l0"))]
        time.sleep(0.2)
        encoder.unblocked.set()
        uids = [[hit.uid for hit in request.result()[0]] for request in pending]
        assert first.result()[0][0].uid == "l9"
    assert uids[0] == ["l0", "l1"] and uids[1][0] == "l1" and "l0" not in uids[1]
    assert len(uids[2]) == 2 and not {"l0", "l1"} & set(uids[2])
    assert len(encoder.batches) == 2, "the three pending requests are one batch"


def test_pending_requests_are_one_batch_and_each_gets_its_answer(
    encoder: BlockingEncoder, batcher: RequestBatcher
) -> None:
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(batcher.query, ["0"], 1)
        assert encoder.entered.wait(10)
        rest = [pool.submit(batcher.query, [str(i), str(i + 1)], 1 + i % 2) for i in range(1, 11)]
        while len(batcher._pending) < 10:
            time.sleep(0.01)
        encoder.unblocked.set()
        assert [hit.uid for hit in first.result()[0]] == ["l0"]
        for i, future in enumerate(rest, 1):
            k = 1 + i % 2
            expected = [[f"l{i}", f"l{i + 1}"][:k], [f"l{i + 1}", f"l{(i + 2) % 16}"][:k]]
            assert [[hit.uid for hit in hits] for hits in future.result()] == expected
    assert encoder.batches == [1, 20]


def test_error_is_raised_only_in_the_request_that_caused_it(encoder: BlockingEncoder, batcher: RequestBatcher) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(batcher.query, ["0"], 1)
        assert encoder.entered.wait(10)
        good, bad = pool.submit(batcher.query, ["3"], 1), pool.submit(batcher.query, ["bad"], 1)
        while len(batcher._pending) < 2:
            time.sleep(0.01)
        encoder.unblocked.set()
        assert first.result() and good.result()[0][0].uid == "l3"
        with pytest.raises(ValueError, match="bad text"):
            bad.result()
    assert batcher.query(["5"], 1)[0][0].uid == "l5", "later requests are answered"


def test_batches_close_at_the_batch_size(
    encoder: BlockingEncoder, batcher: RequestBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.index.request_batching.BATCH_SIZE", 5)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(batcher.query, ["0"], 1)
        assert encoder.entered.wait(10)
        rest = [pool.submit(batcher.query, [str(i)] * 3, 1) for i in range(1, 8)]
        while len(batcher._pending) < 7:
            time.sleep(0.01)
        encoder.unblocked.set()
        assert first.result()
        assert [future.result()[2][0].uid for future in rest] == [f"l{i}" for i in range(1, 8)]
    assert encoder.batches == [1, 6, 6, 6, 3]
