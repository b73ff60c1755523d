"""What each task asks of the cluster; the only place that says so."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "nvidia.com/gpu"
GPU_POOL = ("cloud.google.com/gke-nodepool", "gpu")
"""Label of the GPU node pool, as (key, value)."""

MLFLOW_SECRET = "ramen-mlflow"
"""Secret whose keys become the MLFLOW_* variables of a pod; optional, so a cluster without MLflow still runs."""

MLFLOW_KEYS = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")

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
    "ingest": Resources(("2", "4"), ("8Gi", "32Gi")),
    "build-graph": Resources(("4", "16"), ("16Gi", "64Gi")),
    "warmup": Resources(("8", "16"), ("32Gi", "64Gi"), gpus=1, shared_memory="16Gi"),
    "prune-retrain": Resources(("8", "16"), ("32Gi", "64Gi"), gpus=1, shared_memory="16Gi"),
    "evaluate": Resources(("4", "8"), ("16Gi", "32Gi"), gpus=1, shared_memory="8Gi"),
    "publish-index": Resources(("4", "16"), ("16Gi", "64Gi"), retries=1),
}
