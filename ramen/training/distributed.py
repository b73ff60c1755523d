"""Several processes that train as one: each encodes a share of a step's texts, all see all vectors.

The loss of a step is a function of all its vectors, so every process computes it whole, on gathered vectors: negatives
are global, and sampling, pruning and weights agree without a word said, being functions of the same seeds and numbers.
Only two things travel: vectors on the way up, and the sum of the parameters' gradients on the way down.
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
"""How long a process waits for the others: longer than any checkpoint takes to write."""


@dataclass(frozen=True)
class Processes:
    """This process among `size` that train together; `rank` 0 writes."""

    rank: int = 0
    size: int = 1

    def shares(self, lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Deal texts out so that all processes have about the same number of tokens.

        Args:
            lengths: int64 [n] tokens per text.

        Returns:
            For each process the places of its texts, int64, ascending; together a partition of 0..n-1.
        """
        if self.size == 1:
            return [np.arange(len(lengths))]
        order = np.argsort(lengths, kind="stable")
        return [np.sort(order[first :: self.size]) for first in range(self.size)]

    def gather(self, own: Tensor, shares: list[NDArray[np.int64]]) -> Tensor:
        """Vectors of all processes, [n, D] in the texts' order; no gradient flows through.

        Args:
            own: float32 [len(shares[rank]), D].
            shares: from `shares`.
        """
        own = own.detach()
        if self.size == 1:
            return own
        most = max(map(len, shares))
        padded = own.new_zeros(most, own.shape[1])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(parts, padded)
        whole = own.new_empty(sum(map(len, shares)), own.shape[1])
        for places, part in zip(shares, parts, strict=True):
            whole[torch.from_numpy(places).to(own.device)] = part[: len(places)]
        return whole

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes; one without a text of a step counts as zero."""
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
        """Whether any process says so; the same answer everywhere."""
        if self.size == 1:
            return flag
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        said = torch.tensor([int(flag)], device=device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined() -> Iterator[Processes]:
    """This process's place among those started with it (`torchrun` or `training.processes`); alone, nothing is opened.

    NCCL between GPUs, gloo between CPUs. Each process takes the GPU of its local rank.
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
