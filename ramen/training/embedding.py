"""Embed stored texts without gradients, shared among the training processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ramen.encoder.model import SentenceEncoder
from ramen.encoder.tokens import TokenStore
from ramen.training.distributed import Processes

BLOCK = {"cpu": 4096, "cuda": 1 << 17}
"""Texts that a process encodes between two checks for an interruption: seconds, not minutes."""


@dataclass
class TextEmbedder:
    """Embeds texts of a token store with the current weights.

    Attributes:
        encoder: the encoder.
        store: tokens of the texts.
        processes: the processes that share the work.
        tokens, seconds: work done so far, for estimates.
    """

    encoder: SentenceEncoder
    store: TokenStore
    processes: Processes
    tokens: int = 0
    seconds: float = 0.0

    def embed(self, texts: NDArray[np.int64], before_block: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """Vectors of texts, float32 [n, D], the same in every process.

        Args:
            texts: int64 [n] text numbers.
            before_block: called before each block, in every process alike; may raise.
        """
        started = time.monotonic()
        vectors = np.empty((len(texts), self.encoder.dimension), np.float32)
        size = BLOCK[self.encoder.device.type] * self.processes.size
        for start in range(0, len(texts), size):
            before_block()
            block = texts[start : start + size]
            shares = self.processes.shares(self.store.lengths_of(block))
            encoded = torch.from_numpy(self.encoder.embed(self.store, block[shares[self.processes.rank]]))
            if self.processes.size > 1:
                encoded = self.processes.gather(encoded.to(self.encoder.device), shares).cpu()
            vectors[start : start + size] = encoded.numpy()
        self.tokens += int(self.store.lengths_of(texts).sum())
        self.seconds += time.monotonic() - started
        return vectors

    def estimate_seconds(self, tokens: int) -> float:
        """Seconds that so many tokens take, from the work done so far; 0 before any."""
        return self.seconds / max(self.tokens, 1) * tokens
