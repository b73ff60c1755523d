"""The alias that serves: history, hand-made moves, and publishers that run at the same time."""

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
from ramen.publishing.gate import ORIGIN, evaluated, promote, rollback, try_promote
from ramen.publishing.registry import resolve_version

GATE = IndexConfig(gate={"psp_at_5": 0.0})


@pytest.fixture
def client(store: Path) -> Any:
    from mlflow import MlflowClient

    made = MlflowClient(f"sqlite:///{store}")
    made.create_registered_model("ramen")
    return made


def _answering(client: Any, psp: float, **tags: str) -> int:
    """A registered version that passed its smoke query."""
    known = {"smoke": "passed", "ann_recall": "1.0", "dataset": "d", "psp_at_5": str(psp), **tags}
    return int(client.create_model_version("ramen", "file:///nowhere", tags=known).version)


def _tags(client: Any, version: int) -> dict[str, str]:
    return dict(client.get_model_version("ramen", str(version)).tags)


def test_decision_and_its_numbers_are_on_the_version(client: Any) -> None:
    first, second, third = (_answering(client, psp) for psp in (30.0, 31.0, 29.0))
    assert not try_promote("ramen", first, GATE).reasons
    assert not try_promote("ramen", second, GATE).reasons
    refused = try_promote("ramen", third, GATE)
    assert "29.00 is worse than the 31.00 of version 2" in refused.refused
    assert resolve_version("ramen", "champion") == second
    assert (_tags(client, first)["gate"], _tags(client, first)["gate.against"]) == ("passed", "none")
    assert (_tags(client, second)["gate"], _tags(client, second)["gate.against"]) == ("passed", "1")
    tags = _tags(client, third)
    assert tags["gate"] == "refused" and tags["gate.reason"] == refused.refused
    assert json.loads(tags["gate.compared"]) == {"psp_at_5": [29.0, 31.0, 0.0]}


