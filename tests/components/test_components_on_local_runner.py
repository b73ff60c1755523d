"""Components on Kubeflow's local subprocess runner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ramen.artifacts import open_artifact
from ramen.stages import STAGES


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_component_gives_the_same_files_and_metrics_as_the_plain_call(stage: str, run_locally: Any, chain: Any) -> None:
    outputs = run_locally(stage)
    name = STAGES[stage].writes[0]
    files = [open_artifact(path, name).manifest["files"] for path in (outputs[name], chain.folder / name)]
    assert files[0] == files[1]
    assert json.loads(outputs["scalars"].read_text()) == json.loads((chain.folder / f"{stage}-scalars").read_text())
