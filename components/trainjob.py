"""Train one stage on several nodes: the step creates a Kubeflow TrainJob and waits for it.

The job's pods see only the shared volume. The step copies its inputs there, the job runs `torchrun -m ramen STAGE` on
every node, and the step copies the outputs back into its artifacts. A retried step finds its job, finished or not, by
name.
"""

from __future__ import annotations

import json
import os
import shutil
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
from ramen.console import report, warn
from ramen.errors import ConfigError, Interrupted, RamenError
from ramen.files import write_json
from ramen.signals import on_interrupt
from ramen.stages import STAGES
from ramen.tracking import Tracker
from ramen.workdir import stage_key

NODES_ENV = "RAMEN_TRAIN_NODES"
"""Environment variable: number of nodes; 1 or unset = the step trains in its own pod."""
TEMPLATE_ENV = "RAMEN_TRAINJOB"
"""Environment variable: path of another template."""
TEMPLATE = Path(__file__).with_name("trainjob.yaml")
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POLL_SECONDS = 10.0
MAX_FAILED_REQUESTS = 30
"""Consecutive failed requests after which the step gives up."""


def node_count() -> int:
    """Return the number of nodes that train together. Raises ConfigError if the variable is not a number."""
    text = os.environ.get(NODES_ENV, "") or "1"
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{NODES_ENV} = {text!r}: expected a number of nodes, at least 1")
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
    """Run a `parallel` stage as a TrainJob, and return its metrics like `run_stage`.

    Args:
        stage, sections, inputs, outputs, track: as in `run_stage`.
        api: kubernetes CustomObjectsApi; None = one with the pod's service account.
        shared: directory on the volume that all nodes mount; None = `WORK_PATH`/jobs.

    Raises:
        RamenError: the job failed, the cluster has no Trainer, or the account may not create jobs.
        Interrupted: SIGTERM or Ctrl-C; the job was deleted, upon which its pods write a checkpoint.
    """
    api = api or _load_api()
    namespace = os.environ.get(NAMESPACE_ENV) or (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    name = f"ramen-{stage}-{stage_key(stage, sections, {'run': os.environ.get('KFP_RUN_ID', '')}, '')[:10]}"
    folder = (shared or Path(WORK_PATH) / "jobs") / name
    _write_inputs(folder, sections, inputs)
    job = _job_manifest(name, stage, folder, track)

    def stop() -> None:
        raise Interrupted(f"{stage}: interrupted; job {name} was deleted, and a retry resumes from its checkpoint")

    try:
        with on_interrupt(stop):
            _create(api, namespace, job)
            _wait(api, namespace, name, stage)
    except Interrupted:
        _delete(api, namespace, name)
        raise
    metrics: dict[str, float] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    for output, path in outputs.items():
        open_artifact(folder / "out" / output, output)
        _copy(folder / "out" / output, path)
    _delete(api, namespace, name)
    shutil.rmtree(folder, ignore_errors=True)
    return {key: value for key, value in metrics.items() if value is not None}


def _write_inputs(folder: Path, sections: Mapping[str, Any], inputs: Mapping[str, Path]) -> None:
    """Write inputs and configuration to the shared volume; keeps inputs that an earlier attempt copied."""
    for name, path in inputs.items():
        if not (folder / "in" / name).is_dir():
            _copy(path, folder / "in" / name)
    write_json(folder / "params.yaml", dict(sections))  # JSON is YAML


def _copy(source: Path, target: Path) -> None:
    """Copy a directory under a temporary name and rename it, so that `target` is never incomplete."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _job_manifest(name: str, stage: str, folder: Path, track: Tracker) -> dict[str, Any]:
    """Fill in the template of the job."""
    template = Path(os.environ.get(TEMPLATE_ENV) or TEMPLATE)
    try:
        job: dict[str, Any] = yaml.safe_load(template.read_text(encoding="utf-8"))
        trainer = job["spec"]["trainer"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{TEMPLATE_ENV} = {template}: is not a TrainJob template ({error})") from None
    image = os.environ.get(IMAGE_ENV) or trainer.get("image")
    if not image:
        raise ConfigError(f"{stage}: no image for the multi-node job; set {IMAGE_ENV} to the image of the steps")
    resources = RESOURCES[stage]
    requests, limits = (
        {"cpu": resources.cpu[i], "memory": resources.memory[i], GPU: str(resources.gpus)} for i in (0, 1)
    )
    job.setdefault("metadata", {})["name"] = name
    trainer |= {
        "image": image,
        "numNodes": node_count(),
        "command": ["torchrun"],
        "args": _stage_arguments(stage, folder),
        "env": [*trainer.get("env", []), *_job_environment(track)],
        "resourcesPerNode": {"requests": requests, "limits": limits},
    }
    return job


def _stage_arguments(stage: str, folder: Path) -> list[str]:
    table = STAGES[stage]
    arguments = ["-m", "ramen", stage, "--params", str(folder / "params.yaml")]
    for name in table.reads:
        arguments += [f"--{name.replace('_', '-')}", str(folder / "in" / name)]
    for name in table.writes:
        arguments += [f"--{name.replace('_', '-')}", str(folder / "out" / name)]
    return [*arguments, "--metrics", str(folder / "metrics.json")]


def _job_environment(track: Tracker) -> list[dict[str, Any]]:
    """Return the job's variables: the MLflow run of the step, references to secrets, and settings."""
    plain = {key: os.environ[key] for key in ("KFP_RUN_ID", "RAMEN_GIT_SHA") if key in os.environ}
    if track.run_id:
        plain["MLFLOW_RUN_ID"] = track.run_id
    variables: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in plain.items()]
    for kind, source, keys in (
        ("secretKeyRef", MLFLOW_SECRET, MLFLOW_KEYS),
        ("secretKeyRef", STORE_SECRET, STORE_KEYS),
        ("configMapKeyRef", SETTINGS, SETTINGS_KEYS),
    ):
        variables += [
            {"name": key, "valueFrom": {kind: {"name": source, "key": key, "optional": True}}} for key in keys
        ]
    return variables


