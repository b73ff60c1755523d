"""Read the MLflow model registry: find a version, open its retriever; errors are one plain line.

Nothing here changes the registry; `publishing` does.
"""

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

from ramen.errors import RamenError, shown
from ramen.files import reading
from ramen.index.retriever import Retriever
from ramen.tracking import environment_defaults, plain_errors, registry_uri, require_store, tracking_uri
from ramen.tracking.errors import uri_variable
from ramen.tracking.journal import OFFLINE_RETRIES

__all__ = [
    "UnknownVersion",
    "Version",
    "connect",
    "is_metric",
    "isolate_mlflow",
    "load_version",
    "plain_errors",
    "resolve_version",
    "tracking_uri",
    "version_folders",
    "version_number",
    "versions",
]

LIFETIME = range(1, 32_503_680_000_000)
"""Milliseconds since the epoch that a version may be created at: to the year 3000."""
PROGRESS_ENV = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"


class UnknownVersion(RamenError):
    """The model has no version of that number or alias."""


def version_number(version: str) -> int | None:
    """The number that a version is given by; None for an alias."""
    return int(version) if re.fullmatch("[0-9]{1,9}", version) else None


def resolve_version(name: str, version: str) -> int:
    """The number of a registered version, given by number or alias.

    Raises:
        UnknownVersion: no version or alias of that name; the message lists what there is.
        RamenError: no tracking database, no such model, or the registry cannot be used.
    """
    from mlflow.exceptions import MlflowException

    client, number = connect(must_exist=True), version_number(version)
    with plain_errors(f"looking up {name!r}", OFFLINE_RETRIES):  # somebody waits for the answer
        model = _registered(client, name)
        if number is None:
            if version not in model.aliases:
                known = ", ".join(f"{alias} (version {number})" for alias, number in sorted(model.aliases.items()))
                raise UnknownVersion(f"model {name!r} has no alias {version[:100]!r}; it has: {known or 'none'}")
            return version_in_answer(model.aliases[version])
        try:
            return version_in_answer(client.get_model_version(name, str(number)).version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        found = sorted(version_in_answer(one.version) for one in client.search_model_versions(f"name = '{name}'"))
    raise UnknownVersion(f"model {name!r} has no version {version}; it has: {', '.join(map(str, found)) or 'none'}")


def _registered(client: Any, name: str) -> Any:
    """A registered model. Raises RamenError when there is none of that name."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    else:
        if found.name != name:
            raise not_mlflow(f"the answer names the model {shown(found.name)}, expected {name!r}")
        return found
    names = ", ".join(sorted(found.name for found in client.search_registered_models(max_results=20)))
    raise RamenError(
        f"no registered model {name!r} in {registry_uri()}; "
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
        with plain_errors(f"fetching {name} version {number}"), isolate_mlflow():
            source = connect().get_model_version_download_uri(name, str(number))
            local = urlparse(source).scheme in ("", "file")
            folder = Path(
                mlflow.artifacts.download_artifacts(
                    f"models:/{name}/{number}", dst_path=None if local else scratch, tracking_uri=tracking_uri()
                )
            )
            with reading(folder / "MLmodel", "run `ramen publish-index` again"):
                flavors = mlflow.models.Model.load(str(folder)).flavors
        yield _place(folder, flavors, "encoder", name, number), _place(folder, flavors, "index", name, number).parent


def _place(folder: Path, flavors: Any, part: str, name: str, number: int) -> Path:
    """Where a part of a registered retriever lies. Raises RamenError for a model that ramen did not publish."""
    try:
        place: Path = folder / flavors["python_function"]["artifacts"][part]["path"]
    except (KeyError, TypeError):
        raise RamenError(
            f"{name} version {number}: is no retriever (its model names no {part}); give a version that "
            "`ramen publish-index` registered"
        ) from None
    if not place.resolve().is_relative_to(folder.resolve()):
        raise RamenError(f"{name} version {number}: its {part} lies outside the model, at {place}; publish it again")
    return place


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
        """The tags that are evaluation metrics and finite numbers, such as `psp_at_5` and `tail/p_at_1`."""
        found = {key: finite(text) for key, text in self.tags.items() if is_metric(key)}
        return {key: value for key, value in found.items() if value is not None}


def finite(text: str | None) -> float | None:
    """The finite number that a tag holds; None when it holds something else (anybody may set a tag)."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_metric(tag: str) -> bool:
    """Whether a tag of a version is an evaluation metric."""
    return bool(re.search(r"(^|/|_)(p|n|psp|psn|r)_at_\d", tag))


def versions(name: str) -> list[Version]:
    """All versions of a registered model, newest first. Raises RamenError when there is no such model."""
    client = connect(must_exist=True)
    with plain_errors(f"listing {name!r}", OFFLINE_RETRIES):
        aliases = _registered(client, name).aliases
        found = client.search_model_versions(f"name = '{name}'", max_results=10_000)
    held: dict[int, list[str]] = {}
    for alias, number in sorted(aliases.items()):
        held.setdefault(version_in_answer(number), []).append(alias)
    rows = []
    for one in found:
        number = version_in_answer(one.version)
        created = one.creation_timestamp if one.creation_timestamp in LIFETIME else 0
        rows.append(Version(number, held.get(number, []), created, one.run_id, dict(one.tags)))
    return sorted(rows, key=lambda row: -row.number)


def not_mlflow(wrong: str) -> RamenError:
    """The error for an answer that no MLflow server gives."""
    uri = registry_uri()
    return RamenError(f"MLflow at {uri}: {wrong}; check that {uri_variable(uri)} is the address of an MLflow server")


def version_in_answer(version: object) -> int:
    """A version's number as the store names it. Raises RamenError if it is none."""
    number = version_number(str(version))
    if number is None:
        raise not_mlflow(f"the answer names the version {shown(version)}, expected a number")
    return number


def connect(must_exist: bool = False) -> Any:
    """A client; with `must_exist`, refuse rather than let MLflow create an empty database.

    Raises:
        RamenError: the store is of an unknown kind, damaged or out of reach, or its driver is missing.
    """
    from mlflow import MlflowClient

    if must_exist:
        require_store(registry=True)
    with plain_errors(patience=OFFLINE_RETRIES):
        return MlflowClient(tracking_uri())


@contextmanager
def isolate_mlflow() -> Iterator[None]:
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
