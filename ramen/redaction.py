"""Credentials are removed from every text that people see or that is logged or tracked."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_SECRET = (
    r"(?:[\w.\[\]-]*(?:password|passwd|passphrase|token|secret|credentials?|signature|authorization)|pass|pwd|"
    r"[\w.-]*(?:api|access|secret|account|private|shared)[_.-]?key(?:[_.-]?id)?)\]?(?:\[\])?"
)
_NAMES = rf"{_SECRET}|sig|auth|jwt|session|code|[\w.-]*[_.-]?key(?:[_.-]?id)?"
"""Names of secrets: in text of any kind, and in a URL, where short names have no other meaning."""
_USER = (
    # a password may hold "/" or "@" where somebody forgot to encode it: rather a path than a password is lost
    re.compile(r"(?<=://)[^\s:/?#@]*:[^\s]*@"),
    re.compile(r"(?<=://)[^\s/?#]*@"),
)
"""User and password of a URL, before its host."""
_PATTERNS = (
    *((pattern, f"{HIDDEN}@") for pattern in _USER),
    (re.compile(r"(?<![\w:/@.%+-])[\w.%+-]+:[^\s@/:]+@(?=[\w\[])"), f"{HIDDEN}@"),  # an address without a scheme
    # parameters of a query string or fragment
    (re.compile(rf"(?i)(?<=[?&;#])((?:{_NAMES})=)(?:'[^']*'|\"[^\"]*\"|[^\s&;#'\"]*[^\s&;#'\":]|)"), rf"\g<1>{HIDDEN}"),
    # the same as a data source name, JSON or a header has them
    (
        re.compile(
            rf"(?i)(?<![\w.?&;#-])(['\"]?(?:--)?(?:{_SECRET})['\"]?\s*(?:=|:(?!//))\s*(?:(?:bearer|basic|token)\s+)?)"
            r"('[^']*'|\"[^\"]*\"|[^\s,;&)}\]'\"]+)"
        ),
        rf"\g<1>{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer\s+|basic\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\g<1>{HIDDEN}"),
)
URL_VARIABLES = (
    "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "KF_PIPELINES_ENDPOINT", "RAMEN_DVC_REMOTE", "AWS_ENDPOINT_URL",
    "MLFLOW_S3_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy",
)  # fmt: skip
"""Environment variables whose URLs may hold a password."""
SECRET_VARIABLES = (
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "KF_PIPELINES_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "HF_TOKEN",
)  # fmt: skip
"""Environment variables that are secrets."""
SHORTEST = 4
"""Characters of the shortest secret that is looked for by its value: shorter ones occur in ordinary words."""


def redact(text: str) -> str:
    """A text without credentials.

    Removed are user and password of URLs, parameters of URLs that hold secrets (password, token, key, signature, ...),
    bearer tokens, and the values of the secrets that this process has in its environment, wherever they occur.
    """
    for secret in _known_secrets(os.environ):
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def without_credentials(url: str) -> str:
    """A URL without user and password, as it is written where others read it."""
    for pattern in _USER:
        url = pattern.sub("", url)
    return url


def redact_values(value: Any) -> Any:
    """A JSON value with every string redacted, keys excepted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(item, str) and item and re.fullmatch(f"(?i){_SECRET}", str(key)) else
            redact_values(item)
            for key, item in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value


class RedactingFilter(logging.Filter):
    """Redacts log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), None
        return True


def _known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Secret values of an environment, longest first."""
    found: set[str] = set()
    for value in (environment.get(name, "") for name in SECRET_VARIABLES):
        found |= {value, value.strip(), repr(value)[1:-1], *value.split()}
    for name in URL_VARIABLES:
        # greedy up to the last "@": a password that was not encoded may hold one
        if match := re.match(r"(?:[^:/]+:)?/*[^:/?#@]*:(.*)@", environment.get(name, ""), re.DOTALL):
            found |= {match.group(1), unquote(match.group(1))}
    return sorted((secret for secret in found if len(secret) >= SHORTEST), key=len, reverse=True)
