"""XR-Linear of libpecos: a tree of linear classifiers on TF-IDF features."""

from __future__ import annotations

from ramen.peers import Rank, Task, libpecos


def fit(task: Task) -> Rank:
    """Train with the default settings of libpecos."""
    return libpecos.fit(task, "xr-linear")
