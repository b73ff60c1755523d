"""The pipeline: one task per stage of the table, connected by the artifacts that the stages read and write."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from components import load_component
from components.image import IMAGE, IMAGE_ENV
from components.resources import (
    GPU,
    GPU_POOL,
    MLFLOW_KEYS,
    MLFLOW_SECRET,
    NAMESPACE_ENV,
    RESOURCES,
    RETRY_HOURS,
    SETTINGS,
    SETTINGS_KEYS,
    STORE_KEYS,
    STORE_SECRET,
    USER,
    WORK_CLAIM,
    WORK_PATH,
)
from ramen.config import Config
from ramen.stages import STAGES, Stage

NAME = "ramen"


class Outputs(NamedTuple):
    """The artifacts of a run."""

    dataset: dsl.Dataset
    graph: dsl.Artifact
    warm_model: dsl.Model
    model: dsl.Model
    pruned_graph: dsl.Artifact
    evaluation: dsl.Artifact
    retriever: dsl.Model


def build(config: Config, versions: Mapping[str, str], *, retry: bool = True) -> Any:
    """Return the kfp pipeline: one parameter per config section, one task per stage, every artifact as an output.

    Args:
        config: its sections become the defaults of the pipeline's parameters.
        versions: stage -> what its cached result depends on in addition to its inputs.
        retry: whether the cluster retries failed tasks; false on a laptop, where the user reads the error.
    """
    defaults = config.sections()

    def connect_stages(*parameters: Any) -> Outputs:
        sections = dict(zip(defaults, parameters, strict=True))
        artifacts: dict[str, Any] = {}
        for stage in STAGES.values():
            task = load_component(stage)(
                **{name: sections[name] for name in stage.sections},
                version=versions[stage.name],
                **{name: artifacts[name] for name in stage.reads},
            )
            configure_task(task, stage, retry=retry)
            artifacts |= {name: task.outputs[name] for name in stage.writes}
        return Outputs(**artifacts)

    # kfp derives the pipeline's parameters and outputs from the signature of the function
    connect_stages.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=values, annotation=dict)
            for name, values in defaults.items()
        ],
        return_annotation=Outputs,
    )
    description = "Graph-regularised encoder training for extreme classification."
    return dsl.pipeline(connect_stages, name=NAME, description=description)


def configure_task(task: Any, stage: Stage, *, retry: bool) -> None:
    """Set a task's resources, node pool, retries, caching, credentials and security context."""
    resources = RESOURCES[stage.name]
    task.set_display_name(stage.name)
    task.set_cpu_request(resources.cpu[0]).set_cpu_limit(resources.cpu[1])
    task.set_memory_request(resources.memory[0]).set_memory_limit(resources.memory[1])
    task.set_caching_options(not stage.side_effects)
    if retry:
        # Kubernetes counts this limit from the start of the first attempt, run time included. The default of one hour
        # would rule out a retry for most failures of a training.
        task.set_retry(
            resources.retries,
            backoff_duration=f"{resources.backoff}s",
            backoff_factor=2.0,
            backoff_max_duration=f"{RETRY_HOURS}h",
        )
    if stage.parallel:
        task.set_env_variable(IMAGE_ENV, IMAGE)  # image of the multi-node job that the step may start
    if resources.gpus:
        task.set_accelerator_type(GPU).set_accelerator_limit(resources.gpus)
        kubernetes.add_node_selector(task, *GPU_POOL)
        kubernetes.add_toleration(task, key=GPU, operator="Exists", effect="NoSchedule")
        # data loaders and collectives between processes use /dev/shm, which has 64 MiB by default
        kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=resources.shared_memory)
    # checkpoints survive a lost node here, and so do tracking writes that the server did not receive
    kubernetes.mount_pvc(task, WORK_CLAIM, WORK_PATH)
    kubernetes.use_secret_as_env(task, MLFLOW_SECRET, {key: key for key in MLFLOW_KEYS}, optional=True)
    kubernetes.use_secret_as_env(task, STORE_SECRET, {key: key for key in STORE_KEYS}, optional=True)
    kubernetes.use_config_map_as_env(task, SETTINGS, {key: key for key in SETTINGS_KEYS}, optional=True)
    kubernetes.use_field_path_as_env(task, NAMESPACE_ENV, "metadata.namespace")
    kubernetes.use_field_path_as_env(task, "KFP_RUN_ID", "metadata.labels['pipeline/runid']")
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
