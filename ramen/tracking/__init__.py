"""Experiment tracking in MLflow.

A stage reports through the `Tracker` protocol; `open_tracker` returns MLflow's implementation, or one that does
nothing when `RAMEN_TRACKING=off`. mlflow is imported only when a tracker is opened.
"""

from ramen.tracking.errors import is_store_error, plain_errors, store_error
from ramen.tracking.evaluations import Evaluated, fetch_evaluations
from ramen.tracking.protocol import NullTracker, Tracker
from ramen.tracking.retries import environment_defaults
from ramen.tracking.runs import (
    UNTRACKED,
    PipelineRun,
    flat_params,
    list_pipeline_runs,
    open_tracker,
    push_kept,
    run_files,
    start_pipeline_run,
)
from ramen.tracking.store import SWITCH_ENV, require_store, tracking_is_off, use_project_store
from ramen.tracking.uris import registry_uri, tracking_uri

__all__ = [
    "SWITCH_ENV",
    "UNTRACKED",
    "Evaluated",
    "NullTracker",
    "PipelineRun",
    "Tracker",
    "environment_defaults",
    "fetch_evaluations",
    "flat_params",
    "is_store_error",
    "list_pipeline_runs",
    "open_tracker",
    "plain_errors",
    "push_kept",
    "registry_uri",
    "require_store",
    "run_files",
    "start_pipeline_run",
    "store_error",
    "tracking_is_off",
    "tracking_uri",
    "use_project_store",
]
