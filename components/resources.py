"""What each task asks of the cluster; the only place that says so."""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "ramen"
"""Namespace of the manifests in infra/kustomize; the runs' own namespace is the submitter's."""

SERVICE_ACCOUNT = "ramen-pipeline"
"""Account that the steps run as, with the rights that infra/kustomize gives it."""

GPU = "nvidia.com/gpu"
GPU_POOL = ("ramen.dev/pool", "gpu")
"""Label of the GPU nodes, as (key, value); put it on whatever pool shall train."""

MLFLOW_SECRET = "ramen-mlflow"
"""Secret whose keys become the MLFLOW_* variables of a pod; optional: without it a run trains and is not tracked."""

MLFLOW_KEYS = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

STORE_SECRET = "ramen-object-store"
"""Secret with the keys of the object store that holds DVC's remote and MLflow's artifacts; optional."""

STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

SETTINGS = "ramen-settings"
"""Config map of what is no secret; optional."""

SETTINGS_KEYS = (
    "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "RAMEN_DVC_REMOTE", "RAMEN_WORK", "RAMEN_SPOOL", "RAMEN_TRAIN_NODES",
    "RAMEN_TRAINJOB",
)  # fmt: skip

NAMESPACE_ENV = "RAMEN_NAMESPACE"
"""Variable that tells a step the namespace it runs in."""

WORK_CLAIM, WORK_PATH = "ramen-work", "/mnt/ramen"
"""Volume claim, and where the steps mount it: checkpoints and kept tracking outlive a pod there."""

RETRY_HOURS = 720
"""Hours from a task's first start after which it is not tried again: longer than any training."""

USER = 1000
"""User and group the containers run as."""


@dataclass(frozen=True)
class Resources:
    """Requests and limits of a task, in Kubernetes quantities; `retries` with `backoff` seconds, doubled each time."""

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
