"""Train one stage on several nodes: the step becomes the launcher of a Kubeflow TrainJob and waits for it.

The step's own pod has the inputs; the job's pods see only the shared volume. So inputs are copied there, the job runs
`torchrun -m ramen STAGE` on every node, and the outputs are taken from there into the step's artifacts. A step that is
tried again finds its job, finished or not, by its name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.image import IMAGE_ENV
from components.resources import (
    GPU,
    MLFLOW_KEYS,
    MLFLOW_SECRET,
    NAMESPACE_ENV,
    RESOURCES,
    SETTINGS,
    SETTINGS_KEYS,
    STORE_KEYS,
    STORE_SECRET,
    WORK_PATH,
)
from ramen.artifacts import open_artifact
from ramen.console import warn
from ramen.errors import ConfigError, Interrupted, RamenError
from ramen.files import write_json
from ramen.signals import on_interrupt
from ramen.stages import STAGES
from ramen.tracking import Tracker
from ramen.workdir import stage_key

NODES_ENV = "RAMEN_TRAIN_NODES"
"""Nodes that train together; 1 or unset = the step trains in its own pod."""
TEMPLATE_ENV = "RAMEN_TRAINJOB"
TEMPLATE = Path(__file__).with_name("trainjob.yaml")
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POLL_SECONDS = 10.0
PATIENCE = 30
"""Failed looks in a row after which the step gives up."""


def nodes() -> int:
    """Nodes that train together. Raises ConfigError when the variable is no number."""
    text = os.environ.get(NODES_ENV, "") or "1"
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{NODES_ENV} = {text!r}: a number of nodes is expected")
    return int(text)


def run_job(
    stage: str,
    *,
    sections: Mapping[str, Any],
    inputs: Mapping[str, Path],
    outputs: Mapping[str, Path],
    track: Tracker,
    api: Any = None,
    shared: Path | None = None,
) -> dict[str, float]:
    """Run a training stage as a TrainJob; as `run_stage`, for a stage that is `parallel`.

    Args:
        stage, sections, inputs, outputs, track: as in `run_stage`.
        api: kubernetes CustomObjectsApi; None = the pod's own account.
        shared: folder on the volume that all nodes mount; None = `WORK_PATH`/jobs.

    Raises:
        RamenError: the job failed, the cluster has no Trainer, or the account may not make jobs.
        Interrupted: asked to stop; the job was deleted, its pods wrote a checkpoint.
    """
    api = api or _account()
    namespace = os.environ.get(NAMESPACE_ENV) or (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    name = f"ramen-{stage}-{stage_key(stage, sections, {'run': os.environ.get('KFP_RUN_ID', '')}, '')[:10]}"
    folder = (shared or Path(WORK_PATH) / "jobs") / name
    _place(folder, sections, inputs)
    job = _manifest(name, stage, folder, track)

    def stop() -> None:
        raise Interrupted(f"{stage}: stopped on request; job {name} was deleted, a retry goes on from its checkpoint")

    try:
        with on_interrupt(stop):
            _create(api, namespace, job)
            _wait(api, namespace, name, stage)
    except Interrupted:
        _delete(api, namespace, name)
        raise
    metrics: dict[str, float] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    for output, place in outputs.items():
        open_artifact(folder / "out" / output, output)
        _copy(folder / "out" / output, place)
    _delete(api, namespace, name)
    shutil.rmtree(folder, ignore_errors=True)
    return {key: value for key, value in metrics.items() if value is not None}


def _place(folder: Path, sections: Mapping[str, Any], inputs: Mapping[str, Path]) -> None:
    """Put inputs and configuration on the shared volume; what an earlier attempt put there whole stays."""
    for name, path in inputs.items():
        if not (folder / "in" / name).is_dir():
            _copy(path, folder / "in" / name)
    write_json(folder / "params.yaml", dict(sections))  # JSON is YAML


def _copy(source: Path, place: Path) -> None:
    """Copy a folder beside its place and rename it in."""
    beside = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(source, beside)
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)


def _manifest(name: str, stage: str, folder: Path, track: Tracker) -> dict[str, Any]:
    """The job, from the template."""
    place = Path(os.environ.get(TEMPLATE_ENV) or TEMPLATE)
    try:
        job: dict[str, Any] = yaml.safe_load(place.read_text(encoding="utf-8"))
        trainer = job["spec"]["trainer"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{TEMPLATE_ENV} = {place}: no template of a TrainJob ({error})") from None
    image = os.environ.get(IMAGE_ENV) or trainer.get("image")
    if not image:
        raise ConfigError(f"a job over several nodes needs the steps' image in {IMAGE_ENV}")
    need = RESOURCES[stage]
    asked = {"cpu": need.cpu[0], "memory": need.memory[0], GPU: str(need.gpus)}
    most = {"cpu": need.cpu[1], "memory": need.memory[1], GPU: str(need.gpus)}
    job.setdefault("metadata", {})["name"] = name
    trainer |= {
        "image": image,
        "numNodes": nodes(),
        "command": ["torchrun"],
        "args": [*_arguments(stage, folder)],
        "env": [*trainer.get("env", []), *_environment(track)],
        "resourcesPerNode": {"requests": asked, "limits": most},
    }
    return job


def _arguments(stage: str, folder: Path) -> list[str]:
    table = STAGES[stage]
    arguments = ["-m", "ramen", stage, "--params", str(folder / "params.yaml")]
    for name in table.reads:
        arguments += [f"--{name.replace('_', '-')}", str(folder / "in" / name)]
    for name in table.writes:
        arguments += [f"--{name.replace('_', '-')}", str(folder / "out" / name)]
    return [*arguments, "--metrics", str(folder / "metrics.json")]


def _environment(track: Tracker) -> list[dict[str, Any]]:
    """The job's variables: the step's own run to report to, secrets by reference, settings."""
    plain = {key: os.environ[key] for key in ("KFP_RUN_ID", "RAMEN_GIT_SHA") if key in os.environ}
    if track.run_id:
        plain["MLFLOW_RUN_ID"] = track.run_id
    found: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in plain.items()]
    for kind, source, keys in (
        ("secretKeyRef", MLFLOW_SECRET, MLFLOW_KEYS),
        ("secretKeyRef", STORE_SECRET, STORE_KEYS),
        ("configMapKeyRef", SETTINGS, SETTINGS_KEYS),
    ):
        found += [{"name": key, "valueFrom": {kind: {"name": source, "key": key, "optional": True}}} for key in keys]
    return found


def _create(api: Any, namespace: str, job: Mapping[str, Any]) -> None:
    """Make the job, unless it is there: one that failed is made anew, and goes on from its checkpoint."""
    from kubernetes.client import ApiException

    name = job["metadata"]["name"]
    for _ in range(PATIENCE):
        try:
            made = api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job)
            _check_kept(api, namespace, job, made)
            return
        except ApiException as error:
            if error.status != 409:
                raise _no_job(error, namespace, name) from None
        try:
            there = api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        except (ApiException, OSError):
            there = {}  # gone meanwhile, or no answer: `_wait` has its own patience
        leaving = "deletionTimestamp" in there.get("metadata", {})
        if not leaving and "Failed" not in _conditions(there):
            print(f"job {name} is there already: waiting for it", file=sys.stderr, flush=True)
            return
        if not leaving:
            print(f"job {name} failed before: deleting it, and trying again", file=sys.stderr, flush=True)
            _delete(api, namespace, name)
        time.sleep(POLL_SECONDS)
    raise RamenError(f"job {name} in namespace {namespace} failed before and does not go away; delete it by hand")


def _check_kept(api: Any, namespace: str, job: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """A cluster drops in silence what its Trainer does not know: GPU nodes and the shared volume, say.

    Raises:
        RamenError: it did; the job was deleted.
    """
    if dropped := sorted(set(job["spec"]) - set(made["spec"])):
        name = job["metadata"]["name"]
        _delete(api, namespace, name)
        raise RamenError(
            f"job {name} in namespace {namespace}: this cluster's Trainer does not know spec.{dropped[0]}; install "
            f"Kubeflow Trainer 2.2 or later, or name a template for yours in {TEMPLATE_ENV}"
        )


def _no_job(error: Any, namespace: str, name: str) -> RamenError:
    """Why the cluster makes no job."""
    hint = {404: "Kubeflow Trainer is not installed", 403: "the account may not make TrainJobs"}
    why = hint.get(error.status, (error.reason or str(error)).splitlines()[0])
    return RamenError(f"job {name} in namespace {namespace}: {why}; see infra/kustomize/base/accounts.yaml")


def _conditions(job: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a job that hold, by type."""
    return {one["type"]: one for one in job.get("status", {}).get("conditions", []) if one.get("status") == "True"}


