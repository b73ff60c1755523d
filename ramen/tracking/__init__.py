"""Tracking: a small protocol, a tracker that does nothing, and MLflow.

mlflow is imported only when a tracker is opened. `RAMEN_TRACKING=off` turns tracking off.
"""

from ramen.tracking.errors import is_store_error, plain_errors, registry_uri, store_error, tracking_uri
from ramen.tracking.evaluations import Evaluated, fetch_evaluations
from ramen.tracking.journal import environment_defaults
from ramen.tracking.protocol import NullTracker, Tracker
from ramen.tracking.runs import (
    SWITCH_ENV,
    UNTRACKED,
    PipelineRun,
    flat_params,
    list_pipeline_runs,
    open_tracker,
    push_kept,
    require_store,
    run_files,
    start_pipeline_run,
    tracking_is_off,
    use_project_store,
)

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
