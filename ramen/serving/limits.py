"""Limits on requests: size and time of a body, strict JSON, and error responses that do not repeat the input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 1 << 20
"""Fits the longest text and the most excluded uids, with every character escaped."""
MAX_DISCARDED_BYTES = 32 << 20
"""Bytes of a too large body that are read before it is refused: a client that is still sending misses the response."""
HEADER_SECONDS = 10.0
"""Time for the headers of a request to arrive; then the connection is closed."""
BODY_SECONDS = 10.0
"""Time for a body to arrive."""
MAX_KEYS = 32
"""Keys of a JSON object in a body."""
MAX_ERRORS, MAX_CHARACTERS = 5, 200
"""Errors in a response, and characters of each of their parts."""
MAX_CONNECTIONS = 512
"""Open connections; further clients get status 503."""
SHUTDOWN_SECONDS = 15
"""Time for running requests to finish when the server stops; longer than `BODY_SECONDS`."""


class BodyLimit:
    """ASGI middleware that refuses a body that is too large (413) or too slow (408).

    Unlike the body limits of FastAPI and Starlette, it limits how long a body may take, and it reads the rest of a
    large body so that the client receives the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive)
        except TimeoutError:
            await _error_response(408, f"body: did not arrive within {BODY_SECONDS:g} s")(scope, receive, send)
            return
        except _BodyTooLarge:
            await _error_response(413, f"body: larger than {MAX_BODY_BYTES:,} bytes")(scope, receive, send)
            return
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


class _BodyTooLarge(Exception):
    pass


async def _read_body(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client disconnects.

    Raises:
        _BodyTooLarge: the body exceeds the limit; no more than the limit is kept in memory.
    """
    body, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part, more = message.get("body", b""), message.get("more_body")
        size += len(part)
        if size <= MAX_BODY_BYTES:
            body += part
        else:
            body.clear()
        if size > MAX_DISCARDED_BYTES or (size > MAX_BODY_BYTES and not more):
            raise _BodyTooLarge
        if not more:
            return bytes(body)


def _error_response(status: int, detail: str) -> JSONResponse:
    # the rest of the body may be unread, so the connection cannot be reused
    return JSONResponse({"detail": detail}, status, headers={"Connection": "close"})


def read_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Returns:
        The value. An object has at most `MAX_KEYS` keys, and every string is valid Unicode.

    Raises:
        HTTPException: 422 for a body that is not UTF-8, is not JSON (NaN and Infinity are not JSON), nests too deeply,
            or contains numbers of thousands of digits, lone surrogates or too many keys.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid_json(f"not valid JSON: {error}") from None
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise _invalid_json(f"expected at most {MAX_KEYS} keys, found {len(value):,} keys")
    return value


def _invalid_json(message: str) -> HTTPException:
    return HTTPException(422, [{"type": "json_invalid", "loc": ["body"], "msg": _shorten(message)}])


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route that reads its body with `read_json` and refuses other content types (415)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and content_type != "application/json":
                raise HTTPException(415, f"Content-Type: expected 'application/json', found {_shorten(content_type)!r}")
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


async def refuse_invalid(request: Request, error: Exception) -> Response:
    """Return status 422 with the first validation errors, without the input."""
    assert isinstance(error, RequestValidationError)
    errors = [
        {"type": one["type"], "loc": [_shorten(part) for part in one["loc"]], "msg": _shorten(one["msg"])}
        for one in error.errors()[:MAX_ERRORS]
    ]
    return JSONResponse({"detail": errors}, 422)


def _shorten(part: Any) -> Any:
    """Return the part of a message, cut to `MAX_CHARACTERS` if it is a longer string."""
    if isinstance(part, str) and len(part) > MAX_CHARACTERS:
        return part[:MAX_CHARACTERS] + "..."
    return part
