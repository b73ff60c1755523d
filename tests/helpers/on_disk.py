"""A problem as the artifacts that stages read."""

from __future__ import annotations

from pathlib import Path

from ramen.artifacts import drafts
from ramen.data.dataset import Problem
from ramen.stages import run_stage


def on_disk(problem: Problem, folder: Path) -> dict[str, Path]:
    """Write `dataset` and `graph` (edges as they are) into a folder; returns their paths."""
    places = {name: folder / name for name in ("dataset", "graph")}
    with drafts({"dataset": places["dataset"]}, sections={}, inputs={}, work=folder / "work") as made:
        problem.write(made["dataset"].path)
    run_stage("build-graph", sections={"walk": {"hops": 0}}, inputs={"dataset": places["dataset"]},
              outputs={"graph": places["graph"]})  # fmt: skip
    return places