def _wait(api: Any, namespace: str, name: str, stage: str) -> None:
    from kubernetes.client import ApiException

    failures, said = 0, ""
    while True:
        try:
            job = api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
            failures = 0
        except (ApiException, OSError) as error:
            failures += 1
            if failures >= PATIENCE or getattr(error, "status", None) == 404:
                raise RamenError(f"{stage}: job {name} cannot be watched ({getattr(error, 'reason', error)})") from None
            time.sleep(POLL_SECONDS)
            continue
        conditions = _conditions(job)
        if line := ", ".join(sorted(conditions)):
            if line != said:
                print(f"job {name}: {line}", file=sys.stderr, flush=True)
            said = line
        if "Failed" in conditions:
            message = conditions["Failed"].get("message", "").splitlines()
            raise RamenError(
                f"{stage}: job {name} failed ({message[0] if message else 'no message'}); "
                f"kubectl -n {namespace} logs -l jobset.sigs.k8s.io/jobset-name={name} --tail=50"
            )
        if "Complete" in conditions:
            return
        time.sleep(POLL_SECONDS)


def _delete(api: Any, namespace: str, name: str) -> None:
    from kubernetes.client import ApiException

    try:
        api.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
    except (ApiException, OSError) as error:
        warn(f"job {name} could not be deleted: {getattr(error, 'reason', error)}")


def _account() -> Any:
    from kubernetes import client, config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        raise RamenError(f"{NODES_ENV} above 1 works in a pod of a cluster only; unset it here") from None
    return client.CustomObjectsApi()
