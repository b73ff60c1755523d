"""kill -9 a publisher at random moments: the champion is always a complete version."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramen.artifacts import Artifact
from ramen.publishing.registry import list_versions, load_version, resolve_version

pytestmark = pytest.mark.slow

KILLS = 3
SCRIPT = """
import os, sys
from pathlib import Path
from ramen.artifacts import create_drafts, open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.publishing.stage import publish_index
from ramen.tracking import open_tracker
import mlflow, torch, faiss, ramen.publishing.publish, ramen.encoder.loading
inputs = {name: open_artifact(Path(sys.argv[1]) / name, name) for name in ("dataset", "model", "evaluation")}
print("ready", flush=True)
sys.stdin.readline()
output = {"retriever": Path(sys.argv[1]) / f"retriever-{os.getpid()}"}
with open_tracker("publish-index") as track:
    with create_drafts(output, sections={}, inputs=inputs, work=Path(sys.argv[1]) / "work") as written:
        index = IndexConfig(gate={}, kind="hnsw", ef_search=int(sys.argv[2]))  # same contents: no new version
        publish_index(**inputs, **written, encoder=EncoderConfig(), index=index, track=track)
print("done", flush=True)
"""


def test_champion_answers_after_a_publisher_is_killed(artifacts: dict[str, Artifact], store: Path) -> None:
    folder = artifacts["dataset"].path.parent
    rng = random.Random(11)
    duration = _publish(folder, store, 16, None)
    assert resolve_version("ramen", "champion") == 1
    for i in range(KILLS):
        _publish(folder, store, 17 + i, rng.uniform(0.0, duration))
        champion = resolve_version("ramen", "champion")
        assert len(load_version("ramen", "champion").query(["rook"], 5)[0]) == 5
        passed = {version.number for version in list_versions("ramen") if version.tags.get("smoke") == "passed"}
        assert champion in passed
    _publish(folder, store, 17 + KILLS, None)
    newest = max(version.number for version in list_versions("ramen"))
    assert resolve_version("ramen", "champion") == newest, "a later publisher works as before"


def _publish(folder: Path, store: Path, ef_search: int, kill_after: float | None) -> float:
    """Publish an index in another process and return the seconds it took; kill it after `kill_after` seconds."""
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(ef_search)]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.stdin.write("go\n")
        process.stdin.flush()
        start = time.monotonic()
        if kill_after is None:
            assert process.stdout.readline() == "done\n", process.stderr.read()
        else:
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
        return time.monotonic() - start
