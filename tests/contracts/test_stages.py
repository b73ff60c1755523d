"""The stage table against the functions that it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

from ramen.artifacts import KINDS
from ramen.config import SECTIONS
from ramen.stages import STAGES, Stage

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
