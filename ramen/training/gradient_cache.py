"""Encode the texts of a step and carry the gradient back, with gradient caching and several processes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramen.encoder.model import SentenceEncoder, Weights
from ramen.encoder.packing import Pack
from ramen.encoder.tokens import Batch, TokenStore
from ramen.training.distributed import Processes


class StepEncoder:
    """Encodes the distinct texts of a step.

    The loss is computed on detached vectors; its gradient with respect to them is then carried back to the encoder. So
    each process keeps the activations of its own share only. With `caching` it keeps those of one chunk only: vectors
    are computed twice, first without activations, then chunk by chunk with them (Gao et al., Scaling deep contrastive
    learning batch size under memory limited setup, 2021).

    Args:
        encoder: the encoder, trained in place.
        store: tokens of the texts.
        processes: the processes that share the work.
        caching: compute the vectors twice and keep one chunk's activations.
    """

    def __init__(self, encoder: SentenceEncoder, store: TokenStore, processes: Processes, caching: bool) -> None:
        self.encoder, self.store, self.processes, self.caching = encoder, store, processes, caching
        self._batches: list[tuple[NDArray[np.int64], Pack | Batch]] = []
        self._share: NDArray[np.int64] = np.zeros(0, np.int64)
        self._vectors: Tensor | None = None
        self._gathered: Tensor | None = None
        self._weights: Weights | None = None
        self._seed = 0

    def forward(self, texts: NDArray[np.int64], seed: int) -> Tensor:
        """Vectors of texts.

        Args:
            texts: int64 [n] distinct text numbers, the same in every process.
            seed: of the step's dropout.

        Returns:
            float32 [n, D], a leaf that accumulates a gradient.
        """
        shares = self.processes.shares(self.store.lengths_of(texts))
        self._share, self._seed = shares[self.processes.rank], seed
        self._batches = self.encoder.batches(self.store, texts[self._share], self.encoder.settings.tokens_per_chunk)
        with torch.set_grad_enabled(not self.caching):
            self._weights = self.encoder.working_weights()
            parts = [self._encode(i) for i in range(len(self._batches))]
            vectors = torch.cat(parts) if parts else torch.zeros(0, self.encoder.dimension, device=self.encoder.device)
            vectors = vectors.index_select(0, self._order().argsort().to(vectors.device))
        self._vectors = None if self.caching else vectors
        self._gathered = self.processes.gather(vectors, shares).requires_grad_()
        return self._gathered

    def backward(self) -> None:
        """Carry the gradient of the vectors back to the parameters, summed over all processes."""
        assert self._gathered is not None and self._gathered.grad is not None
        gradient = self._gathered.grad.index_select(0, torch.from_numpy(self._share).to(self._gathered.device))
        if self._vectors is not None and len(self._share):
            self._vectors.backward(gradient)  # type: ignore[no-untyped-call]
        elif self._vectors is None:
            self._weights = self.encoder.working_weights()
            for i, (places, _) in enumerate(self._batches):
                rows = torch.from_numpy(places).to(gradient.device)
                self._encode(i).backward(gradient.index_select(0, rows))  # type: ignore[no-untyped-call]
        self._vectors = self._gathered = self._weights = None
        self.processes.sum_gradients(self.encoder.parameters())

    def _encode(self, chunk: int) -> Tensor:
        # the same dropout in both computations of a chunk
        self.encoder.seed(self._seed + chunk * self.processes.size + self.processes.rank)
        return self.encoder(self._batches[chunk][1], self._weights)  # type: ignore[no-any-return]

    def _order(self) -> Tensor:
        if not self._batches:
            return torch.zeros(0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate([places for places, _ in self._batches]))
