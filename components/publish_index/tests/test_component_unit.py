"""Component `publish-index` as a plain function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact


def test_it_writes_its_artifact_and_reports(chain: Any) -> None:
    artifact = open_artifact(chain.folder / "retriever", "retriever")
    assert chain.made["publish-index"]["retriever"].metadata["digest"] == artifact.digest
    assert chain.made["publish-index"]["scalars"].scalars["ann_recall_at_10"] == 1, "a flat index is exact"
    receipt = json.loads((chain.folder / "retriever" / "receipt.json").read_text())
    assert receipt["registered"] is None, "index.model is empty"


def test_a_missing_input_is_one_line_and_the_errors_code(
    chain: Any, call_component: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component("publish-index", tmp_path, "unused")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "dataset" in line and ended.value.code == 4
