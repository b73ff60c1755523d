"""Listen on an address and serve an application until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ramen.errors import RamenError
from ramen.serving.limits import HEADER_SECONDS, MOST_CONNECTIONS, STOP_SECONDS
from ramen.signals import on_interrupt

BACKLOG = 128
"""Connections that wait to be accepted."""


class _Protocol(H11Protocol):
    """Closes a connection on which the headers of a request do not arrive in time; uvicorn waits for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel()

    def _await_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._cancel()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises:
        RamenError: the address does not exist or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RamenError(f"{host}:{port}: cannot listen there ({why}); give another --host or --port") from None
    return listening


def serve(app: FastAPI, listening: socket.socket, announce: Callable[[str], Any]) -> None:
    """Serve until a signal asks to stop; requests under way have `STOP_SECONDS` to finish.

    Args:
        app: the application.
        listening: a bound socket.
        announce: called with the address, as http://host:port, once connections are accepted.

    Raises:
        RamenError: another process listens on the same address since.
    """
    host, port = listening.getsockname()[:2]
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        raise RamenError(f"{host}:{port}: cannot listen there ({error.strerror}); give another --port") from None
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_level="warning",
        limit_concurrency=MOST_CONNECTIONS,
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    with on_interrupt(lambda: None):  # uvicorn raises the signal again after a clean stop; the exit code is 0 then
        _Server(config, lambda: announce(address)).run([listening])
    gc.freeze()  # or Python looks through all of torch's objects for garbage before it ends: seconds
