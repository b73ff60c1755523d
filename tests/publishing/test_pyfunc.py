"""`mlflow models serve -m models:/ramen@champion`, queried over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import Artifact, create_drafts
from ramen.config import EncoderConfig, IndexConfig
from ramen.publishing.registry import load_version
from ramen.publishing.stage import publish_index

pytestmark = pytest.mark.slow

Post = Callable[[Any], tuple[int, Any]]


@pytest.fixture
def invoke(artifacts: dict[str, Artifact], track: Any, store: Path, tmp_path: Path) -> Iterator[Post]:
    """A function that posts a body to /invocations of the served champion and returns (status, answer)."""
    with create_drafts(
        {"retriever": tmp_path / "retriever"}, sections={}, inputs=artifacts, work=tmp_path / "work"
    ) as written:
        publish_index(**artifacts, **written, encoder=EncoderConfig(), index=IndexConfig(), track=track)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/ramen@champion"]
    command += ["--env-manager", "local", "-p", str(port)]
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/ping", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.3)
        yield lambda body: post(f"{url}/invocations", body)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_server_answers_batches_and_refuses_invalid_input(invoke: Post) -> None:
    status, answer = invoke({"inputs": ["pepper soup", "rook", ""], "params": {"k": 4}})
    assert status == 200
    local = load_version("ramen", "champion").query(["pepper soup", "rook", ""], 4)
    assert [row["ids"] for row in answer["predictions"]] == [[hit.uid for hit in hits] for hits in local]
    assert [row["texts"] for row in answer["predictions"]] == [[hit.text for hit in hits] for hits in local]
    for row, hits in zip(answer["predictions"], local, strict=True):
        assert row["scores"] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    assert len(invoke({"inputs": ["rook"]})[1]["predictions"][0]["ids"]) == 10
    labels = answer["predictions"][1]["ids"]
    remaining = invoke({"inputs": ["rook"], "params": {"k": 3, "exclude": labels[:2]}})[1]["predictions"][0]["ids"]
    assert remaining[:2] == labels[2:4] and len(remaining) == 3
    for body, message in [
        ({"inputs": ["rook"], "params": {"k": 0}}, "at least 1"),
        ({"inputs": ["rook"], "params": {"k": 1_000_000_000}}, "at most 1000"),
        ({"inputs": ["rook"], "params": {"k": "many"}}, "k"),
        ({"inputs": [1, 2]}, "str"),
        ({"inputs": {"text": "rook"}}, "list"),
        ({"text": "rook"}, "inputs"),
        (b'{"inputs": ["rook", "\\ud800"]}', "character 1 is a lone surrogate (U+D800)"),
        (b'{"inputs": ["rook"], "params": {"k": NaN}}', "k"),
        (b"{not json", "JSON"),
    ]:
        status, answer = invoke(body)
        assert 400 <= status < 500 and message in str(answer), (body, status, answer)
    assert invoke({"inputs": ["rook"], "params": {"k": 3}})[0] == 200, "the server still answers"
