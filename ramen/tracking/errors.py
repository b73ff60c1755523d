"""Errors of MLflow, and of the stores and the network behind it, as one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ramen.errors import RamenError, reason
from ramen.tracking.journal import PATIENCE, environment_defaults

CARRIERS = {"mlflow", "requests", "urllib3", "boto3", "botocore", "sqlalchemy", "alembic"}
"""Packages that carry a call to the tracking store or the model registry."""
LONGEST = 300
"""Characters of an error's text that are shown: a web page may be a single line."""
ADVICE = "check MLFLOW_TRACKING_URI"


def tracking_uri() -> str:
    """Where MLflow looks: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def is_store_error(error: BaseException) -> bool:
    """Whether an exception was raised inside a call to MLflow or to a package that it calls.

    Any type counts: a missing driver is a ModuleNotFoundError, an answer that is no JSON a ValueError.
    """
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in CARRIERS:
            return True
        frame = frame.tb_next
    return False


def store_error(error: BaseException, doing: str = "") -> RamenError:
    """The error that the user reads: what was done, the store without its password, and the reason."""
    what = f"{doing} in {tracking_uri()}" if doing else f"MLflow at {tracking_uri()}"
    return RamenError(f"{what}: {explained(error)}; {ADVICE}")


def explained(error: BaseException) -> str:
    """The reason of a store's error, with what to install when a driver is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"the database driver {error.name!r} is not installed: pip install {error.name}"
    said = re.split(r"\.? See https?://", reason(error), maxsplit=1)[0].rstrip(".;: ")
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def silence() -> None:
    """Keep MLflow's log lines off the terminal: migrations, and tracebacks of errors that are raised as well."""
    import mlflow  # noqa: F401  (sets levels of its own when it is imported)

    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


@contextmanager
def plain_errors(doing: str = "", patience: Mapping[str, str] = PATIENCE) -> Iterator[None]:
    """Turn errors of MLflow, and of the store and the network that carry its files, into one line.

    Args:
        doing: what is done, as the beginning of the message.
        patience: MLflow's settings of retries and time-outs, by name; its own are many silent minutes.

    Raises:
        RamenError: the store cannot be used.
    """
    silence()
    try:
        with environment_defaults(patience):
            yield
    except RamenError:
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise store_error(error, doing) from error
