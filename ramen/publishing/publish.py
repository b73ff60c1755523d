"""Publish a retriever in the MLflow model registry.

The order keeps the alias honest: log the model under the stage's run, create a version, wait until it is READY,
load it back through the registry and ask it, and only then let it try for the alias (`promotion`). A failure on the
way leaves the alias where it was; the half-made version says so in its tag `smoke`.

Only the model registry is used, and no pickle: the model is code (`ramen/publishing/pyfunc.py`) plus files.
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
from ramen.errors import RamenError, reason
from ramen.index.retriever import DEFAULT_K, FACTS_FILE, INDEX_FILE, LABELS_FILE, read_facts
from ramen.publishing.gate import FAILED, PASSED, SMOKE_TAG, try_promote, was_withdrawn
from ramen.publishing.holdout_comparison import Ask
from ramen.publishing.registry import connect, isolate_mlflow, plain_errors, version_in_answer, versions

PACKAGE = Path(ramen.__file__).parent
REQUIREMENTS = ("mlflow", "numpy", "pyarrow", "pydantic", "pyyaml", "safetensors", "scipy", "torch", "transformers")
FAISS_WHEELS = ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu")
CONTENTS_TAG = "contents"
"""`contents` of a version: a publisher that would register the same again offers that version instead."""
UNCHANGED = "unchanged since it was registered"
READY_SECONDS = 300
SMOKE_K = 3


@dataclass(frozen=True)
class Published:
    """What became of a candidate.

    Attributes:
        name, version: the registered version.
        alias: the alias that now points to it, None when none moved.
        refused: why the gate kept the alias where it was; empty when it did not.
        note: how it was compared with a version that was evaluated on another dataset, or why it was not; or that
            the version was there already.
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
    ask: Ask | None = None,
) -> Published:
    """Register a retriever, ask it, and move the alias if the gate lets it.

    Args:
        retriever_dir: what `write_retriever` wrote.
        encoder_dir: the encoder's directory.
        run_id: the MLflow run that logs the model.
        settings: names and gate.
        tags: of the version; the gate reads `dataset`, `ann_recall`, `query_ms` and the metrics it compares.
        sample: texts to ask, at least one.
        ask: as in `offer`.

    Raises:
        RamenError: MLflow failed, or the version does not answer.
    """
    client = connect()
    with plain_errors(f"registering {settings.model!r}"), isolate_mlflow():
        tags = _commit(client, run_id) | dict(tags)
        with tempfile.TemporaryDirectory() as folder:
            encoder = _encoder_alone(encoder_dir, Path(folder) / "encoder", read_facts(retriever_dir)["encoder"])
            model_id = _log_model(client, retriever_dir, encoder, run_id, sample)
        version = _create_version(client, settings.model, model_id, run_id, tags)
        try:
            smoke(f"models:/{settings.model}/{version}", sample)
        except Exception as error:
            client.set_model_version_tag(settings.model, str(version), SMOKE_TAG, FAILED)
            kept = f"; alias {settings.alias!r} stays" if settings.alias else ""
            raise RamenError(f"{settings.model} version {version} does not answer ({reason(error)}){kept}") from error
        client.set_model_version_tag(settings.model, str(version), SMOKE_TAG, PASSED)
        return _offered(version, settings, ask)


