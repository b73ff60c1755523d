"""Clients that connect and send no complete request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI

from ramen.serving import server


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that waits half a second for headers and answers after a second."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.5)
    app = FastAPI()

    @app.get("/")
    def answer_slowly() -> str:
        time.sleep(1.0)
        return "ready"

    bound = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, http=server.HeaderTimeoutProtocol, log_level="warning"))
    thread = threading.Thread(target=running.run, args=([bound],))
    thread.start()
    yield bound.getsockname()
    running.should_exit = True
    thread.join()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", bytes(range(128, 228))])
def test_connection_without_complete_headers_is_closed(sent: bytes, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(4096), b""))
        assert received == b"" or received.startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_slow_answers_do_not_time_out_and_connections_are_reused(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as client:
        for _ in range(2):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while b'"ready"' not in received:
                received += client.recv(4096) or pytest.fail("closed")