def test_another_dataset_is_not_compared_and_that_is_told(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    moved = try_promote("ramen", _answering(client, 1.0, dataset="other"), GATE)
    assert not moved.reasons and resolve_version("ramen", "champion") == 2
    assert moved.note == "not compared with version 1, which was evaluated on another dataset"
    assert _tags(client, 2)["gate.reason"] == moved.note
    promote("ramen", "champion", "1", GATE)
    assert capsys.readouterr().err.endswith(
        "warning: ramen version 1: not compared with version 2, which was evaluated on another dataset\n"
    )


def _updated(client: Any, origin: int) -> int:
    """A version as an index update of another one registers it."""
    of = _tags(client, origin)
    known = {key: evaluated(of)[key] for key in ("dataset", "psp_at_5")}
    tags = {"smoke": "passed", "ann_recall": "1.0", "dataset": f"{of['dataset']}+x", "updated_from": str(origin)}
    tags |= {f"{ORIGIN}{key}": value for key, value in known.items()}
    return int(client.create_model_version("ramen", "file:///nowhere", tags=tags).version)


def test_an_updated_index_is_compared_by_the_version_it_came_from(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    for origin in (1, 2):
        assert not try_promote("ramen", _updated(client, origin), GATE).reasons
    client.delete_model_version("ramen", "1")
    assert resolve_version("ramen", "champion") == 3
    assert "29.00 is worse than the 30.00 of version 3" in try_promote("ramen", _answering(client, 29.0), GATE).refused
    with pytest.raises(GateRefused, match=r"29.00 is worse than the 30.00 of version 3"):
        promote("ramen", "champion", "4", GATE)
    assert "29.00 is worse than the 30.00 of version 3" in try_promote("ramen", _updated(client, 4), GATE).refused
    assert not try_promote("ramen", _answering(client, 31.0), GATE).refused


def test_an_update_of_a_version_that_was_replaced_meanwhile_does_not_bring_it_back(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    slow = _updated(client, 1)
    try_promote("ramen", _answering(client, 35.0, dataset="of the next day"), GATE)
    assert try_promote("ramen", slow, GATE).refused.startswith(
        "version 3, which holds the alias, is none that it was made"
    )
    assert resolve_version("ramen", "champion") == 3


def test_a_stop_while_the_holder_is_asked_promotes_nobody(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)

    def stopped(*_: Any) -> Any:
        raise Interrupted("stopped on request")

    monkeypatch.setattr("ramen.publishing.gate.load_version", stopped)
    with pytest.raises(Interrupted):
        try_promote("ramen", _answering(client, 1.0, dataset="of the next day"), GATE, stopped)
    assert resolve_version("ramen", "champion") == 1


def test_a_holder_that_cannot_be_asked_keeps_the_alias(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    refused = try_promote(
        "ramen", _answering(client, 31.0, dataset="of the next day"), GATE, lambda holder: pytest.fail()
    )
    assert "version 1, which holds the alias, cannot be asked (" in refused.refused and "--force" in refused.refused
    assert resolve_version("ramen", "champion") == 1


def test_a_version_that_holds_the_alias_already_does_not_come_after_itself(client: Any) -> None:
    for psp in (30.0, 31.0):
        try_promote("ramen", _answering(client, psp), GATE)
    before = _tags(client, 2)
    assert not try_promote("ramen", 2, GATE).reasons and _tags(client, 2) == before
    assert rollback("ramen", "champion") == (2, 1)


def test_a_version_that_serves_again_is_no_longer_withdrawn(client: Any) -> None:
    for psp in (30.0, 31.0):
        try_promote("ramen", _answering(client, psp), GATE)
    promote("ramen", "champion", "1")
    assert (_tags(client, 1)["gate"], _tags(client, 2)["gate"]) == ("passed", "withdrawn")
    assert rollback("ramen", "champion") == (1, 2)
    assert (_tags(client, 1)["gate"], _tags(client, 2)["gate"]) == ("withdrawn", "passed")


def test_a_metric_that_no_version_has_closes_the_gate(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    refused = try_promote("ramen", _answering(client, 1.0), IndexConfig(gate={"psp_at_7": 0.0}))
    assert refused.refused == "the evaluation has no psp_at_7, which index.gate compares"
    assert resolve_version("ramen", "champion") == 1


def test_rollback_walks_back_through_the_holders_and_says_when_there_is_none(client: Any) -> None:
    for psp in (30.0, 31.0, 32.0):
        try_promote("ramen", _answering(client, psp), GATE)
    assert rollback("ramen", "champion") == (3, 2)
    assert rollback("ramen", "champion") == (2, 1)
    with pytest.raises(RamenError, match="nothing held alias 'champion' of 'ramen' before version 1"):
        rollback("ramen", "champion")
    assert resolve_version("ramen", "champion") == 1
    assert promote("ramen", "champion", "3") == (3, 1)
    assert rollback("ramen", "champion") == (3, 1)


def test_no_publisher_hands_a_rolled_back_version_the_alias_again(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    try_promote("ramen", _answering(client, 35.0), GATE)
    rollback("ramen", "champion")
    assert not try_promote("ramen", _answering(client, 31.0), GATE).reasons
    assert resolve_version("ramen", "champion") == 3


def test_aliases_keep_out_of_each_others_way(client: Any) -> None:
    staging = IndexConfig(gate={"psp_at_5": 0.0}, alias="staging")
    try_promote("ramen", _answering(client, 30.0), GATE)
    assert not try_promote("ramen", _answering(client, 25.0), staging).reasons, "nobody holds staging: nothing to lose"
    assert (resolve_version("ramen", "champion"), resolve_version("ramen", "staging")) == (1, 2)
    promote("ramen", "staging", "1")
    promote("ramen", "staging", "2")
    assert _tags(client, 1)["gate"] == "passed", "taken from staging, still champion"


def test_gate_by_hand_asks_the_gate_and_records_it(client: Any) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    worse = _answering(client, 29.0)
    with pytest.raises(GateRefused, match="29.00 is worse"):
        promote("ramen", "champion", str(worse), GATE)
    assert _tags(client, worse)["gate"] == "refused" and resolve_version("ramen", "champion") == 1
    assert promote("ramen", "champion", str(worse)) == (worse, 1)
    assert resolve_version("ramen", "champion") == worse
    assert promote("ramen", "champion", str(worse), GATE) == (worse, worse), "it already holds it"


@pytest.mark.parametrize("better_is_slow", [True, False])
@pytest.mark.parametrize("moment", ["_judge", "_move", "_best"])
def test_of_two_publishers_at_once_the_better_keeps_the_alias(
    client: Any, monkeypatch: pytest.MonkeyPatch, moment: str, better_is_slow: bool
) -> None:
    """The slow publisher stands still before each step of its way while the other one runs from end to end."""
    try_promote("ramen", _answering(client, 30.0), GATE)
    slow = _answering(client, 32.0 if better_is_slow else 31.0)
    quick = _answering(client, 31.0 if better_is_slow else 32.0)
    original = getattr(gate, moment)

    def late(*args: Any) -> Any:
        monkeypatch.setattr(gate, moment, original)
        try_promote("ramen", quick, GATE)
        return original(*args)

    monkeypatch.setattr(gate, moment, late)
    try_promote("ramen", slow, GATE)
    assert resolve_version("ramen", "champion") == (slow if better_is_slow else quick)


def test_many_publishing_processes_leave_the_best_in_place(client: Any, store: Path) -> None:
    try_promote("ramen", _answering(client, 30.0), GATE)
    scores = {_answering(client, psp): psp for psp in (31.0, 33.5, 29.0, 33.0)}
    script = "import sys; from ramen.config import IndexConfig; from ramen.publishing.gate import try_promote\n"
    script += "try_promote('ramen', int(sys.argv[1]), IndexConfig(gate={'psp_at_5': 0.0}))"
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    workers = [subprocess.Popen([sys.executable, "-c", script, str(version)], env=env) for version in scores]
    assert [worker.wait(120) for worker in workers] == [0] * len(workers)
    assert resolve_version("ramen", "champion") == max(scores, key=lambda version: scores[version])
