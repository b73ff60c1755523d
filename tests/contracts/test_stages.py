"""The stage table against the functions that it names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from ramen.artifacts import KINDS
from ramen.config import SECTIONS
from ramen.stages import PACKAGE, STAGES, Stage

stages = pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))


@stages
def test_a_stage_takes_what_it_declares_and_nothing_else(stage: Stage) -> None:
    module, name = stage.impl.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert set(parameters) == {*stage.reads, *stage.writes, *stage.sections, "track"}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is inspect.Parameter.empty for parameter in parameters.values())


@stages
def test_a_stage_says_what_its_arguments_are(stage: Stage) -> None:
    module, name = stage.impl.split(":")
    hints = inspect.get_annotations(getattr(importlib.import_module(module), name), eval_str=True)
    kinds = {
        **dict.fromkeys(stage.reads, "Artifact"),
        **dict.fromkeys(stage.writes, "Draft"),
        **{section: SECTIONS[section].__name__ for section in stage.sections},
        "track": "Tracker",
    }
    assert {key: hint.__name__ for key, hint in hints.items() if key != "return"} == kinds
    assert hints["return"] == dict[str, float]


@stages
def test_code_of_a_stage_exists_and_has_a_version(stage: Stage) -> None:
    assert [path for path in stage.code_paths() if not path.exists()] == []
    assert len(stage.code_version()) == 12


@stages
def test_the_code_of_a_stage_includes_its_own_module(stage: Stage) -> None:
    module = importlib.util.find_spec(stage.impl.split(":")[0])
    assert module is not None and module.origin is not None
    assert any(str(path) in module.origin for path in stage.code_paths())


SURROUNDINGS = (
    "__init__.py", "console.py", "errors.py", "processes.py", "provenance.py", "redaction.py", "signals.py", "tracking",
)  # fmt: skip
"""What runs and records a stage: no result depends on it."""


def imported(file: Path) -> set[Path]:
    """Modules of the package that a module imports, at its head or within a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = {PACKAGE.parent.joinpath(*name.split(".")) for name in names if name.startswith("ramen")}
    files = {path.with_suffix(".py") for path in found} | {path / "__init__.py" for path in found}
    return {path for path in files if path.is_file()}


@stages
def test_the_code_of_a_stage_includes_all_that_it_imports(stage: Stage) -> None:
    reached, left = set[Path](), {PACKAGE.parent.joinpath(*stage.impl.split(":")[0].split(".")).with_suffix(".py")}
    while left:
        reached |= left
        left = {path for file in left for path in imported(file)} - reached
    kept = [*stage.code_paths(), *(PACKAGE / part for part in SURROUNDINGS)]
    outside = {path for path in reached if not any(root in (path, *path.parents) for root in kept)}
    assert not {str(path.relative_to(PACKAGE)) for path in outside}, "a change would leave old results in caches"


def test_no_name_is_both_an_artifact_and_a_section() -> None:
    assert not set(KINDS) & set(SECTIONS)
    assert "track" not in {*KINDS, *SECTIONS}


def test_each_artifact_is_written_once_and_before_it_is_read() -> None:
    written: list[str] = []
    for stage in STAGES.values():
        assert set(stage.reads) <= set(written), stage.name
        written += stage.writes
    assert sorted(written) == sorted(KINDS)


def test_every_section_is_read_by_some_stage() -> None:
    assert {section for stage in STAGES.values() for section in stage.sections} == set(SECTIONS)
