"""Component `ingest` as a plain function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact


def test_it_writes_its_artifact_and_reports(chain: Any) -> None:
    artifact = open_artifact(chain.folder / "dataset", "dataset")
    assert chain.made["ingest"]["dataset"].metadata["digest"] == artifact.digest
    made = chain.made["ingest"]
    assert made["scalars"].scalars["documents"] == 60 and made["scalars"].scalars["labels"] == 30
    assert "<html" in Path(made["report"].path).read_text().lower()[:200], "the page the KFP UI shows"


def test_a_missing_input_is_one_line_and_the_errors_code(
    chain: Any, call_component: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component("ingest", tmp_path, "nowhere")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "nowhere" in line and ended.value.code == 3
