"""kill -9 a publisher at random moments: whoever asks the champion in between is answered by a complete version."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from ramen.artifacts import Artifact
from ramen.publishing.registry import load_version, resolve_version, versions

KILLS = 3
SCRIPT = """
import os, sys
from pathlib import Path
from ramen.artifacts import drafts, open_artifact
from ramen.config import Encoder, Index
from ramen.publishing.stage import publish_index
from ramen.tracking import open_tracker
import mlflow, torch, faiss, ramen.publishing.publish, ramen.encoder.loading
inputs = {name: open_artifact(Path(sys.argv[1]) / name, name) for name in ("dataset", "model", "evaluation")}
print("ready", flush=True)
sys.stdin.readline()
place = {"retriever": Path(sys.argv[1]) / f"retriever-{os.getpid()}"}
with open_tracker("publish-index") as track:
    with drafts(place, sections={}, inputs=inputs, work=Path(sys.argv[1]) / "work") as made:
        index = Index(gate={}, kind="hnsw", ef_search=int(sys.argv[2]))  # the same again would be no new version
        publish_index(**inputs, **made, encoder=Encoder(), index=index, track=track)
print("done", flush=True)
"""


def test_alias_always_points_to_a_version_that_answers(artifacts: dict[str, Artifact], store: Path) -> None:
    folder = artifacts["dataset"].path.parent
    rng = random.Random(11)
    whole = _publish(folder, store, 16, None)
    assert resolve_version("ramen", "champion") == 1
    for i in range(KILLS):
        _publish(folder, store, 17 + i, rng.uniform(0.0, whole))
        holder = resolve_version("ramen", "champion")
        assert len(load_version("ramen", "champion").query(["rook"], 5)[0]) == 5
        answered = {one.number for one in versions("ramen") if one.tags.get("smoke") == "passed"}
        assert holder in answered
    _publish(folder, store, 17 + KILLS, None)
    assert resolve_version("ramen", "champion") == max(one.number for one in versions("ramen")), "it goes on as before"


def _publish(folder: Path, store: Path, ef_search: int, kill_after: float | None) -> float:
    """Publish an index of this `ef_search` in another process, perhaps killed; returns the seconds it took."""
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(ef_search)]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as made:
        assert made.stdin is not None and made.stdout is not None and made.stderr is not None
        assert made.stdout.readline() == "ready\n", made.stderr.read()
        made.stdin.write("go\n")
        made.stdin.flush()
        start = time.monotonic()
        if kill_after is None:
            assert made.stdout.readline() == "done\n", made.stderr.read()
        else:
            time.sleep(kill_after)
            made.send_signal(signal.SIGKILL)
        return time.monotonic() - start
