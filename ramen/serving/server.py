"""Bind an address and serve an application until SIGTERM or SIGINT."""

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
from ramen.serving.limits import HEADER_SECONDS, MAX_CONNECTIONS, SHUTDOWN_SECONDS
from ramen.signals import on_interrupt

BACKLOG = 128
"""Connections that the operating system queues until they are accepted."""


class HeaderTimeoutProtocol(H11Protocol):
    """Closes a connection whose request headers do not arrive in time; uvicorn itself has no such limit."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_header_timer()

    def _update_header_timer(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._cancel_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        RamenError: the address does not exist or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RamenError(f"{host}:{port}: cannot listen ({why}); give another --host or --port") from None
    return bound


def serve(app: FastAPI, bound: socket.socket, announce: Callable[[str], Any]) -> None:
    """Serve until SIGTERM or SIGINT; running requests have `SHUTDOWN_SECONDS` to finish.

    Args:
        app: the application.
        bound: a socket from `bind`.
        announce: called with the address, as http://host:port, once connections are accepted.

    Raises:
        RamenError: another process has started to listen on the address.
    """
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise RamenError(f"{host}:{port}: cannot listen ({error.strerror}); give another --port") from None
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    with on_interrupt(lambda: None):  # uvicorn raises the signal again after a clean stop; keep exit code 0
        _Server(config, lambda: announce(address)).run([bound])
    gc.freeze()  # the collection at exit would scan all objects of torch, which takes seconds
