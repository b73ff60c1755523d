"""XR-Linear of libpecos: a tree of linear classifiers over TF-IDF features."""

from __future__ import annotations

from ramen.peers import Rank, Task, libpecos


def fit(task: Task) -> Rank:
    """Train with libpecos' default settings."""
    return libpecos.fit(task, "xr-linear")
