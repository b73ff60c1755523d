"""Translate errors of MLflow, its stores and the network into one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ramen.errors import RamenError, first_line
from ramen.tracking.retries import ONLINE_RETRIES, configure_mlflow, environment_defaults
from ramen.tracking.uris import registry_uri, tracking_uri, uri_variable

STORE_PACKAGES = {"mlflow", "requests", "urllib3", "boto3", "botocore", "sqlalchemy", "alembic"}
"""Packages that execute a call to the tracking store or the model registry."""
REGISTRY_MODULES = ("mlflow.tracking._model_registry", "mlflow.store.model_registry")
"""Modules of MLflow that call the model registry."""
S3_SETTINGS = "AWS_ENDPOINT_URL, MLFLOW_S3_ENDPOINT_URL and the AWS access keys"
MAX_CHARACTERS = 300
"""Characters of an error message that are shown: a web page may be a single line."""
STATUS = r"the server answers with status \1"
SHORT_MESSAGES = (
    ("is in maintenance mode", "MLflow no longer supports a folder of files; use sqlite:///mlflow.db or a server"),
    (r"failed with error code (\d+) != 200", STATUS),
    (r"too many (\d+) error responses", STATUS),
    ("not in a valid JSON format", "the server's answer is not JSON (a login page or a proxy?)"),
    (r"Exceeded (\d+) redirects", r"the server redirects more than \1 times"),
    (r"((?:the answer is not complete|no complete answer) after [\d.]+ s)", r"\1"),
    (r"timed out\. \(.*timeout=([\d.]+)\)", r"timed out: no answer within \1 s"),
)
"""Pattern of a long message -> short message."""


def _traceback_modules(error: BaseException) -> Iterator[str]:
    """Yield the names of the modules that an exception was raised through."""
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_frame.f_globals.get("__name__", "")
        frame = frame.tb_next


def is_store_error(error: BaseException) -> bool:
    """Return whether an exception was raised inside a call to MLflow or to a package that MLflow calls.

    The type does not matter: a missing driver raises ModuleNotFoundError, a response that is not JSON ValueError.
    """
    return any(name.partition(".")[0] in STORE_PACKAGES for name in _traceback_modules(error))


def store_error(error: BaseException, doing: str = "") -> RamenError:
    """Return the error to show: the attempted operation, the store's URI without its password, and the cause."""
    in_registry = any(name.startswith(REGISTRY_MODULES) for name in _traceback_modules(error))
    uri = registry_uri() if in_registry else tracking_uri()
    operation = f"{doing} in {uri}" if doing else f"MLflow at {uri}"
    setting = S3_SETTINGS if _is_s3_error(error) else uri_variable(uri)
    return RamenError(f"{operation}: {explain(error)}; check {setting}")


def _is_s3_error(error: BaseException | None) -> bool:
    """Return whether the S3 client raised an exception, or one in its chain of contexts."""
    while error is not None:
        if any(name.startswith("botocore.") for name in _traceback_modules(error)):
            return True
        error = error.__context__
    return False


def explain(error: BaseException) -> str:
    """Return the cause of a store's error, with what to install when a driver is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"the database driver {error.name!r} is not installed: pip install {error.name}"
    for pattern, text in SHORT_MESSAGES:
        if match := re.search(pattern, str(error)):
            return match.expand(text)
    cause = re.split(r"\.? See https?://", first_line(error), maxsplit=1)[0].rstrip(".;: ")
    return cause if len(cause) <= MAX_CHARACTERS else f"{cause[:MAX_CHARACTERS]}..."


@contextmanager
def translate_store_errors(doing: str = "", retries: Mapping[str, str] = ONLINE_RETRIES) -> Iterator[None]:
    """Raise errors of MLflow, its stores and the network as one-line `RamenError`s.

    Args:
        doing: the attempted operation, the beginning of the message.
        retries: MLflow's retry and timeout variables during the operation, unless the environment sets them.

    Raises:
        RamenError: the store cannot be used; ConfigError for an invalid `MLFLOW_HTTP_*` variable.
    """
    configure_mlflow()
    try:
        with environment_defaults(retries):
            yield
    except RamenError:
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise store_error(error, doing) from error
