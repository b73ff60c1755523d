"""Fixtures with an S3 server: `rclone serve s3`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

KEY, SECRET = "ramen", "a-secret-for-tests"
BUCKET = "graphs"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an S3 server with the empty bucket `graphs`."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / BUCKET).mkdir()
    address = f"127.0.0.1:{free_port()}"
    rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    server = subprocess.Popen(
        [rclone, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", address, "--config", "", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            with socket.socket() as probe:
                host, port = address.split(":")
                if probe.connect_ex((host, int(port))) == 0:
                    break
            assert server.poll() is None, "rclone serve s3 did not start"
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of the bucket; the server's address and keys are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return f"s3://{BUCKET}"


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
