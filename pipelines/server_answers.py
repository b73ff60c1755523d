"""Responses of a Kubeflow Pipelines server, checked before kfp reads them.

kfp's client waits without a time limit, follows redirects to login pages, and parses an HTML page, or JSON of another
server, as a response without fields. `CheckedPool` replaces the client's connection pool and refuses such responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from ramen.deadline import call_with_timeout
from ramen.errors import RamenError

CONNECT_SECONDS, READ_SECONDS, ANSWER_SECONDS = 10.0, 30.0, 60.0
"""Time limits for connecting, for each part of a response, and for the whole response."""
MAX_BYTES = 64 << 20
"""Largest response; the description of a run with all its steps is far smaller."""
SIGN_IN = "(a login page or a proxy?)"


@dataclass(frozen=True)
class Response:
    """A complete response, with the attributes that kfp's client reads."""

    status: int
    reason: str
    data: bytes
    headers: Mapping[str, str]

    def getheaders(self) -> Mapping[str, str]:
        return self.headers

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return self.headers.get(name, default)


class CheckedPool:
    """A urllib3 pool with time limits that accepts only JSON objects as responses.

    Args:
        pool: the connection pool of kfp's client.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def request(self, method: str, url: str, **settings: Any) -> Response:
        """Send a request and return the complete response.

        Raises:
            RamenError: a redirect, an error status, a body that is not a JSON object, or too large.
            TimeoutError: the response is not complete in time.
            urllib3.exceptions.HTTPError: no connection, or one that ends within the response.
        """
        settings |= {
            "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            # urllib3 would retry a 503 with Retry-After and then raise an error without the status
            "retries": urllib3.Retry(
                connect=1, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False
            ),
            "redirect": False,  # a redirected POST becomes a GET, and the target is usually a login page
            "preload_content": False,
        }
        response: Response = call_with_timeout(ANSWER_SECONDS, self._send, method, url, **settings)
        _check_response(response)
        return response

    def _send(self, method: str, url: str, **settings: Any) -> Response:
        response = self._pool.request(method, url, **settings)
        try:
            return Response(response.status, str(response.reason or ""), _read_body(response), response.headers)
        finally:
            response.close()


def _read_body(response: Any) -> bytes:
    body = bytearray()
    while part := response.read1(1 << 16):
        body += part
        if len(body) > MAX_BYTES:
            raise RamenError(f"the response is larger than {MAX_BYTES:,} bytes")
    return bytes(body)


def _check_response(response: Response) -> None:
    if 300 <= response.status < 400:
        location = response.headers.get("Location", "nowhere")
        raise RamenError(f"redirects to {location[:200]}, expected a JSON object {SIGN_IN}")
    try:
        content = json.loads(response.data)
    except (ValueError, RecursionError):
        content = None
    if not 200 <= response.status < 300:
        message = (content.get("message") or content.get("error")) if isinstance(content, dict) else None
        status = f"responds with status {response.status} {response.reason}".rstrip()
        raise RamenError(_first_line(message) if message else status)
    kind = response.headers.get("Content-Type", "")
    if "json" not in kind.lower():
        raise RamenError(f"responds with {kind[:60] or 'no content type'}, expected JSON {SIGN_IN}")
    if not isinstance(content, dict):
        raise RamenError("the response is not a JSON object, so the server is not Kubeflow Pipelines")


def _first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [""])[0][:300]


def check_id(value: object, name: str) -> str:
    """Return an id from a response. Raises RamenError if it is missing or not an id."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,200}", value):
        raise RamenError(f"the response has no {name}, so the server is not Kubeflow Pipelines")
    return value
