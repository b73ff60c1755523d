"""Resources of each task, and the names of the cluster objects that the tasks use."""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "ramen"
"""Namespace of the manifests in infra/kustomize; runs use the submitter's namespace."""

SERVICE_ACCOUNT = "ramen-pipeline"
"""Service account of the steps; infra/kustomize defines its rights."""

GPU = "nvidia.com/gpu"
GPU_POOL = ("ramen.dev/pool", "gpu")
"""Label (key, value) of the nodes that train; set it on a node pool with GPUs."""

MLFLOW_SECRET = "ramen-mlflow"
"""Secret whose keys become the MLFLOW_* variables of a pod; optional: without it, runs are not tracked."""

MLFLOW_KEYS = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

STORE_SECRET = "ramen-object-store"
"""Secret with the keys of the object store for DVC's remote and MLflow's artifacts; optional."""

STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

SETTINGS = "ramen-settings"
"""Config map of settings that are not secret; optional."""

SETTINGS_KEYS = (
    "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "RAMEN_DVC_REMOTE", "RAMEN_WORK", "RAMEN_SPOOL", "RAMEN_TRAIN_NODES",
    "RAMEN_TRAINJOB",
)  # fmt: skip

NAMESPACE_ENV = "RAMEN_NAMESPACE"
"""Environment variable with the namespace of a step."""

WORK_CLAIM, WORK_PATH = "ramen-work", "/mnt/ramen"
"""Volume claim and its mount path: checkpoints and unsent tracking writes survive the pod there."""

RETRY_HOURS = 720
"""Hours after a task's first start during which it is retried: longer than any training."""

USER = 1000
"""User id and group id of the containers."""


@dataclass(frozen=True)
class Resources:
    """Resources of a task.

    Attributes:
        cpu, memory: request and limit, as Kubernetes quantities.
        gpus: number of GPUs.
        retries: retries after a failure.
        backoff: seconds before the first retry, doubled for each further one.
        shared_memory: size of /dev/shm, as a Kubernetes quantity; empty = the default.
    """

    cpu: tuple[str, str]
    memory: tuple[str, str]
    gpus: int = 0
    retries: int = 2
    backoff: int = 60
    shared_memory: str = ""


RESOURCES: dict[str, Resources] = {
    "ingest": Resources(("2", "4"), ("8Gi", "64Gi")),
    "build-graph": Resources(("4", "16"), ("16Gi", "64Gi")),
    "warmup": Resources(("8", "16"), ("32Gi", "64Gi"), gpus=1, shared_memory="16Gi"),
    "prune-retrain": Resources(("8", "16"), ("32Gi", "64Gi"), gpus=1, shared_memory="16Gi"),
    "evaluate": Resources(("4", "8"), ("16Gi", "64Gi"), gpus=1, shared_memory="8Gi"),
    "publish-index": Resources(("4", "16"), ("16Gi", "64Gi"), retries=1),
}
