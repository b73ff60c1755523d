"""Read the MLflow model registry: look up, list and load registered versions."""

from __future__ import annotations

import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ramen.errors import RamenError, short_repr
from ramen.files import wrap_read_errors
from ramen.index.retriever import Retriever
from ramen.tracking import environment_defaults, registry_uri, require_store, tracking_uri, translate_store_errors
from ramen.tracking.retries import OFFLINE_RETRIES
from ramen.tracking.uris import uri_variable

__all__ = [
    "RegisteredVersion",
    "UnknownVersion",
    "connect",
    "is_metric",
    "isolate_mlflow",
    "list_versions",
    "load_version",
    "parse_version_number",
    "resolve_version",
    "tracking_uri",
    "translate_store_errors",
    "version_folders",
]

VALID_CREATION = range(1, 32_503_680_000_000)
"""Plausible creation times of a version, in milliseconds since the epoch: to the year 3000."""


class UnknownVersion(RamenError):
    """The model has no version of that number or alias."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A registered version.

    Attributes:
        number, aliases, run_id: as in MLflow.
        created: milliseconds since the epoch.
        tags: provenance, measurements and the gate's decision (`ramen.index.statistics` and `gate` name the tags).
    """

    number: int
    aliases: list[str]
    created: int
    run_id: str
    tags: dict[str, str]

    @property
    def metrics(self) -> dict[str, float]:
        """The evaluation metrics among the tags that are finite numbers, such as `psp_at_5` and `tail/p_at_1`."""
        metrics = {key: finite_number(text) for key, text in self.tags.items() if is_metric(key)}
        return {key: value for key, value in metrics.items() if value is not None}


def finite_number(text: str | None) -> float | None:
    """Return the finite number in a tag, None if it has something else: every user can set a tag."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_metric(tag: str) -> bool:
    """Return whether a version tag is an evaluation metric."""
    return bool(re.search(r"(^|/|_)(p|n|psp|psn|r)_at_\d", tag))


def parse_version_number(version: str) -> int | None:
    """Return the number that a user's `N|ALIAS` gives, None for an alias."""
    return int(version) if re.fullmatch("[0-9]{1,9}", version) else None


def parse_version(version: object) -> int:
    """Return a version's number from the registry's response. Raises RamenError if it is not a number."""
    number = parse_version_number(str(version))
    if number is None:
        raise _invalid_response(f"the response has the version {short_repr(version)}, expected a number")
    return number


def _invalid_response(wrong: str) -> RamenError:
    uri = registry_uri()
    return RamenError(f"MLflow at {uri}: {wrong}; check that {uri_variable(uri)} is the address of an MLflow server")


def connect(must_exist: bool = False) -> Any:
    """Return an MlflowClient.

    Args:
        must_exist: refuse a SQLite database that does not exist; MLflow would create an empty one.

    Raises:
        RamenError: the store is of an unknown kind, damaged or unreachable, or its driver is missing.
    """
    from mlflow import MlflowClient

    if must_exist:
        require_store(registry=True)
    with translate_store_errors(retries=OFFLINE_RETRIES):
        return MlflowClient(tracking_uri())


