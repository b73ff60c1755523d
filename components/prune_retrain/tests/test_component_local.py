"""Component `prune-retrain` on Kubeflow's local subprocess runner."""

from __future__ import annotations

import json
from typing import Any

from ramen.artifacts import open_artifact


def test_it_gives_what_the_plain_call_gave(run_locally: Any, chain: Any) -> None:
    made = run_locally("prune-retrain")
    files = [open_artifact(place, "model").manifest["files"] for place in (made["model"], chain.folder / "model")]
    assert files[0] == files[1]
    assert json.loads(made["scalars"].read_text()) == json.loads((chain.folder / "prune-retrain-scalars").read_text())
