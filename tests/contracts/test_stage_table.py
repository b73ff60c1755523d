"""The stage table agrees with the functions and modules that it names."""

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
def test_stage_function_takes_exactly_the_declared_arguments(stage: Stage) -> None:
    module, name = stage.impl.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    assert set(parameters) == {*stage.reads, *stage.writes, *stage.sections, "track"}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is inspect.Parameter.empty for parameter in parameters.values())


@stages
def test_stage_function_is_annotated(stage: Stage) -> None:
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
def test_code_paths_of_a_stage_exist(stage: Stage) -> None:
    assert [path for path in stage.code_paths() if not path.exists()] == []
    assert len(stage.code_version()) == 12


@stages
def test_code_paths_of_a_stage_include_its_module(stage: Stage) -> None:
    module = importlib.util.find_spec(stage.impl.split(":")[0])
    assert module is not None and module.origin is not None
    assert any(str(path) in module.origin for path in stage.code_paths())


NOT_IN_RESULTS = (
    "__init__.py", "console.py", "deadline.py", "errors.py", "processes.py", "provenance.py",
    "redaction.py", "signals.py", "tracking",
)  # fmt: skip
"""Code that runs and records a stage without effect on its results."""


def imported_modules(file: Path) -> set[Path]:
    """Return the modules of the package that a module imports, at module level or inside functions."""
    names: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = {PACKAGE.parent.joinpath(*name.split(".")) for name in names if name.startswith("ramen")}
    files = {path.with_suffix(".py") for path in found} | {path / "__init__.py" for path in found}
    return {path for path in files if path.is_file()}


@stages
def test_code_paths_of_a_stage_include_all_imported_modules(stage: Stage) -> None:
    reached, left = set[Path](), {PACKAGE.parent.joinpath(*stage.impl.split(":")[0].split(".")).with_suffix(".py")}
    while left:
        reached |= left
        left = {path for file in left for path in imported_modules(file)} - reached
    covered = [*stage.code_paths(), *(PACKAGE / part for part in NOT_IN_RESULTS)]
    outside = {path for path in reached if not any(root in (path, *path.parents) for root in covered)}
    assert not {str(path.relative_to(PACKAGE)) for path in outside}, "caches would return results of older code"


def test_artifact_and_section_names_are_disjoint() -> None:
    assert not set(KINDS) & set(SECTIONS)
    assert "track" not in {*KINDS, *SECTIONS}


def test_each_artifact_is_written_once_before_it_is_read() -> None:
    written: list[str] = []
    for stage in STAGES.values():
        assert set(stage.reads) <= set(written), stage.name
        written += stage.writes
    assert sorted(written) == sorted(KINDS)


def test_every_section_is_read_by_a_stage() -> None:
    assert {section for stage in STAGES.values() for section in stage.sections} == set(SECTIONS)