def contents(made_of: Mapping[str, Any]) -> str:
    """sha256 (16 hex digits) of what a version is made of.

    Args:
        made_of: name -> digest or other JSON value. The package's own code and the pinned requirements are added,
            since a version carries them.
    """
    digest = hashlib.sha256(json.dumps([made_of, requirements()], sort_keys=True).encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def publish_again(
    found: str, *, settings: IndexConfig, sample: Sequence[str], ask: Ask | None = None
) -> Published | None:
    """Offer the newest registered version of these contents, if there is one that answers, instead of a copy of it.

    Copies of one model would fill the registry of whoever runs the pipeline every day, and be what a rollback finds.

    Args:
        found: as `contents` returns.
        settings, sample, ask: as in `publish`.

    Returns:
        None when there is none. A version that a person took the alias from does not get it back from here.

    Raises:
        RamenError: MLflow failed.
    """
    with plain_errors(f"looking for {settings.model!r}"):
        if not connect().search_registered_models(f"name = '{settings.model}'"):
            return None
    for version in versions(settings.model):
        if version.tags.get(CONTENTS_TAG) != found or version.tags.get(SMOKE_TAG) != PASSED:
            continue
        try:
            smoke(f"models:/{settings.model}/{version.number}", sample)
        except Exception:  # whatever is wrong with it, a new one takes its place
            continue
        if settings.alias in version.aliases:
            return Published(settings.model, version.number, settings.alias, note=UNCHANGED)
        if was_withdrawn(version.tags, settings.alias):
            taken = f"it is version {version.number} again, which {settings.alias!r} was taken from by hand; "
            return Published(settings.model, version.number, None, f"{taken}`ramen promote {version.number}`")
        with plain_errors(f"offering {settings.model!r} version {version.number}"):
            return _offered(version.number, settings, ask)
    return None


def _offered(version: int, settings: IndexConfig, ask: Ask | None) -> Published:
    """A version that answered, after it tried for the alias, if there is one to try for."""
    if not settings.alias:
        return Published(settings.model, version, None)
    decision = try_promote(settings.model, version, settings, ask)
    alias = None if decision.reasons else settings.alias
    return Published(settings.model, version, alias, decision.refused, decision.note)


def smoke(uri: str, texts: Sequence[str]) -> None:
    """Load a model the way a server does and ask it; raises when it does not load or the answer is no answer."""
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
    """What serving needs, pinned to what is installed here (a local part such as `+cpu` is no released version)."""
    pins = []
    for name in (*REQUIREMENTS, *FAISS_WHEELS):
        try:
            pins.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            assert name in FAISS_WHEELS, name
    return sorted(pins)


def _encoder_alone(model: Path, place: Path, files: Mapping[str, Any]) -> Path:
    """A folder with only those files of the model that a retriever needs, linked where the disk allows it."""
    for name in files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(model / name, place / name)
        except OSError:
            shutil.copyfile(model / name, place / name)
    return place


def _log_model(client: Any, retriever_dir: Path, encoder_dir: Path, run_id: str, sample: Sequence[str]) -> str:
    """Log the pyfunc under the run (in its experiment, without making it the active run); returns the model's id."""
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
    places = {"encoder": encoder_dir, "index": retriever_dir / INDEX_FILE}
    places |= {"labels": retriever_dir / LABELS_FILE, "facts": retriever_dir / FACTS_FILE}
    Model.log(
        artifact_path=None,
        name="retriever",
        flavor=mlflow.pyfunc,
        model_id=logged.model_id,
        run_id=run_id,
        python_model=str(PACKAGE / "publishing" / "pyfunc.py"),
        artifacts={name: str(path) for name, path in places.items()},
        code_paths=[str(PACKAGE)],
        pip_requirements=requirements(),
        input_example=(list(sample[:1]), {"k": DEFAULT_K, "exclude": [""]}),  # types and defaults of the parameters
    )
    return str(logged.model_id)


def _commit(client: Any, run_id: str) -> dict[str, str]:
    """The git revision that the tracker put on the run, where there is one (an image has no checkout)."""
    commit = client.get_run(run_id).data.tags.get("mlflow.source.git.commit")
    return {"git": commit} if commit else {}


def _create_version(client: Any, name: str, model_id: str, run_id: str, tags: Mapping[str, str]) -> int:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(
        name, f"models:/{model_id}", run_id, tags=dict(tags), model_id=model_id, await_creation_for=READY_SECONDS
    )
    status = client.get_model_version(name, made.version).status
    if status != "READY":
        raise RamenError(f"{name} version {made.version} is {status} after {READY_SECONDS} s, not READY")
    return version_in_answer(made.version)