def _create(api: Any, namespace: str, job: Mapping[str, Any]) -> None:
    """Create the job unless it exists. A failed job is deleted and created again; it resumes from its checkpoint."""
    from kubernetes.client import ApiException

    name = job["metadata"]["name"]
    for _ in range(MAX_FAILED_REQUESTS):
        try:
            created = api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job)
            _check_accepted(api, namespace, job, created)
            return
        except ApiException as error:
            if error.status != 409:
                raise _creation_error(error, namespace, name) from None
        try:
            existing = api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        except (ApiException, OSError):
            existing = {}  # deleted, or the request failed: `_wait` retries
        terminating = "deletionTimestamp" in existing.get("metadata", {})
        if not terminating and "Failed" not in _conditions(existing):
            report(f"job {name} exists already: waiting for it")
            return
        if not terminating:
            report(f"job {name} failed before: deleting it to create it again")
            _delete(api, namespace, name)
        time.sleep(POLL_SECONDS)
    raise RamenError(
        f"job {name} in namespace {namespace}: failed before, and still exists after it was deleted; delete it by hand "
        f"(kubectl -n {namespace} delete trainjob {name})"
    )


def _check_accepted(api: Any, namespace: str, job: Mapping[str, Any], created: Mapping[str, Any]) -> None:
    """Check that the cluster kept all fields of the job.

    The API server silently drops fields that its Trainer does not know, such as the GPU nodes and the shared volume.

    Raises:
        RamenError: it dropped a field; the job was deleted.
    """
    if dropped := sorted(set(job["spec"]) - set(created["spec"])):
        name = job["metadata"]["name"]
        _delete(api, namespace, name)
        raise RamenError(
            f"job {name} in namespace {namespace}: this cluster's Trainer does not know spec.{dropped[0]}; install "
            f"Kubeflow Trainer 2.2 or later, or set {TEMPLATE_ENV} to a template for your Trainer"
        )


def _creation_error(error: Any, namespace: str, name: str) -> RamenError:
    """Explain why the cluster did not create the job."""
    causes = {404: "Kubeflow Trainer is not installed", 403: "the account may not create TrainJobs"}
    cause = causes.get(error.status, (error.reason or str(error)).splitlines()[0])
    return RamenError(f"job {name} in namespace {namespace}: {cause}; see infra/kustomize/base/accounts.yaml")


def _conditions(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the true conditions of a job, by type."""
    return {one["type"]: one for one in job.get("status", {}).get("conditions", []) if one.get("status") == "True"}


def _wait(api: Any, namespace: str, name: str, stage: str) -> None:
    from kubernetes.client import ApiException

    failures, reported = 0, ""
    while True:
        try:
            job = api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
            failures = 0
        except (ApiException, OSError) as error:
            failures += 1
            if failures >= MAX_FAILED_REQUESTS or getattr(error, "status", None) == 404:
                raise RamenError(
                    f"{stage}: cannot read the state of job {name} ({getattr(error, 'reason', error)}); a retry of the "
                    "step waits for the same job"
                ) from None
            time.sleep(POLL_SECONDS)
            continue
        conditions = _conditions(job)
        if line := ", ".join(sorted(conditions)):
            if line != reported:
                report(f"job {name}: {line}")
            reported = line
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


def _load_api() -> Any:
    """Return the API of the cluster that this pod runs in."""
    from kubernetes import client, config

    try:
        config.load_incluster_config()
    except config.ConfigException:
        raise RamenError(f"{NODES_ENV} = {node_count()}: needs a pod of a cluster; unset it on this machine") from None
    return client.CustomObjectsApi()
