"""The promotion gate: decisions, promotion and rollback by a user, and concurrent publishers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramen.config import IndexConfig
from ramen.errors import GateRefused, Interrupted, RamenError
from ramen.publishing import gate
from ramen.publishing.gate import ORIGIN_PREFIX, evaluation_tags, promote, rollback, try_promote
from ramen.publishing.registry import resolve_version

GATE = IndexConfig(gate={"psp_at_5": 0.0})


@pytest.fixture
def client(store: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    client.create_registered_model("ramen")
    return client


def _register(client: Any, psp: float, **tags: str) -> int:
    """Register a version that passed its smoke test."""
    tags = {"smoke": "passed", "ann_recall": "1.0", "dataset": "d", "psp_at_5": str(psp), **tags}
    return int(client.create_model_version("ramen", "file:///nowhere", tags=tags).version)


def _register_update(client: Any, origin: int) -> int:
    """Register a version with the tags of an index update."""
    origin_tags = _tags(client, origin)
    tags = {"smoke": "passed", "ann_recall": "1.0", "dataset": f"{origin_tags['dataset']}+x"}
    tags |= {"updated_from": str(origin)}
    tags |= {f"{ORIGIN_PREFIX}{key}": evaluation_tags(origin_tags)[key] for key in ("dataset", "psp_at_5")}
    return int(client.create_model_version("ramen", "file:///nowhere", tags=tags).version)


def _tags(client: Any, version: int) -> dict[str, str]:
    return dict(client.get_model_version("ramen", str(version)).tags)


def test_decision_is_stored_in_the_version_tags(client: Any) -> None:
    first, second, third = (_register(client, psp) for psp in (30.0, 31.0, 29.0))
    assert not try_promote("ramen", first, GATE).reasons
    assert not try_promote("ramen", second, GATE).reasons
    decision = try_promote("ramen", third, GATE)
    assert "29.00 is worse than the 31.00 of version 2" in decision.refused
    assert resolve_version("ramen", "champion") == second
    assert (_tags(client, first)["gate"], _tags(client, first)["gate.against"]) == ("passed", "none")
    assert (_tags(client, second)["gate"], _tags(client, second)["gate.against"]) == ("passed", "1")
    tags = _tags(client, third)
    assert tags["gate"] == "refused" and tags["gate.reason"] == decision.refused
    assert json.loads(tags["gate.compared"]) == {"psp_at_5": [29.0, 31.0, 0.0]}


def test_versions_of_different_datasets_are_not_compared(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    decision = try_promote("ramen", _register(client, 1.0, dataset="other"), GATE)
    assert not decision.reasons and resolve_version("ramen", "champion") == 2
    assert decision.note == "not compared with version 1, which was evaluated on another dataset"
    assert _tags(client, 2)["gate.reason"] == decision.note
    promote("ramen", "champion", "1", GATE)
    assert capsys.readouterr().err.endswith(
        "warning: ramen version 1: not compared with version 2, which was evaluated on another dataset\n"
    )


def test_updated_version_is_compared_by_the_evaluation_of_its_origin(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    for origin in (1, 2):
        assert not try_promote("ramen", _register_update(client, origin), GATE).reasons
    client.delete_model_version("ramen", "1")
    assert resolve_version("ramen", "champion") == 3
    assert "29.00 is worse than the 30.00 of version 3" in try_promote("ramen", _register(client, 29.0), GATE).refused
    with pytest.raises(GateRefused, match=r"29.00 is worse than the 30.00 of version 3"):
        promote("ramen", "champion", "4", GATE)
    refused = try_promote("ramen", _register_update(client, 4), GATE).refused
    assert "29.00 is worse than the 30.00 of version 3" in refused
    assert not try_promote("ramen", _register(client, 31.0), GATE).refused


def test_update_of_a_replaced_version_is_refused(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    slow = _register_update(client, 1)
    try_promote("ramen", _register(client, 35.0, dataset="of the next day"), GATE)
    assert try_promote("ramen", slow, GATE).refused.startswith(
        "version 3, the current champion, is not the version that this update started from"
    )
    assert resolve_version("ramen", "champion") == 3


def test_interrupt_during_the_comparison_does_not_promote(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)

    def interrupt(*_: Any) -> Any:
        raise Interrupted("stopped on request")

    monkeypatch.setattr("ramen.publishing.gate.load_version", interrupt)
    with pytest.raises(Interrupted):
        try_promote("ramen", _register(client, 1.0, dataset="of the next day"), GATE, interrupt)
    assert resolve_version("ramen", "champion") == 1


def test_champion_that_cannot_be_compared_keeps_the_alias(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    candidate = _register(client, 31.0, dataset="of the next day")
    refused = try_promote("ramen", candidate, GATE, lambda champion: pytest.fail()).refused
    assert "version 1, the current champion, cannot be compared (" in refused and "--force" in refused
    assert resolve_version("ramen", "champion") == 1


def test_promoting_the_champion_again_changes_nothing(client: Any) -> None:
    for psp in (30.0, 31.0):
        try_promote("ramen", _register(client, psp), GATE)
    before = _tags(client, 2)
    assert not try_promote("ramen", 2, GATE).reasons and _tags(client, 2) == before
    assert rollback("ramen", "champion") == (2, 1)


def test_promoting_a_withdrawn_version_reinstates_it(client: Any) -> None:
    for psp in (30.0, 31.0):
        try_promote("ramen", _register(client, psp), GATE)
    promote("ramen", "champion", "1")
    assert (_tags(client, 1)["gate"], _tags(client, 2)["gate"]) == ("passed", "withdrawn")
    assert rollback("ramen", "champion") == (1, 2)
    assert (_tags(client, 1)["gate"], _tags(client, 2)["gate"]) == ("withdrawn", "passed")


def test_gate_refuses_a_candidate_without_a_compared_metric(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    decision = try_promote("ramen", _register(client, 1.0), IndexConfig(gate={"psp_at_7": 0.0}))
    assert decision.refused == "the evaluation has no psp_at_7, which index.gate compares"
    assert resolve_version("ramen", "champion") == 1


def test_rollback_returns_through_the_champions_until_the_first(client: Any) -> None:
    for psp in (30.0, 31.0, 32.0):
        try_promote("ramen", _register(client, psp), GATE)
    assert rollback("ramen", "champion") == (3, 2)
    assert rollback("ramen", "champion") == (2, 1)
    with pytest.raises(RamenError, match="alias 'champion' of 'ramen' has no version before version 1"):
        rollback("ramen", "champion")
    assert resolve_version("ramen", "champion") == 1
    assert promote("ramen", "champion", "3") == (3, 1)
    assert rollback("ramen", "champion") == (3, 1)


def test_publisher_does_not_promote_a_rolled_back_version(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    try_promote("ramen", _register(client, 35.0), GATE)
    rollback("ramen", "champion")
    assert not try_promote("ramen", _register(client, 31.0), GATE).reasons
    assert resolve_version("ramen", "champion") == 3


def test_aliases_are_independent(client: Any) -> None:
    staging = IndexConfig(gate={"psp_at_5": 0.0}, alias="staging")
    try_promote("ramen", _register(client, 30.0), GATE)
    assert not try_promote("ramen", _register(client, 25.0), staging).reasons, "staging has no champion yet"
    assert (resolve_version("ramen", "champion"), resolve_version("ramen", "staging")) == (1, 2)
    promote("ramen", "staging", "1")
    promote("ramen", "staging", "2")
    assert _tags(client, 1)["gate"] == "passed", "withdrawn from staging, still champion"


def test_promote_applies_the_gate_unless_forced(client: Any) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    worse = _register(client, 29.0)
    with pytest.raises(GateRefused, match="29.00 is worse"):
        promote("ramen", "champion", str(worse), GATE)
    assert _tags(client, worse)["gate"] == "refused" and resolve_version("ramen", "champion") == 1
    assert promote("ramen", "champion", str(worse)) == (worse, 1)
    assert resolve_version("ramen", "champion") == worse
    assert promote("ramen", "champion", str(worse), GATE) == (worse, worse), "it is the champion already"


@pytest.mark.parametrize("better_is_slow", [True, False])
@pytest.mark.parametrize("step", ["_decide", "_set_alias", "_best_passed"])
def test_better_of_two_concurrent_publishers_is_promoted(
    client: Any, monkeypatch: pytest.MonkeyPatch, step: str, better_is_slow: bool
) -> None:
    """The slow publisher pauses before a step while the other one publishes from start to end."""
    try_promote("ramen", _register(client, 30.0), GATE)
    slow = _register(client, 32.0 if better_is_slow else 31.0)
    fast = _register(client, 31.0 if better_is_slow else 32.0)
    original = getattr(gate, step)

    def paused(*args: Any) -> Any:
        monkeypatch.setattr(gate, step, original)
        try_promote("ramen", fast, GATE)
        return original(*args)

    monkeypatch.setattr(gate, step, paused)
    try_promote("ramen", slow, GATE)
    assert resolve_version("ramen", "champion") == (slow if better_is_slow else fast)


@pytest.mark.slow
def test_best_of_many_publishing_processes_is_promoted(client: Any, store: Path) -> None:
    try_promote("ramen", _register(client, 30.0), GATE)
    scores = {_register(client, psp): psp for psp in (31.0, 33.5, 29.0, 33.0)}
    script = "import sys; from ramen.config import IndexConfig; from ramen.publishing.gate import try_promote\n"
    script += "try_promote('ramen', int(sys.argv[1]), IndexConfig(gate={'psp_at_5': 0.0}))"
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    processes = [subprocess.Popen([sys.executable, "-c", script, str(version)], env=env) for version in scores]
    assert [process.wait(120) for process in processes] == [0] * len(processes)
    assert resolve_version("ramen", "champion") == max(scores, key=lambda version: scores[version])
