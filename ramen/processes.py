"""Which of several processes this is, as `torchrun` says it in the environment. Rank 0 writes and reports."""

from __future__ import annotations

import os


def rank() -> int:
    """0 for the process that writes artifacts, tracks and reports."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes that run a stage together; 1 = this one alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its machine: the GPU it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))
