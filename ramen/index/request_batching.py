"""Answer the requests that wait together in one batch.

A server answers each request in a thread of its own. Encoding eight texts at once costs little more than encoding one,
and eight encoders at once fight for the cores; so whoever gets its turn answers everybody who waits.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ramen.index.retriever import Hit, Retriever, first_hits

BATCH = 256
"""Texts in a batch after which no further request joins it, so that many at once wait in turns."""


@dataclass
class _Request:
    texts: Sequence[str]
    k: int
    exclude: Collection[str] = ()
    answer: list[list[Hit]] = field(default_factory=list)
    error: Exception | None = None
    done: bool = False


class RequestBatcher:
    """Thread-safe `query` of a retriever; one batch is encoded at a time."""

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever
        self._turn, self._door = threading.Lock(), threading.Lock()
        # one thread for all: torch makes a new team of workers for every thread that computes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._waiting: list[_Request] = []

    def query(self, texts: Sequence[str], k: int, exclude: Collection[str] = ()) -> list[list[Hit]]:
        """As `Retriever.query`, with the same labels left out for all texts; raises what it raises for these texts, not
        for those of others."""
        request = _Request(texts, k, frozenset(exclude))
        with self._door:
            self._waiting.append(request)
        with self._turn:
            while not request.done:
                self._worker.submit(self._answer, self._next()).result()
        if request.error is not None:
            raise request.error
        return request.answer

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode texts in the worker's thread, between the batches of `query`.

        Args:
            texts: any number; queries of other threads are answered after every `BATCH` of them.

        Returns:
            float32 [n, D], unit norm.
        """
        parts = []
        for start in range(0, len(texts), BATCH):
            with self._turn:
                part = list(texts[start : start + BATCH])
                parts.append(self._worker.submit(self.retriever.encoder.encode, part).result())
        return np.concatenate(parts) if parts else np.zeros((0, self.retriever.index.d), np.float32)

    def _next(self) -> list[_Request]:
        """Those who came first, until there are enough texts."""
        with self._door:
            sizes = list(itertools.accumulate(len(request.texts) for request in self._waiting))
            count = bisect.bisect_left(sizes, BATCH) + 1
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
        assert batch, "whoever asks has a request that waits"
        return batch

    def _answer(self, batch: Sequence[_Request]) -> None:
        try:
            texts = [text for request in batch for text in request.texts]
            hits = iter(self.retriever.query(texts, max(request.k + len(request.exclude) for request in batch)))
            for request in batch:
                request.answer = [first_hits(next(hits), request.k, request.exclude) for _ in request.texts]
                request.done = True
        except Exception as error:
            if len(batch) == 1:
                batch[0].error, batch[0].done = error, True
                return
            for request in batch:  # one of them is to blame: each for itself
                self._answer([request])