def resolve_version(name: str, version: str) -> int:
    """Return the number of a registered version.

    Args:
        name: registered model.
        version: number or alias.

    Raises:
        UnknownVersion: there is no such version or alias; the message lists the existing ones.
        RamenError: there is no tracking database or no such model, or the registry cannot be used.
    """
    from mlflow.exceptions import MlflowException

    client, number = connect(must_exist=True), parse_version_number(version)
    with translate_store_errors(f"looking up {name!r}", OFFLINE_RETRIES):  # a user waits for the answer
        model = _registered_model(client, name)
        if number is None:
            if version not in model.aliases:
                known = ", ".join(f"{alias} (version {number})" for alias, number in sorted(model.aliases.items()))
                raise UnknownVersion(f"model {name!r} has no alias {version[:100]!r}; it has: {known or 'none'}")
            return parse_version(model.aliases[version])
        try:
            return parse_version(client.get_model_version(name, str(number)).version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        numbers = sorted(parse_version(row.version) for row in client.search_model_versions(f"name = '{name}'"))
    raise UnknownVersion(f"model {name!r} has no version {version}; it has: {', '.join(map(str, numbers)) or 'none'}")


def _registered_model(client: Any, name: str) -> Any:
    """Return a registered model. Raises RamenError if there is none of that name."""
    from mlflow.exceptions import MlflowException

    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    else:
        if model.name != name:
            raise _invalid_response(f"the response has the model {short_repr(model.name)}, expected {name!r}")
        return model
    names = ", ".join(sorted(model.name for model in client.search_registered_models(max_results=20)))
    raise RamenError(
        f"no registered model {name!r} in {registry_uri()}; "
        + (f"there are: {names}" if names else "none yet: `ramen publish-index` registers one")
    )


def list_versions(name: str) -> list[RegisteredVersion]:
    """Return all versions of a registered model, newest first. Raises RamenError if there is no such model."""
    client = connect(must_exist=True)
    with translate_store_errors(f"listing {name!r}", OFFLINE_RETRIES):
        aliases = _registered_model(client, name).aliases
        rows = client.search_model_versions(f"name = '{name}'", max_results=10_000)
    aliases_of: dict[int, list[str]] = {}
    for alias, number in sorted(aliases.items()):
        aliases_of.setdefault(parse_version(number), []).append(alias)
    result = []
    for row in rows:
        number = parse_version(row.version)
        created = row.creation_timestamp if row.creation_timestamp in VALID_CREATION else 0
        result.append(RegisteredVersion(number, aliases_of.get(number, []), created, row.run_id, dict(row.tags)))
    return sorted(result, key=lambda version: -version.number)


def load_version(name: str, version: str = "champion") -> Retriever:
    """Load a registered retriever into this process, after checking its files against their checksums.

    Args:
        name: registered model.
        version: number or alias.

    Raises:
        RamenError: as in `resolve_version`; ArtifactError for damaged files.
    """
    number = resolve_version(name, version)
    with (
        version_folders(name, number) as (encoder_dir, index_dir),
        translate_store_errors(f"loading {name} version {number}"),
    ):
        return Retriever.load(encoder_dir, index_dir)


@contextmanager
def version_folders(name: str, number: int) -> Iterator[tuple[Path, Path]]:
    """Yield the encoder's and the index's folder of a registered version.

    Files of a local store are used in place; those of a remote store are downloaded into a temporary folder, which is
    deleted at the end.
    """
    import mlflow

    with tempfile.TemporaryDirectory(prefix="ramen-") as scratch:
        with translate_store_errors(f"fetching {name} version {number}"), isolate_mlflow():
            source = connect().get_model_version_download_uri(name, str(number))
            local = urlparse(source).scheme in ("", "file")
            folder = Path(
                mlflow.artifacts.download_artifacts(
                    f"models:/{name}/{number}", dst_path=None if local else scratch, tracking_uri=tracking_uri()
                )
            )
            with wrap_read_errors(folder / "MLmodel", "run `ramen publish-index` again"):
                flavors = mlflow.models.Model.load(str(folder)).flavors
        paths = {part: _model_path(folder, flavors, part, f"{name} version {number}") for part in ("encoder", "index")}
        yield paths["encoder"], paths["index"].parent


def _model_path(folder: Path, flavors: Any, part: str, where: str) -> Path:
    """Return the path of a model's part. Raises RamenError for a model that ramen did not publish."""
    try:
        path: Path = folder / flavors["python_function"]["artifacts"][part]["path"]
    except (KeyError, TypeError):
        raise RamenError(
            f"{where}: is not a retriever (its model has no {part}); "
            "give a version that `ramen publish-index` registered"
        ) from None
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RamenError(f"{where}: its {part} lies outside the model, at {path}; publish it again")
    return path


@contextmanager
def isolate_mlflow() -> Iterator[None]:
    """Undo MLflow's changes to sys.path, and silence its log messages and progress bars.

    Loading a model puts its code folder first in sys.path and leaves it there.
    """
    path, logger = list(sys.path), logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with environment_defaults({"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}):
            yield
    finally:
        sys.path[:] = path
        logger.setLevel(level)
