"""Experiment tracking in MLflow.

A stage reports through the `Tracker` protocol; `open_tracker` returns MLflow's implementation, or one that does
nothing when `RAMEN_TRACKING=off`. mlflow is imported only when a tracker is opened.
"""

from ramen.tracking.errors import is_store_error, store_error, translate_store_errors
from ramen.tracking.evaluations import RunEvaluation, fetch_evaluations
from ramen.tracking.protocol import NullTracker, Tracker
from ramen.tracking.retries import environment_defaults
from ramen.tracking.runs import (
    REGISTRATION_NEEDS_TRACKING,
    PipelineRun,
    flat_params,
    list_pipeline_runs,
    open_tracker,
    push_pending_writes,
    read_run_files,
    start_pipeline_run,
)
from ramen.tracking.store import TRACKING_ENV, require_store, tracking_is_off, use_project_store
from ramen.tracking.uris import registry_uri, tracking_uri

__all__ = [
    "REGISTRATION_NEEDS_TRACKING",
    "TRACKING_ENV",
    "NullTracker",
    "PipelineRun",
    "RunEvaluation",
    "Tracker",
    "environment_defaults",
    "fetch_evaluations",
    "flat_params",
    "is_store_error",
    "list_pipeline_runs",
    "open_tracker",
    "push_pending_writes",
    "read_run_files",
    "registry_uri",
    "require_store",
    "start_pipeline_run",
    "store_error",
    "tracking_is_off",
    "tracking_uri",
    "translate_store_errors",
    "use_project_store",
]
