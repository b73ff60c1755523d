"""Results of stages and peers on disk, keyed by content, so that nothing is computed twice.

The key covers the config sections that a stage sees, the digests of its inputs (for the first stage, the raw data) and
its code. Rows that differ in their objective share dataset and graph, an interrupted row resumes where it stopped, and
a second run of a study reads every result.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from ramen.artifacts import open_artifact
from ramen.config import Config
from ramen.console import warn
from ramen.errors import ArtifactError, Interrupted
from ramen.files import check_type, read_json, write_json
from ramen.stages import STAGES, record_cached, run_stage
from ramen.tracking import open_tracker
from ramen.workdir import stage_key

RECEIPT = "metrics.json"
"""Metrics and seconds of a result; written last, so that its presence marks a complete result."""


@dataclass(frozen=True)
class CachedResult:
    """A complete result: its folder, finite metrics, and the seconds of its computation."""

    folder: Path
    metrics: dict[str, float]
    seconds: float

    @classmethod
    def find(cls, folder: Path, artifacts: Iterable[str]) -> CachedResult | None:
        """Return the complete result in a folder; None if there is none.

        A damaged result, which a user may have edited, is moved aside with a warning, to be computed again.
        """
        receipt = folder / RECEIPT
        if not receipt.exists():
            return None
        try:
            for artifact in artifacts:
                open_artifact(folder / artifact, artifact)
            values = read_json(receipt, dict[str, Any])
            metrics = check_type(values.get("metrics"), dict[str, float], f"{receipt}: metrics")
            return cls(folder, metrics, check_type(values.get("seconds"), float, f"{receipt}: seconds"))
        except ArtifactError as error:
            aside = folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}")
            folder.rename(aside)
            warn(f"{error} (it is computed again; the damaged result was moved to {aside})")
            return None

    @classmethod
    def save(cls, folder: Path, metrics: Mapping[str, float], seconds: float) -> CachedResult:
        """Write the receipt, which completes a result."""
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        write_json(folder / RECEIPT, {"metrics": finite, "seconds": seconds})
        return cls(folder, finite, seconds)

    def invalidate(self) -> None:
        """Mark the result as incomplete."""
        (self.folder / RECEIPT).unlink()


def run_cached_stage(name: str, config: Config, artifacts: Mapping[str, Path], cache: Path) -> CachedResult:
    """Run a stage, or take its result from the cache.

    Args:
        name: key of `STAGES`.
        config: the row's configuration.
        artifacts: name -> folder, at least those that the stage reads.
        cache: folder of results.
    """
    stage = STAGES[name]
    sections = config.sections(stage.sections)
    inputs = {artifact: artifacts[artifact] for artifact in stage.reads}
    digests = {artifact: open_artifact(path, artifact).digest for artifact, path in inputs.items()}
    folder = cache / f"{name}-{stage_key(name, sections, digests, stage.cache_version(config))}"
    outputs = {artifact: folder / artifact for artifact in stage.writes}
    if result := CachedResult.find(folder, stage.writes):
        record_cached(name, result.metrics, outputs)
        return result
    folder.mkdir(parents=True, exist_ok=True)
    with _measure_seconds(folder / "seconds.json") as elapsed, open_tracker(name) as track:
        metrics = run_stage(name, sections=sections, inputs=inputs, outputs=outputs, track=track)
    return CachedResult.save(folder, metrics, elapsed())


@contextmanager
def _measure_seconds(file: Path) -> Iterator[Callable[[], float]]:
    """Measure the seconds of a stage, including earlier attempts that were interrupted, which are kept in `file`.

    Attempts that were killed or failed are not counted, because their time is unknown.
    """
    before = 0.0
    with suppress(ArtifactError):  # missing or damaged: the time of earlier attempts is unknown
        before = max(0.0, read_json(file, FiniteFloat))
    start = time.monotonic()

    def elapsed() -> float:
        return before + time.monotonic() - start

    try:
        yield elapsed
    except Interrupted:
        write_json(file, elapsed())
        raise
    file.unlink(missing_ok=True)
