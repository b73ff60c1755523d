"""Data-parallel training: each process encodes a share of a step's texts, and all processes see all vectors.

Every process computes the whole loss of a step on gathered vectors, so negatives are global. Sampling, pruning and
weights agree without communication, since they depend only on seeds and vectors. Processes exchange the vectors of a
step, and the sum of the parameters' gradients.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ramen.processes import local_rank, rank, world_size

TIMEOUT = datetime.timedelta(minutes=30)
"""Time that a process waits for the others: longer than writing any checkpoint takes."""


@dataclass(frozen=True)
class Processes:
    """This process among `size` processes that train together; rank 0 writes files."""

    rank: int = 0
    size: int = 1

    def shares(self, lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Partition texts so that all processes have about the same number of tokens.

        Args:
            lengths: int64 [n] tokens per text.

        Returns:
            For each process the indices of its texts, int64, ascending.
        """
        if self.size == 1:
            return [np.arange(len(lengths))]
        order = np.argsort(lengths, kind="stable")
        return [np.sort(order[first :: self.size]) for first in range(self.size)]

    def gather(self, vectors: Tensor, shares: list[NDArray[np.int64]]) -> Tensor:
        """Gather the vectors of all processes: [n, D] in the order of the texts, without a gradient.

        Args:
            vectors: float32 [len(shares[rank]), D], of this process.
            shares: from `shares`.
        """
        vectors = vectors.detach()
        if self.size == 1:
            return vectors
        padded = vectors.new_zeros(max(map(len, shares)), vectors.shape[1])
        padded[: len(vectors)] = vectors
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded)
        gathered = vectors.new_empty(sum(map(len, shares)), vectors.shape[1])
        for indices, part in zip(shares, parts, strict=True):
            gathered[torch.from_numpy(indices).to(vectors.device)] = part[: len(indices)]
        return gathered

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes; a missing gradient counts as zero."""
        if self.size == 1:
            return
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        for parameter, grad in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(grad.view_as(parameter))  # type: ignore[union-attr]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; every process must call it."""
        if self.size == 1:
            return flag
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flags = torch.tensor([int(flag)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the process group of `torchrun` or `training.processes`; a single process needs none.

    Uses NCCL between GPUs and gloo between CPUs. Each process uses the GPU of its local rank.
    """
    if world_size() == 1:
        yield Processes()
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield Processes(rank(), world_size())
    finally:
        if opened:
            dist.destroy_process_group()
