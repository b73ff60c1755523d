"""Publish a retriever in the MLflow model registry.

A version is promoted only after it works: log the model in the stage's run, create a version, wait until it is READY,
load it through the registry and run the smoke test, and only then try to promote it (`gate`). A failure at any step
leaves the alias where it was, and the tag `smoke` marks the broken version.

Models contain no pickle: a version is code (`ramen/publishing/pyfunc.py`) and files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ramen
from ramen.config import IndexConfig
from ramen.errors import RamenError, first_line
from ramen.index.retriever import DEFAULT_K, FACTS_FILE, INDEX_FILE, LABELS_FILE, read_facts
from ramen.publishing.gate import FAILED, PASSED, SMOKE_TAG, is_withdrawn, try_promote
from ramen.publishing.holdout_comparison import CompareWithChampion
from ramen.publishing.registry import connect, isolate_mlflow, list_versions, parse_version, translate_store_errors

PACKAGE = Path(ramen.__file__).parent
REQUIREMENTS = ("mlflow", "numpy", "pyarrow", "pydantic", "pyyaml", "safetensors", "scipy", "torch", "transformers")
FAISS_WHEELS = ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu")
CONTENTS_TAG = "contents"
"""Version tag with the digest of `contents_digest`; a publisher reuses a version with the same digest."""
UNCHANGED = "unchanged since it was registered"
READY_SECONDS = 300
"""Time for MLflow to make a new version READY."""
SMOKE_K = 3


@dataclass(frozen=True)
class Published:
    """The result of publishing a retriever.

    Attributes:
        name, version: the registered version.
        alias: the alias that points to it, None if it was not promoted.
        refused: why the gate refused it; empty if it did not.
        note: how a champion that was evaluated on another dataset was compared, or that it was not; or that the
            version was registered already.
    """

    name: str
    version: int
    alias: str | None
    refused: str = ""
    note: str = ""


def publish(
    retriever_dir: Path,
    encoder_dir: Path,
    *,
    run_id: str,
    settings: IndexConfig,
    tags: Mapping[str, str],
    sample: Sequence[str],
    compare_with_champion: CompareWithChampion | None = None,
) -> Published:
    """Register a retriever, run its smoke test, and try to promote it.

    Args:
        retriever_dir: folder written by `write_retriever`.
        encoder_dir: folder of the encoder.
        run_id: the MLflow run that logs the model.
        settings: names and gate.
        tags: of the version; the gate reads `dataset`, `ann_recall`, `query_ms` and the metrics that it compares.
        sample: at least one text, for the smoke test.
        compare_with_champion: as in `try_promote`.

    Raises:
        RamenError: MLflow failed, or the version failed its smoke test.
    """
    client = connect()
    with translate_store_errors(f"registering {settings.model!r}"), isolate_mlflow():
        tags = _git_tags(client, run_id) | dict(tags)
        with tempfile.TemporaryDirectory() as folder:
            encoder = _link_files(encoder_dir, Path(folder) / "encoder", read_facts(retriever_dir)["encoder"])
            model_id = _log_model(client, retriever_dir, encoder, run_id, sample)
        version = _create_version(client, settings.model, model_id, run_id, tags)
        try:
            smoke_test(f"models:/{settings.model}/{version}", sample)
        except Exception as error:
            client.set_model_version_tag(settings.model, str(version), SMOKE_TAG, FAILED)
            unmoved = f"; alias {settings.alias!r} has not moved" if settings.alias else ""
            raise RamenError(
                f"{settings.model} version {version}: failed its smoke test ({first_line(error)}){unmoved}"
            ) from error
        client.set_model_version_tag(settings.model, str(version), SMOKE_TAG, PASSED)
        return _try_promote(version, settings, compare_with_champion)


def contents_digest(made_of: Mapping[str, Any]) -> str:
    """Return the digest of a version's contents: sha256, 16 hex digits.

    Args:
        made_of: name -> digest or other JSON value. The package's code and the pinned requirements are added, because
            a version contains them.
    """
    digest = hashlib.sha256(json.dumps([made_of, requirements()], sort_keys=True).encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def try_promote_existing(
    digest: str,
    *,
    settings: IndexConfig,
    sample: Sequence[str],
    compare_with_champion: CompareWithChampion | None = None,
) -> Published | None:
    """Try to promote the newest registered version with the same contents, instead of registering a copy of it.

    A pipeline that runs every day would otherwise fill the registry with copies, and `rollback` would find one.

    Args:
        digest: from `contents_digest`.
        settings, sample, compare_with_champion: as in `publish`.

    Returns:
        None if there is no such version that passes the smoke test. A version that a user moved the alias away from
        is not promoted.

    Raises:
        RamenError: MLflow failed.
    """
    with translate_store_errors(f"looking for {settings.model!r}"):
        if not connect().search_registered_models(f"name = '{settings.model}'"):
            return None
    for version in list_versions(settings.model):
        if version.tags.get(CONTENTS_TAG) != digest or version.tags.get(SMOKE_TAG) != PASSED:
            continue
        try:
            smoke_test(f"models:/{settings.model}/{version.number}", sample)
        except Exception:  # a broken version is replaced with a new one
            continue
        if settings.alias in version.aliases:
            return Published(settings.model, version.number, settings.alias, note=UNCHANGED)
        if is_withdrawn(version.tags, settings.alias):
            refusal = (
                f"unchanged contents: this is version {version.number}, which a user moved {settings.alias!r} away "
                f"from; promote it with `ramen promote {version.number}`"
            )
            return Published(settings.model, version.number, None, refusal)
        with translate_store_errors(f"promoting {settings.model!r} version {version.number}"):
            return _try_promote(version.number, settings, compare_with_champion)
    return None


def _try_promote(version: int, settings: IndexConfig, compare_with_champion: CompareWithChampion | None) -> Published:
    if not settings.alias:
        return Published(settings.model, version, None)
    decision = try_promote(settings.model, version, settings, compare_with_champion)
    alias = None if decision.reasons else settings.alias
    return Published(settings.model, version, alias, decision.refused, decision.note)


def smoke_test(uri: str, texts: Sequence[str]) -> None:
    """Load a model as a server does and query it. Raises if it does not load or an answer is invalid."""
    import mlflow

    with isolate_mlflow():
        model = mlflow.pyfunc.load_model(uri)
        answers = model.predict(list(texts), params={"k": SMOKE_K})
    if len(answers) != len(texts):
        raise RamenError(f"{len(answers)} answers to {len(texts)} queries")
    for text, answer in zip(texts, answers, strict=True):
        if not answer.ids or not all(math.isfinite(score) for score in answer.scores):
            raise RamenError(f"no valid answer to {text!r}")


def requirements() -> list[str]:
    """Return the packages that serving needs, pinned to the installed releases, without local parts such as `+cpu`."""
    pins = []
    for name in (*REQUIREMENTS, *FAISS_WHEELS):
        try:
            pins.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            assert name in FAISS_WHEELS, name
    return sorted(pins)


def _link_files(source: Path, target: Path, files: Mapping[str, Any]) -> Path:
    """Link the given files into another folder, or copy them where the disk does not support links."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)
    return target


