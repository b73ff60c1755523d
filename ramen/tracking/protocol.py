"""What a stage may report, and the tracker that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """What a stage may report. All calls are cheap and may be made from rank 0 only."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Record flat parameters."""

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics, at a step if there is one."""

    def curve(self, metrics: Mapping[str, float], step: int) -> None:
        """Record points of curves, by global step, on this run and on its pipeline's parent.

        A curve has a name that no summary has: a summary has no step, which MLflow draws as step 0.
        """

    def headline(self, metrics: Mapping[str, float]) -> None:
        """Record metrics on this run and on its pipeline's parent, so that pipelines compare row by row."""

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
        """Id of this run, None when nothing is tracked."""


class NullTracker:
    """Accepts everything, does nothing."""

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
