"""Removal of credentials from text that is printed, logged or tracked."""

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
"""Names of secrets: `_SECRET` in any text; in URLs also short names, which mean other things elsewhere."""
_USER = (
    # greedy: an unencoded password may contain "/" or "@"; losing a path is better than showing a password
    re.compile(r"(?<=://)[^\s:/?#@]*:[^\s]*@"),
    re.compile(r"(?<=://)[^\s/?#]*@"),
)
"""User and password of a URL."""
_PATTERNS = (
    *((pattern, f"{HIDDEN}@") for pattern in _USER),
    (re.compile(r"(?<![\w:/@.%+-])[\w.%+-]+:[^\s@/:]+@(?=[\w\[])"), f"{HIDDEN}@"),  # a URL without its scheme
    # parameters of a query string or fragment
    (re.compile(rf"(?i)(?<=[?&;#])((?:{_NAMES})=)(?:'[^']*'|\"[^\"]*\"|[^\s&;#'\"]*[^\s&;#'\":]|)"), rf"\g<1>{HIDDEN}"),
    # secrets in a connection string, JSON or a header
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
"""Environment variables whose URLs may contain a password."""
SECRET_VARIABLES = (
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "KF_PIPELINES_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "HF_TOKEN",
)  # fmt: skip
"""Environment variables that are secrets."""
MIN_SECRET_LENGTH = 4
"""Shorter values of secret variables are not searched for: they occur in ordinary words."""


def redact(text: str) -> str:
    """Replace credentials in a text by "***".

    These are: user and password of URLs, secret URL parameters (password, token, key, signature, ...), bearer tokens,
    and the values of this process's secret environment variables wherever they occur.
    """
    for secret in _known_secrets(os.environ):
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def strip_credentials(url: str) -> str:
    """Return a URL without user and password, for files that others read."""
    for pattern in _USER:
        url = pattern.sub("", url)
    return url


def redact_values(value: Any) -> Any:
    """Return a JSON value with every string redacted except keys."""
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
    """Removes credentials from log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), None
        return True


def _known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the secret values of an environment, longest first."""
    secrets: set[str] = set()
    for value in (environment.get(name, "") for name in SECRET_VARIABLES):
        secrets |= {value, value.strip(), repr(value)[1:-1], *value.split()}
    for name in URL_VARIABLES:
        # greedy up to the last "@": an unencoded password may contain one
        if match := re.match(r"(?:[^:/]+:)?/*[^:/?#@]*:(.*)@", environment.get(name, ""), re.DOTALL):
            secrets |= {match.group(1), unquote(match.group(1))}
    return sorted((secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True)
