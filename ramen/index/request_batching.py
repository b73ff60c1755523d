"""Batch the queries of concurrent requests.

A server handles each request in its own thread. Encoding eight texts in one batch costs little more than encoding one,
while eight concurrent encoders compete for the cores. So the thread that gets the lock answers all pending requests.
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

BATCH_SIZE = 256
"""Texts after which no further request joins a batch; a single larger request is still one batch."""


@dataclass
class _Request:
    texts: Sequence[str]
    k: int
    exclude: Collection[str] = ()
    answers: list[list[Hit]] = field(default_factory=list)
    error: Exception | None = None
    done: bool = False


class RequestBatcher:
    """Thread-safe queries of a retriever, encoded one batch at a time."""

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever
        self._batch_lock, self._pending_lock = threading.Lock(), threading.Lock()
        # torch starts a new pool of workers for every thread that computes, so one thread encodes all batches
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._pending: list[_Request] = []

    def query(self, texts: Sequence[str], k: int, exclude: Collection[str] = ()) -> list[list[Hit]]:
        """Answer as `Retriever.query` does.

        Args:
            texts: queries.
            k: labels per text.
            exclude: uids that are left out of the answers to all texts.

        Raises:
            Exception: what `Retriever.query` raises for these texts; errors of other requests are not raised here.
        """
        request = _Request(texts, k, frozenset(exclude))
        with self._pending_lock:
            self._pending.append(request)
        with self._batch_lock:
            while not request.done:
                self._worker.submit(self._answer, self._take_batch()).result()
        if request.error is not None:
            raise request.error
        return request.answers

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Encode texts in the worker thread; pending queries may run after every `BATCH_SIZE` of them.

        Returns:
            float32 [n, D], unit norm.
        """
        parts = []
        for start in range(0, len(texts), BATCH_SIZE):
            with self._batch_lock:
                part = list(texts[start : start + BATCH_SIZE])
                parts.append(self._worker.submit(self.retriever.encoder.encode, part).result())
        return np.concatenate(parts) if parts else np.zeros((0, self.retriever.index.d), np.float32)

    def _take_batch(self) -> list[_Request]:
        """Remove and return the oldest requests that together hold at least `BATCH_SIZE` texts, or all."""
        with self._pending_lock:
            sizes = list(itertools.accumulate(len(request.texts) for request in self._pending))
            count = bisect.bisect_left(sizes, BATCH_SIZE) + 1
            batch, self._pending = self._pending[:count], self._pending[count:]
        assert batch, "the calling thread has a pending request"
        return batch

    def _answer(self, batch: Sequence[_Request]) -> None:
        try:
            texts = [text for request in batch for text in request.texts]
            hits = iter(self.retriever.query(texts, max(request.k + len(request.exclude) for request in batch)))
            for request in batch:
                request.answers = [first_hits(next(hits), request.k, request.exclude) for _ in request.texts]
                request.done = True
        except Exception as error:
            if len(batch) == 1:
                batch[0].error, batch[0].done = error, True
                return
            for request in batch:  # answer each alone, so that only the request at fault fails
                self._answer([request])
