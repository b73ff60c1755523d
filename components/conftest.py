"""Run components on the tiny problem: as plain functions, and on Kubeflow's local runner."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ramen.config import resolve
from ramen.stages import STAGES

SMALL = (
    "data.source=xc", "walk.hops=20", "encoder.name=tiny", "encoder.precision=fp32", "encoder.max_length=16",
    "training.batch_size=16", "training.epochs=2", "training.warmup_epochs=1", "training.threads=1",
    "training.validation_fraction=0.1", "pruning.every=1", "index.kind=flat", "index.model=",
)  # fmt: skip


@dataclass
class FakeArtifact:
    """What a component sees of a KFP artifact: a path, metadata, and for `Metrics` the scalars logged."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.scalars[name] = value


Call = Callable[..., dict[str, FakeArtifact]]


def component_of(stage: str) -> Any:
    """The component of a stage, by its name in the table."""
    identifier = STAGES[stage].identifier
    return getattr(importlib.import_module(f"components.{identifier}.component"), identifier)


def call(stage: str, folder: Path, path: str, *more: str) -> dict[str, FakeArtifact]:
    """Call a component as a plain function on artifacts under `folder`; `path` is the data set's folder."""
    table = STAGES[stage]
    sections = resolve(preset="demo", sets=[*SMALL, f"data.path={path}", *more]).sections(table.sections)
    reports = {"report"} if stage in ("ingest", "evaluate") else set()
    names = {*table.reads, *table.writes, *reports}
    artifacts = {name: FakeArtifact(str(folder / name)) for name in names}
    artifacts["scalars"] = FakeArtifact(str(folder / f"{stage}-scalars"))
    component_of(stage).python_func(**sections, version="test", **artifacts)
    return artifacts


@pytest.fixture(scope="session")
def call_component() -> Call:
    """`call`, for tests of single calls."""
    return call


@dataclass
class Chain:
    """The artifacts of all six components, called once in order: `folder/<artifact>`, and what each call reported."""

    folder: Path
    source: Path
    made: dict[str, dict[str, FakeArtifact]]


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, tiny_xc_folder: Path) -> Chain:
    """Every component called as a plain function, untracked."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAMEN_TRACKING", "off")
        patch.setenv("RAMEN_WORK", str(folder / "work"))
        made = {stage: call(stage, folder, str(tiny_xc_folder)) for stage in STAGES}
    return Chain(folder, tiny_xc_folder, made)


@pytest.fixture
def run_locally(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Path]]:
    """Run one component on the local subprocess runner; gives its outputs' paths.

    The runner refuses a component with input artifacts called alone: importers in a pipeline bring them in.
    """
    from kfp import dsl, local

    monkeypatch.setenv("RAMEN_TRACKING", "off")
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "work"))

    def run(stage: str) -> dict[str, Path]:
        table, component = STAGES[stage], component_of(stage)
        path = f"data.path={chain.source}"
        sections = resolve(preset="demo", sets=[*SMALL, path]).sections(table.sections)
        kinds = {name: value.type for name, value in (component.component_spec.inputs or {}).items()}

        @dsl.pipeline(name="single")  # type: ignore[untyped-decorator]
        def single():  # type: ignore[no-untyped-def]  # kfp reads annotations, which are text in this file
            brought = {
                name: dsl.importer(
                    artifact_uri=str(chain.folder / name),
                    artifact_class=getattr(dsl, kinds[name].split("@")[0].removeprefix("system.")),
                ).output
                for name in table.reads
            }
            component(**sections, version="test", **brought)

        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"), raise_on_error=True)
        single()
        (root,) = (tmp_path / "root").glob(f"single-*/{stage}")
        return {child.name: child for child in root.iterdir()}

    return run
