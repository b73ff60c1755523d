"""`mlflow models serve -m models:/ramen@champion`, asked over HTTP as a client would."""

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

from ramen.artifacts import Artifact, drafts
from ramen.config import EncoderConfig, IndexConfig
from ramen.publishing.registry import load_version
from ramen.publishing.stage import publish_index

Ask = Callable[[Any], tuple[int, Any]]


@pytest.fixture
def ask(artifacts: dict[str, Artifact], track: Any, store: Path, tmp_path: Path) -> Iterator[Ask]:
    """POST a body to /invocations of a served champion; returns (status, answer)."""
    with drafts({"retriever": tmp_path / "retriever"}, sections={}, inputs=artifacts, work=tmp_path / "work") as made:
        publish_index(**artifacts, **made, encoder=EncoderConfig(), index=IndexConfig(), track=track)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        "models:/ramen@champion",
        "--env-manager",
        "local",
    ]
    env = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        [*command, "-p", str(port)], cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/ping", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.3)
        yield lambda body: _post(f"{url}/invocations", body)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def _post(url: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_server_answers_many_texts_at_once_and_refuses_what_it_cannot_answer(ask: Ask) -> None:
    status, answer = ask({"inputs": ["pepper soup", "rook", ""], "params": {"k": 4}})
    assert status == 200
    local = load_version("ramen", "champion").query(["pepper soup", "rook", ""], 4)
    assert [row["ids"] for row in answer["predictions"]] == [[hit.uid for hit in hits] for hits in local]
    assert [row["texts"] for row in answer["predictions"]] == [[hit.text for hit in hits] for hits in local]
    for row, hits in zip(answer["predictions"], local, strict=True):
        assert row["scores"] == pytest.approx([hit.score for hit in hits], abs=1e-5)
    assert len(ask({"inputs": ["rook"]})[1]["predictions"][0]["ids"]) == 10
    labels = answer["predictions"][1]["ids"]
    left_out = ask({"inputs": ["rook"], "params": {"k": 3, "exclude": labels[:2]}})[1]["predictions"][0]["ids"]
    assert left_out[:2] == labels[2:4] and len(left_out) == 3
    for body, said in [
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
        status, answer = ask(body)
        assert 400 <= status < 500 and said in str(answer), (body, status, answer)
    assert ask({"inputs": ["rook"], "params": {"k": 3}})[0] == 200, "it still serves"
