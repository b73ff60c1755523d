"""URIs of the tracking store and the model registry."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote


def tracking_uri() -> str:
    """Return the URI of the tracking store: MLFLOW_TRACKING_URI, by default sqlite:///mlflow.db."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def registry_uri() -> str:
    """Return the URI of the model registry: MLFLOW_REGISTRY_URI, by default `tracking_uri`."""
    import mlflow

    return str(mlflow.get_registry_uri())


def uri_variable(uri: str) -> str:
    """Return the name of the environment variable that sets a store's URI."""
    return "MLFLOW_TRACKING_URI" if uri == tracking_uri() else "MLFLOW_REGISTRY_URI"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite store, None for any other store. MLflow writes a space in the path as %20."""
    path, _, _ = uri.removeprefix("sqlite:///").partition("?")
    return Path.cwd() / unquote(path) if uri.startswith("sqlite:///") and path else None
