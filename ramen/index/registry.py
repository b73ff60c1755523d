"""Read the MLflow model registry: find a version, open its retriever; errors are one plain line.

Nothing here changes the registry; `publishing` does.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ramen.artifacts import is_inside, reading
from ramen.errors import RamenError, reason
from ramen.index.retriever import Retriever
from ramen.tracking import require_store
from ramen.tracking.journal import IMPATIENCE, PATIENCE, environment_defaults

PROGRESS_ENV = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
CARRIERS = {"mlflow", "requests", "urllib3", "boto3", "botocore"}
"""Packages whose errors say that the registry, or the store of its files, did not answer or refused."""


def tracking_uri() -> str:
    """Where MLflow looks: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory."""
    import mlflow

    return str(mlflow.get_tracking_uri())


def resolve_version(name: str, version: str) -> int:
    """The number of a registered version, given by number or alias.

    Raises:
        RamenError: no tracking database, model, version or alias of that name; the message lists what there is.
    """
    from mlflow.exceptions import MlflowException

    client = connect(must_exist=True)
    with environment_defaults(IMPATIENCE):  # somebody waits for the answer
        try:
            model = client.get_registered_model(name)
        except MlflowException as error:
            raise _unknown_model(client, name, error) from None
        if not version.isdigit():
            if version not in model.aliases:
                known = ", ".join(f"{alias} (version {number})" for alias, number in sorted(model.aliases.items()))
                raise RamenError(f"model {name!r} has no alias {version!r}; it has: {known or 'none'}")
            return int(model.aliases[version])
        try:
            return int(client.get_model_version(name, version).version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise RamenError(f"MLflow at {tracking_uri()}: {reason(error)}") from None
        found = sorted(int(one.version) for one in client.search_model_versions(f"name = '{name}'"))
    raise RamenError(f"model {name!r} has no version {version}; it has: {', '.join(map(str, found)) or 'none'}")


def _unknown_model(client: Any, name: str, error: Any) -> RamenError:
    if error.error_code != "RESOURCE_DOES_NOT_EXIST":
        return RamenError(f"MLflow at {tracking_uri()}: {reason(error)}")
    names = ", ".join(sorted(found.name for found in client.search_registered_models(max_results=20)))
    return RamenError(
        f"no registered model {name!r} in {tracking_uri()}; "
        + (f"there are: {names}" if names else "none yet: `ramen publish-index` registers one")
    )


def load_version(name: str, version: str = "champion") -> Retriever:
    """Open a registered retriever in this process; its files are checked against its own table first.

    Args:
        name: registered model.
        version: number or alias.

    Raises:
        RamenError: as `resolve_version`; ArtifactError for damaged files.
    """
    number = resolve_version(name, version)
    with version_folders(name, number) as (encoder_dir, index_dir), plain_errors(f"loading {name} version {number}"):
        return Retriever.load(encoder_dir, index_dir)


@contextmanager
def version_folders(name: str, number: int) -> Iterator[tuple[Path, Path]]:
    """The encoder's and the index's folder of a registered version, for as long as the context lasts.

    Files of a local store are used in place; those of a remote one are fetched into a temporary folder.
    """
    import mlflow

    with tempfile.TemporaryDirectory(prefix="ramen-") as scratch:
        with plain_errors(f"fetching {name} version {number}"), contained():
            source = connect().get_model_version_download_uri(name, str(number))
            local = urlparse(source).scheme in ("", "file")
            folder = Path(
                mlflow.artifacts.download_artifacts(
                    f"models:/{name}/{number}", dst_path=None if local else scratch, tracking_uri=tracking_uri()
                )
            )
        yield _places(folder)


def _places(folder: Path) -> tuple[Path, Path]:
    """The encoder's and the index's folder of a logged model. Raises ArtifactError if its `MLmodel` is damaged."""
    import mlflow

    with reading(folder / "MLmodel", "run `ramen publish-index` again"):
        places = mlflow.models.Model.load(str(folder)).flavors["python_function"]["artifacts"]
        names = [str(places[name]["path"]) for name in ("encoder", "index")]
        if not all(map(is_inside, names)):
            raise ValueError("a path leaves the model's folder")
    return folder / names[0], (folder / names[1]).parent


@dataclass(frozen=True)
class Version:
    """A registered version: what it is, where it came from, what was measured, what the gate said.

    Attributes:
        number, aliases, run_id: as in MLflow.
        created: milliseconds since the epoch.
        tags: all of the version's tags (methods of `measuring` and `promotion` name them).
    """

    number: int
    aliases: list[str]
    created: int
    run_id: str
    tags: dict[str, str]

    @property
    def metrics(self) -> dict[str, float]:
        """The tags that are evaluation metrics, such as `psp_at_5` and `tail/p_at_1`."""
        return {key: float(text) for key, text in self.tags.items() if is_metric(key)}


def is_metric(tag: str) -> bool:
    """Whether a tag of a version is an evaluation metric."""
    return bool(re.search(r"(^|/|_)(p|n|psp|psn|r)_at_\d", tag))


def versions(name: str) -> list[Version]:
    """All versions of a registered model, newest first. Raises RamenError when there is no such model."""
    from mlflow.exceptions import MlflowException

    client = connect(must_exist=True)
    with plain_errors(f"listing {name!r}"):
        try:
            aliases = client.get_registered_model(name).aliases
        except MlflowException as error:
            raise _unknown_model(client, name, error) from None
        found = client.search_model_versions(f"name = '{name}'", max_results=10_000)
    held = {int(number): [] for number in aliases.values()}  # type: dict[int, list[str]]
    for alias, number in sorted(aliases.items()):
        held[int(number)].append(alias)
    rows = [
        Version(int(one.version), held.get(int(one.version), []), one.creation_timestamp, one.run_id, dict(one.tags))
        for one in found
    ]
    return sorted(rows, key=lambda row: -row.number)


def connect(must_exist: bool = False) -> Any:
    """A client; with `must_exist`, refuse rather than let MLflow create an empty database."""
    from mlflow import MlflowClient

    if must_exist:
        require_store()
    return MlflowClient(tracking_uri())


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Turn errors of MLflow, and of the store and the network that carry its files, into one line."""
    try:
        with environment_defaults(PATIENCE):  # MLflow's own is many silent minutes
            yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in CARRIERS:
            raise
        raise RamenError(f"{doing} in {tracking_uri()}: {reason(error)}") from error


@contextmanager
def contained() -> Iterator[None]:
    """Keep MLflow from changing this process and from talking about it.

    A loaded model's code folder stays in front of sys.path otherwise, and every copied file draws a progress bar.
    """
    path, logger = list(sys.path), logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with environment_defaults({PROGRESS_ENV: "false"}):
            yield
    finally:
        sys.path[:] = path
        logger.setLevel(level)
