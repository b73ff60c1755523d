"""Component `evaluate` as a plain function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact


def test_it_writes_its_artifact_and_reports(chain: Any) -> None:
    artifact = open_artifact(chain.folder / "evaluation", "evaluation")
    assert chain.made["evaluate"]["evaluation"].metadata["digest"] == artifact.digest
    made = chain.made["evaluate"]
    metrics = json.loads((chain.folder / "evaluation" / "metrics.json").read_text())
    assert made["scalars"].scalars["p_at_1"] == metrics["p_at_1"]
    assert "<html" in Path(made["report"].path).read_text().lower()[:200]


def test_a_missing_input_is_one_line_and_the_errors_code(
    chain: Any, call_component: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component("evaluate", tmp_path, "unused")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "dataset" in line and ended.value.code == 4
