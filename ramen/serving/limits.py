"""What the server accepts of a request: bodies of bounded size and time, strict JSON, and errors without the input."""

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

MOST_BYTES = 1 << 20
"""Bytes of a body: the longest text and the most excluded uids, with every character escaped."""
MOST_DISCARDED = 32 << 20
"""Bytes of a body too large that are read before it is refused: a client that still sends sees no answer otherwise."""
HEADER_SECONDS = 10.0
"""Within which the headers of a request must have arrived; a silent connection is closed."""
BODY_SECONDS = 10.0
"""Within which a body must have arrived."""
MOST_KEYS = 32
"""Keys of a body's object."""
MOST_ERRORS, MOST_CHARACTERS = 5, 200
"""Of an answer that refuses a body: entries, and characters of each part of an entry."""
MOST_CONNECTIONS = 512
"""Open connections; a further client gets status 503."""
STOP_SECONDS = 15
"""For which requests under way may finish when the server is stopped; longer than a body may take to arrive."""


class BodyLimit:
    """ASGI middleware: reads a request's body, and refuses one that is too large (413) or too slow (408).

    It bounds the time as well, and reads the rest of a large body, so that the client gets the answer; the body limits
    of FastAPI and Starlette do neither.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            refusal = _refusal(408, f"body: did not arrive within {BODY_SECONDS:g} s")
            await refusal(scope, receive, send)
            return
        except _TooLarge:
            await _refusal(413, f"body: larger than {MOST_BYTES:,} bytes")(scope, receive, send)
            return
        if body is None:
            return  # the client is gone
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return rest.pop() if rest else await receive()

        await self.app(scope, replay, send)


class _TooLarge(Exception):
    pass


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None when the client disconnects. Raises _TooLarge without ever holding more than the limit."""
    held, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part, more = message.get("body", b""), message.get("more_body")
        size += len(part)
        if size <= MOST_BYTES:
            held += part
        else:
            held.clear()
        if size > MOST_DISCARDED or (size > MOST_BYTES and not more):
            raise _TooLarge
        if not more:
            return bytes(held)


def _refusal(status: int, detail: str) -> JSONResponse:
    # the rest of the body is never read, so the connection cannot be used again
    return JSONResponse({"detail": detail}, status, headers={"Connection": "close"})


def read_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Returns:
        The value; an object has at most `MOST_KEYS` keys, and every string is valid Unicode.

    Raises:
        HTTPException: 422 for a body that is not UTF-8 or not JSON (NaN and Infinity are not), that nests too deep or
            has numbers of thousands of digits, lone surrogates or too many keys.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _invalid(f"not valid JSON: {error}") from None
    if isinstance(value, dict) and len(value) > MOST_KEYS:
        raise _invalid(f"an object of {len(value):,} keys; at most {MOST_KEYS} are accepted")
    return value


def _invalid(message: str) -> HTTPException:
    return HTTPException(422, [{"type": "json_invalid", "loc": ["body"], "msg": _cut(message)}])


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json`, and which refuses other content types (415)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind != "application/json":
                raise HTTPException(415, f"Content-Type is {_cut(kind)!r}, expected 'application/json'")
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


async def refuse_invalid(request: Request, error: Exception) -> Response:
    """Answer a request that does not validate: status 422 and the first errors, without the input."""
    assert isinstance(error, RequestValidationError)
    found = [
        {"type": one["type"], "loc": [_cut(part) for part in one["loc"]], "msg": _cut(one["msg"])}
        for one in error.errors()[:MOST_ERRORS]
    ]
    return JSONResponse({"detail": found}, 422)


def _cut(part: Any) -> Any:
    """A part of a message, shortened if it is a long text."""
    if isinstance(part, str) and len(part) > MOST_CHARACTERS:
        return part[:MOST_CHARACTERS] + "..."
    return part
