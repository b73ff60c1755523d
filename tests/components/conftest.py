"""Fixtures that run components on the tiny dataset: as plain functions, and on Kubeflow's local runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_pipeline import SMALL

from components import load_component
from ramen.config import resolve
from ramen.stages import STAGES


@dataclass
class FakeArtifact:
    """The part of a KFP artifact that components use; `scalars` holds the values logged to a `Metrics` artifact."""

    path: str
    metadata: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.scalars[name] = value


Call = Callable[..., dict[str, FakeArtifact]]


def call(stage: str, folder: Path, data_path: str) -> dict[str, FakeArtifact]:
    """Call a component as a plain function on artifacts under `folder`."""
    record = STAGES[stage]
    sections = resolve(preset="demo", sets=[*SMALL, "index.model=", f"data.path={data_path}"]).sections(record.sections)
    reports = {"report"} if stage in ("ingest", "evaluate") else set()
    names = {*record.reads, *record.writes, *reports}
    artifacts = {name: FakeArtifact(str(folder / name)) for name in names}
    artifacts["scalars"] = FakeArtifact(str(folder / f"{stage}-scalars"))
    load_component(record).python_func(**sections, version="test", **artifacts)
    return artifacts


@pytest.fixture(scope="session")
def call_component() -> Call:
    """The function `call`."""
    return call


@dataclass
class Chain:
    """The artifacts of all components, called in order; their files are under `folder/<artifact>`."""

    folder: Path
    source: Path
    artifacts: dict[str, dict[str, FakeArtifact]]


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, tiny_xc_folder: Path) -> Chain:
    """Every component called as a plain function, without tracking."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAMEN_TRACKING", "off")
        patch.setenv("RAMEN_WORK", str(folder / "work"))
        artifacts = {stage: call(stage, folder, str(tiny_xc_folder)) for stage in STAGES}
    return Chain(folder, tiny_xc_folder, artifacts)


@pytest.fixture
def run_locally(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Path]]:
    """A function that runs one component on the local subprocess runner and returns the paths of its outputs.

    The runner cannot call a component with input artifacts directly, so a pipeline imports them.
    """
    from kfp import dsl, local

    monkeypatch.setenv("RAMEN_TRACKING", "off")
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "work"))

    def run(stage: str) -> dict[str, Path]:
        record = STAGES[stage]
        component = load_component(record)
        sections = resolve(preset="demo", sets=[*SMALL, "index.model=", f"data.path={chain.source}"]).sections(
            record.sections
        )
        kinds = {name: value.type for name, value in (component.component_spec.inputs or {}).items()}

        @dsl.pipeline(name="single")  # type: ignore[untyped-decorator]
        def single():  # type: ignore[no-untyped-def]  # kfp evaluates annotations, which are strings in this file
            imported = {
                name: dsl.importer(
                    artifact_uri=str(chain.folder / name),
                    artifact_class=getattr(dsl, kinds[name].split("@")[0].removeprefix("system.")),
                ).output
                for name in record.reads
            }
            component(**sections, version="test", **imported)

        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"), raise_on_error=True)
        single()
        (root,) = (tmp_path / "root").glob(f"single-*/{stage}")
        return {child.name: child for child in root.iterdir()}

    return run
