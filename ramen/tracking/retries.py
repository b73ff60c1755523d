"""Retry and timeout settings of MLflow's HTTP requests.

MLflow reads them from environment variables, and its defaults retry for many minutes without a message.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ramen.deadline import call_with_timeout
from ramen.errors import ConfigError, short_repr

IGNORE_RETRY_AFTER = {"MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false"}
"""A server's Retry-After header may demand an hour between two attempts."""
ONLINE_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30", **IGNORE_RETRY_AFTER}
"""For a write while the store is reachable: about a minute."""
OFFLINE_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15", **IGNORE_RETRY_AFTER}
"""For a store known to be unreachable, and for requests that a user waits for."""
CONNECT_RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15", **IGNORE_RETRY_AFTER}
"""For the first request of a stage: a wrong address is reported within seconds."""

LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": (0, 10),
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": (0, 120),
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": (0, 120),
}
"""MLFLOW_HTTP_* variable -> lowest and highest value."""
DEFAULT_LIMITS = (1, 86_400)
"""Limits of the MLFLOW_HTTP_* variables that `LIMITS` does not list."""


def configure_mlflow() -> None:
    """Check MLflow's HTTP settings, limit the time of its requests, and silence its log messages.

    The silenced messages are database migrations, and tracebacks of errors that MLflow raises as well.

    Raises:
        ConfigError: an environment variable `MLFLOW_HTTP_*` has an invalid value.
    """
    from mlflow import environment_variables
    from mlflow.utils import rest_utils

    for name in sorted(key for key in os.environ if key.startswith("MLFLOW_HTTP_")):
        _check_setting(name, getattr(environment_variables, name, None))
    send = rest_utils._get_http_response_with_retries
    if not hasattr(send, "__wrapped__"):
        rest_utils._get_http_response_with_retries = _with_deadline(send)
    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _check_setting(name: str, variable: Any) -> None:
    low, high = LIMITS.get(name, DEFAULT_LIMITS)
    try:
        value = 1 if variable is None else variable.get()
        if isinstance(value, bool) or low <= value <= high:
            return
        expected = f"a number from {low} to {high:,}"
    except ValueError:
        expected = {int: "a whole number", float: "a number"}.get(variable.type, "true or false")
    raise ConfigError(f"{name} = {short_repr(os.environ[name])}: expected {expected}; correct the variable or unset it")


def _with_deadline(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MLflow's request function with a deadline for the complete response; file transfers have none.

    MLflow's own timeout limits the wait for each part of a response, so a slow server could delay it without end.
    """

    @functools.wraps(send)
    def send_within(method: str, url: str, retries: int, *args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        if not timeout or kwargs.get("stream") or "data" in kwargs:
            return send(method, url, retries, *args, **kwargs)
        return call_with_timeout(timeout * (retries + 2), send, method, url, retries, *args, **kwargs)

    return send_within


_defaults_lock = threading.Lock()
_defaults_users: dict[str, int] = {}
"""Variables that `environment_defaults` set -> number of callers that need them; threads share the environment."""


@contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, and unset them at the end.

    Threads may use it concurrently: a variable is unset when the last of them ends.
    """
    used = []
    with _defaults_lock:
        for key, value in values.items():
            if key in _defaults_users or key not in os.environ:
                os.environ.setdefault(key, value)
                _defaults_users[key] = _defaults_users.get(key, 0) + 1
                used.append(key)
    try:
        yield
    finally:
        with _defaults_lock:
            for key in used:
                _defaults_users[key] -= 1
                if not _defaults_users[key]:
                    del _defaults_users[key]
                    os.environ.pop(key, None)
