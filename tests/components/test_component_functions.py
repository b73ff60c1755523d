"""Components called as plain functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import open_artifact
from ramen.stages import STAGES


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_component_records_the_digest_of_its_artifacts(stage: str, chain: Any) -> None:
    for name in STAGES[stage].writes:
        artifact = open_artifact(chain.folder / name, name)
        assert chain.artifacts[stage][name].metadata["digest"] == artifact.digest


@pytest.mark.slow
def test_components_log_the_metrics_of_their_stage(chain: Any) -> None:
    scalars = {stage: artifacts["scalars"].scalars for stage, artifacts in chain.artifacts.items()}
    assert scalars["ingest"]["documents"] == 60 and scalars["ingest"]["labels"] == 30
    assert scalars["build-graph"]["links/test_anchors"] == 1, "the anchor that is a test document was removed"
    assert scalars["build-graph"]["links/train/walked"] >= scalars["build-graph"]["links/train/clean"] > 0
    assert scalars["warmup"]["epoch/loss"] > 0 and 0 <= scalars["warmup"]["val_p_at_1"] <= 100
    assert scalars["prune-retrain"]["rounds"] == 1 and 0 <= scalars["prune-retrain"]["edges_kept/links.label"] <= 100
    metrics = json.loads((chain.folder / "evaluation" / "metrics.json").read_text())
    assert scalars["evaluate"]["p_at_1"] == metrics["p_at_1"]
    assert scalars["publish-index"]["ann_recall_at_10"] == 1, "a flat index is exact"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ingest", "evaluate"])
def test_component_writes_an_html_report_for_the_kfp_ui(stage: str, chain: Any) -> None:
    report = Path(chain.artifacts[stage]["report"].path)
    assert "<html" in report.read_text().lower()[:200]


@pytest.mark.slow
def test_prune_retrain_writes_the_graphs_of_each_anchor_set(chain: Any) -> None:
    assert {path.name for path in (chain.folder / "pruned_graph").iterdir()} >= {"category", "links", "rounds.json"}


@pytest.mark.slow
def test_publish_index_does_not_register_without_a_model_name(chain: Any) -> None:
    receipt = json.loads((chain.folder / "retriever" / "receipt.json").read_text())
    assert receipt["registered"] is None, "index.model is empty"


@pytest.mark.parametrize("stage", STAGES)
def test_component_reports_a_missing_input_as_one_line_with_the_exit_code_of_the_error(
    stage: str,
    call_component: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    with pytest.raises(SystemExit) as ended:
        call_component(stage, tmp_path, "nowhere")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    missing, code = ("nowhere", 3) if stage == "ingest" else ("dataset", 4)
    assert missing in line and ended.value.code == code
