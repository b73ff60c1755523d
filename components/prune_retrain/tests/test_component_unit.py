"""Component `prune-retrain` as a plain function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact


def test_it_writes_its_artifact_and_reports(chain: Any) -> None:
    artifact = open_artifact(chain.folder / "model", "model")
    assert chain.made["prune-retrain"]["model"].metadata["digest"] == artifact.digest
    scalars = chain.made["prune-retrain"]["scalars"].scalars
    assert scalars["rounds"] == 1 and 0 <= scalars["edges_kept/links.label"] <= 100
    assert {path.name for path in (chain.folder / "pruned_graph").iterdir()} >= {"category", "links", "rounds.json"}


def test_a_missing_input_is_one_line_and_the_errors_code(
    chain: Any, call_component: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component("prune-retrain", tmp_path, "unused")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "dataset" in line and ended.value.code == 4
