"""Errors of MLflow, and of the stores and the network behind it, as one line."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ramen.deadline import call_within
from ramen.errors import ConfigError, RamenError, reason, shown
from ramen.tracking.journal import PATIENCE, environment_defaults

CARRIERS = {"mlflow", "requests", "urllib3", "boto3", "botocore", "sqlalchemy", "alembic"}
"""Packages that carry a call to the tracking store or the model registry."""
LONGEST = 300
"""Characters of an error's text that are shown: a web page may be a single line."""
REGISTRY = ("mlflow.tracking._model_registry", "mlflow.store.model_registry")
"""Modules of MLflow that call the model registry."""
S3_SETTINGS = "AWS_ENDPOINT_URL, MLFLOW_S3_ENDPOINT_URL and the AWS access keys"
STATUS = r"the server answers with status \1"
PLAIN = (
    ("is in maintenance mode", "MLflow no longer supports a folder of files; use sqlite:///mlflow.db or a server"),
    (r"failed with error code (\d+) != 200", STATUS),
    (r"too many (\d+) error responses", STATUS),
    ("not in a valid JSON format", "the server's answer is not JSON (a login page or a proxy?)"),
    (r"Exceeded (\d+) redirects", r"the server redirects more than \1 times"),
    (r"(the answer is not complete after [\d.]+ s)", r"\1"),
    (r"timed out\. \(.*timeout=([\d.]+)\)", r"timed out: no answer within \1 s"),
)
"""Pattern of a long message -> the same in a few words."""
LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": (0, 10),
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": (0, 120),
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": (0, 120),
}
"""Lowest and highest value of a setting of MLflow's requests; `ANY_LIMITS` for the settings that are not listed."""
ANY_LIMITS = (1, 86_400)


def tracking_uri() -> str:
    """Where MLflow looks: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def registry_uri() -> str:
    """Where MLflow looks for registered models: MLFLOW_REGISTRY_URI, else as `tracking_uri`."""
    import mlflow

    return str(mlflow.get_registry_uri())


def uri_variable(uri: str) -> str:
    """Name of the environment variable that sets a store's URI."""
    return "MLFLOW_TRACKING_URI" if uri == tracking_uri() else "MLFLOW_REGISTRY_URI"


def _modules(error: BaseException) -> Iterator[str]:
    """Names of the modules that an exception was raised through."""
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_frame.f_globals.get("__name__", "")
        frame = frame.tb_next


def is_store_error(error: BaseException) -> bool:
    """Whether an exception was raised inside a call to MLflow or to a package that it calls.

    Any type counts: a missing driver is a ModuleNotFoundError, an answer that is no JSON a ValueError.
    """
    return any(name.partition(".")[0] in CARRIERS for name in _modules(error))


def store_error(error: BaseException, doing: str = "") -> RamenError:
    """The error that the user reads: what was done, the store without its password, and the reason."""
    uri = registry_uri() if any(name.startswith(REGISTRY) for name in _modules(error)) else tracking_uri()
    what = f"{doing} in {uri}" if doing else f"MLflow at {uri}"
    return RamenError(f"{what}: {explained(error)}; check {S3_SETTINGS if _is_of_s3(error) else uri_variable(uri)}")


def _is_of_s3(error: BaseException | None) -> bool:
    """Whether an exception, or one that it replaces, was raised by the client of S3."""
    while error is not None:
        if any(name.startswith("botocore.") for name in _modules(error)):
            return True
        error = error.__context__
    return False


def explained(error: BaseException) -> str:
    """The reason of a store's error, with what to install when a driver is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"the database driver {error.name!r} is not installed: pip install {error.name}"
    for pattern, text in PLAIN:
        if match := re.search(pattern, str(error)):
            return match.expand(text)
    said = re.split(r"\.? See https?://", reason(error), maxsplit=1)[0].rstrip(".;: ")
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def prepare_mlflow() -> None:
    """Check MLflow's settings, limit the time of its requests, and keep its log lines off the terminal.

    The log lines are migrations, and tracebacks of errors that are raised as well.

    Raises:
        ConfigError: an environment variable `MLFLOW_HTTP_*` has a wrong value.
    """
    from mlflow import environment_variables
    from mlflow.utils import rest_utils

    for name in sorted(key for key in os.environ if key.startswith("MLFLOW_HTTP_")):
        _check_setting(name, getattr(environment_variables, name, None))
    send = rest_utils._get_http_response_with_retries
    if not hasattr(send, "__wrapped__"):
        rest_utils._get_http_response_with_retries = _limited(send)
    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _check_setting(name: str, variable: Any) -> None:
    low, high = LIMITS.get(name, ANY_LIMITS)
    try:
        value = 1 if variable is None else variable.get()
        if isinstance(value, bool) or low <= value <= high:
            return
        expected = f"a number from {low} to {high:,}"
    except ValueError:
        expected = {int: "a whole number", float: "a number"}.get(variable.type, "true or false")
    raise ConfigError(f"{name} = {shown(os.environ[name])}: expected {expected}; correct the variable or unset it")


def _limited(send: Callable[..., Any]) -> Callable[..., Any]:
    """MLflow's function for requests, with a limit for the whole answer; uploads and downloads of files have none."""

    @functools.wraps(send)
    def limited(method: str, url: str, retries: int, *args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.get("timeout")
        if not timeout or kwargs.get("stream") or "data" in kwargs:
            return send(method, url, retries, *args, **kwargs)
        return call_within(timeout * (retries + 2), send, method, url, retries, *args, **kwargs)

    return limited


@contextmanager
def plain_errors(doing: str = "", patience: Mapping[str, str] = PATIENCE) -> Iterator[None]:
    """Turn errors of MLflow, and of the store and the network that carry its files, into one line.

    Args:
        doing: what is done, as the beginning of the message.
        patience: MLflow's settings of retries and time-outs, by name; its own are many silent minutes.

    Raises:
        RamenError: the store cannot be used; ConfigError for a wrong value of `MLFLOW_HTTP_*`.
    """
    prepare_mlflow()
    try:
        with environment_defaults(patience):
            yield
    except RamenError:
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise store_error(error, doing) from error
