"""The interface that stages report through, and a tracker that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """What a stage can report. Calls are cheap; only rank 0 makes them."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Record flat parameters."""

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics, optionally at a step."""

    def curve(self, metrics: Mapping[str, float], step: int) -> None:
        """Record curve points by global step, on this run and on its pipeline's parent.

        A curve and a summary metric need different names: MLflow draws a metric without a step at step 0.
        """

    def headline(self, metrics: Mapping[str, float]) -> None:
        """Record summary metrics on this run and on its pipeline's parent, so that pipelines can be compared."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags on this run."""

    def dataset(self, name: str, digest: str, source: str) -> None:
        """Record an input artifact."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Store a file or a folder with the run."""

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> AbstractContextManager[Tracker]:
        """Open a nested run."""

    @property
    def run_id(self) -> str | None:
        """Id of this run, None when tracking is off."""


class NullTracker:
    """A tracker that does nothing."""

    run_id: str | None = None

    def params(self, values: Mapping[str, Any]) -> None: ...
    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...
    def curve(self, metrics: Mapping[str, float], step: int) -> None: ...
    def headline(self, metrics: Mapping[str, float]) -> None: ...
    def tags(self, values: Mapping[str, str]) -> None: ...
    def dataset(self, name: str, digest: str, source: str) -> None: ...
    def artifact(self, path: Path, folder: str = "") -> None: ...

    @contextmanager
    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[Tracker]:
        yield self
