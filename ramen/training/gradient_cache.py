"""A step's texts to vectors and the gradient back, in chunks and by several processes."""

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

    The loss is computed on vectors cut off from the encoder, and its gradient with respect to them is carried back
    afterwards. So each process needs the activations of its own share only, and with `caching` those of one chunk only:
    vectors are computed twice, first without activations, then chunk by chunk with them (Gao et al., Scaling deep
    contrastive learning batch size under memory limited setup, 2021).

    Args:
        encoder: trained in place.
        store: tokens.
        processes: who shares the work.
        caching: compute twice, keep one chunk's activations.
    """

    def __init__(self, encoder: SentenceEncoder, store: TokenStore, processes: Processes, caching: bool) -> None:
        self.encoder, self.store, self.processes, self.caching = encoder, store, processes, caching
        self._batches: list[tuple[NDArray[np.int64], Pack | Batch]] = []
        self._own: NDArray[np.int64] = np.zeros(0, np.int64)
        self._vectors: Tensor | None = None
        self._whole: Tensor | None = None
        self._weights: Weights | None = None
        self._seed = 0

    def forward(self, texts: NDArray[np.int64], seed: int) -> Tensor:
        """Vectors of all texts.

        Args:
            texts: int64 [n] distinct text numbers, the same in every process.
            seed: of this step's dropout.

        Returns:
            float32 [n, D], a leaf that takes a gradient.
        """
        shares = self.processes.shares(self.store.lengths_of(texts))
        self._own, self._seed = shares[self.processes.rank], seed
        self._batches = self.encoder.batches(self.store, texts[self._own], self.encoder.settings.tokens_per_chunk)
        with torch.set_grad_enabled(not self.caching):
            self._weights = self.encoder.working_weights()
            parts = [self._encode(i) for i in range(len(self._batches))]
            own = torch.cat(parts) if parts else torch.zeros(0, self.encoder.dimension, device=self.encoder.device)
            own = own.index_select(0, self._order().argsort().to(own.device))
        self._vectors = None if self.caching else own
        self._whole = self.processes.gather(own, shares).requires_grad_()
        return self._whole

    def backward(self) -> None:
        """Carry the gradient of the vectors, summed over all processes, back to the parameters."""
        assert self._whole is not None and self._whole.grad is not None
        gradient = self._whole.grad.index_select(0, torch.from_numpy(self._own).to(self._whole.device))
        if self._vectors is not None and len(self._own):
            self._vectors.backward(gradient)  # type: ignore[no-untyped-call]
        elif self._vectors is None:
            self._weights = self.encoder.working_weights()
            for i, (places, _) in enumerate(self._batches):
                here = torch.from_numpy(places).to(gradient.device)
                self._encode(i).backward(gradient.index_select(0, here))  # type: ignore[no-untyped-call]
        self._vectors = self._whole = self._weights = None
        self.processes.sum_gradients(self.encoder.parameters())

    def _encode(self, chunk: int) -> Tensor:
        # the same dropout whether a chunk is computed once or twice
        self.encoder.seed(self._seed + chunk * self.processes.size + self.processes.rank)
        return self.encoder(self._batches[chunk][1], self._weights)  # type: ignore[no-any-return]

    def _order(self) -> Tensor:
        if not self._batches:
            return torch.zeros(0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate([places for places, _ in self._batches]))
