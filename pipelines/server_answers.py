"""Answers of a Kubeflow Pipelines server, checked before kfp reads them.

kfp's client waits without limit, follows redirects to login pages, and takes a page, or JSON of another server, for an
answer without fields. Requests go through `CheckedPool` instead of the client's own pool.
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
"""Time for a connection, for each part of an answer, and for the whole answer."""
MOST_BYTES = 64 << 20
"""Bytes of an answer: the description of a run with all its steps is far smaller."""
SIGN_IN = "(a login page or a proxy?)"


@dataclass(frozen=True)
class Answer:
    """A whole answer, as kfp's client reads one."""

    status: int
    reason: str
    data: bytes
    headers: Mapping[str, str]

    def getheaders(self) -> Mapping[str, str]:
        return self.headers

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return self.headers.get(name, default)


class CheckedPool:
    """A urllib3 pool whose requests end in time and whose answers are JSON objects.

    Args:
        pool: of kfp's client.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def request(self, method: str, url: str, **settings: Any) -> Answer:
        """Send a request and read the whole answer.

        Raises:
            RamenError: a redirect, an error status, no JSON object, or an answer that is too large.
            TimeoutError: the answer is not complete in time.
            urllib3.exceptions.HTTPError: no connection, or one that ends in the middle of the answer.
        """
        settings |= {
            "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            # a 503 with Retry-After would be an error without its status
            "retries": urllib3.Retry(
                connect=1, read=0, redirect=0, status=0, other=0, respect_retry_after_header=False
            ),
            "redirect": False,  # a POST would arrive as a GET, and a login page is no answer
            "preload_content": False,
        }
        answer: Answer = call_with_timeout(ANSWER_SECONDS, self._answer, method, url, **settings)
        _check(answer)
        return answer

    def _answer(self, method: str, url: str, **settings: Any) -> Answer:
        response = self._pool.request(method, url, **settings)
        try:
            return Answer(response.status, str(response.reason or ""), _body(response), response.headers)
        finally:
            response.close()


def _body(response: Any) -> bytes:
    held = bytearray()
    while part := response.read1(1 << 16):
        held += part
        if len(held) > MOST_BYTES:
            raise RamenError(f"the answer is larger than {MOST_BYTES:,} bytes")
    return bytes(held)


def _check(answer: Answer) -> None:
    if 300 <= answer.status < 400:
        place = answer.headers.get("Location", "nowhere")
        raise RamenError(f"redirects to {place[:200]}, expected an answer {SIGN_IN}")
    try:
        found = json.loads(answer.data)
    except (ValueError, RecursionError):
        found = None
    if not 200 <= answer.status < 300:
        said = (found.get("message") or found.get("error")) if isinstance(found, dict) else None
        raise RamenError(_line(said) if said else f"answers with status {answer.status} {answer.reason}".rstrip())
    kind = answer.headers.get("Content-Type", "")
    if "json" not in kind.lower():
        raise RamenError(f"answers {kind[:60] or 'without a content type'}, expected JSON {SIGN_IN}")
    if not isinstance(found, dict):
        raise RamenError("the answer is no JSON object, as a server of Kubeflow Pipelines gives")


def _line(text: object) -> str:
    return (str(text).strip().splitlines() or [""])[0][:300]


def identifier(value: object, what: str) -> str:
    """An id from an answer. Raises RamenError when the answer holds none."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,200}", value):
        raise RamenError(f"the answer holds no {what}, as a server of Kubeflow Pipelines gives")
    return value
