"""Component `warmup` on Kubeflow's local subprocess runner."""

from __future__ import annotations

import json
from typing import Any

from ramen.artifacts import open_artifact


def test_it_gives_what_the_plain_call_gave(run_locally: Any, chain: Any) -> None:
    made = run_locally("warmup")
    files = [
        open_artifact(place, "warm_model").manifest["files"]
        for place in (made["warm_model"], chain.folder / "warm_model")
    ]
    assert files[0] == files[1]
    assert json.loads(made["scalars"].read_text()) == json.loads((chain.folder / "warmup-scalars").read_text())
