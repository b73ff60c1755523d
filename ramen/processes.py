"""Ranks of distributed training, as `torchrun` sets them, and environment variables of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def rank() -> int:
    """Return this process's rank. Rank 0 writes artifacts, tracks and reports."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that run the stage together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return this process's number on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block and restore their previous values afterwards."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