def _log_model(client: Any, retriever_dir: Path, encoder_dir: Path, run_id: str, sample: Sequence[str]) -> str:
    """Log the model in a run, without making it MLflow's active run; return the model's id."""
    import mlflow
    from mlflow.models import Model

    run = client.get_run(run_id)
    logged = client.create_logged_model(
        run.info.experiment_id,
        name="retriever",
        source_run_id=run_id,
        params=dict(run.data.params),
        model_type="retriever",
    )
    paths = {"encoder": encoder_dir, "index": retriever_dir / INDEX_FILE}
    paths |= {"labels": retriever_dir / LABELS_FILE, "facts": retriever_dir / FACTS_FILE}
    Model.log(
        artifact_path=None,
        name="retriever",
        flavor=mlflow.pyfunc,
        model_id=logged.model_id,
        run_id=run_id,
        python_model=str(PACKAGE / "publishing" / "pyfunc.py"),
        artifacts={name: str(path) for name, path in paths.items()},
        code_paths=[str(PACKAGE)],
        pip_requirements=requirements(),
        input_example=(list(sample[:1]), {"k": DEFAULT_K, "exclude": [""]}),  # types and defaults of the parameters
    )
    return str(logged.model_id)


def _git_tags(client: Any, run_id: str) -> dict[str, str]:
    """Return the git revision of a run as a version tag; a run in a container image may have none."""
    commit = client.get_run(run_id).data.tags.get("mlflow.source.git.commit")
    return {"git": commit} if commit else {}


def _create_version(client: Any, name: str, model_id: str, run_id: str, tags: Mapping[str, str]) -> int:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    created = client.create_model_version(
        name, f"models:/{model_id}", run_id, tags=dict(tags), model_id=model_id, await_creation_for=READY_SECONDS
    )
    status = client.get_model_version(name, created.version).status
    if status != "READY":
        raise RamenError(f"{name} version {created.version}: is {status} after {READY_SECONDS} s, expected READY")
    return parse_version(created.version)
