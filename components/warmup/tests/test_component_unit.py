"""Component `warmup` as a plain function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact


def test_it_writes_its_artifact_and_reports(chain: Any) -> None:
    artifact = open_artifact(chain.folder / "warm_model", "warm_model")
    assert chain.made["warmup"]["warm_model"].metadata["digest"] == artifact.digest
    scalars = chain.made["warmup"]["scalars"].scalars
    assert scalars["epoch/loss"] > 0 and 0 <= scalars["val_p_at_1"] <= 100


def test_a_missing_input_is_one_line_and_the_errors_code(
    chain: Any, call_component: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component("warmup", tmp_path, "unused")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "dataset" in line and ended.value.code == 4
