"""The pipeline's wiring: six components, each given exactly the sections and artifacts its stage declares."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp import dsl, kubernetes

from components.build_graph.component import build_graph
from components.evaluate.component import evaluate
from components.image import IMAGE, IMAGE_ENV
from components.ingest.component import ingest
from components.prune_retrain.component import prune_retrain
from components.publish_index.component import publish_index
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
from components.warmup.component import warmup
from ramen.config import Config
from ramen.stages import STAGES

NAME = "ramen"


class Outputs(NamedTuple):
    dataset: dsl.Dataset
    graph: dsl.Artifact
    warm_model: dsl.Model
    model: dsl.Model
    pruned_graph: dsl.Artifact
    evaluation: dsl.Artifact
    retriever: dsl.Model  # fmt: skip


"""The artifacts of a run, by name."""


def build(settings: Config, versions: Mapping[str, str], *, retry: bool = True) -> Any:
    """Make the pipeline.

    Args:
        settings: the sections' values become the defaults of the pipeline's parameters.
        versions: stage -> what its cached result depends on beside its inputs.
        retry: let failed tasks be tried again (not on a laptop, where a person reads the error).

    Returns:
        A kfp pipeline with one parameter per section.
    """
    values = settings.sections()

    @dsl.pipeline(name=NAME, description="Graph-regularised encoder training for extreme classification.")  # type: ignore[untyped-decorator]
    def ramen(
        data: dict = values["data"],  # type: ignore[type-arg]
        walk: dict = values["walk"],  # type: ignore[type-arg]
        encoder: dict = values["encoder"],  # type: ignore[type-arg]
        objective: dict = values["objective"],  # type: ignore[type-arg]
        bandit: dict = values["bandit"],  # type: ignore[type-arg]
        base: dict = values["base"],  # type: ignore[type-arg]
        training: dict = values["training"],  # type: ignore[type-arg]
        guidance: dict = values["guidance"],  # type: ignore[type-arg]
        pruning: dict = values["pruning"],  # type: ignore[type-arg]
        classifier: dict = values["classifier"],  # type: ignore[type-arg]
        scoring: dict = values["scoring"],  # type: ignore[type-arg]
        index: dict = values["index"],  # type: ignore[type-arg]
    ) -> Outputs:
        read = ingest(data=data, version=versions["ingest"])
        dataset = read.outputs["dataset"]
        built = build_graph(walk=walk, version=versions["build-graph"], dataset=dataset)
        graph = built.outputs["graph"]
        warm = warmup(
            encoder=encoder, objective=objective, bandit=bandit, base=base, training=training, guidance=guidance,
            version=versions["warmup"], dataset=dataset, graph=graph,
        )  # fmt: skip
        trained = prune_retrain(
            encoder=encoder, objective=objective, bandit=bandit, base=base, training=training, guidance=guidance,
            pruning=pruning, classifier=classifier, version=versions["prune-retrain"], dataset=dataset, graph=graph,
            warm_model=warm.outputs["warm_model"],
        )  # fmt: skip
        model = trained.outputs["model"]
        evaluated = evaluate(
            encoder=encoder, scoring=scoring, version=versions["evaluate"], dataset=dataset,
            pruned_graph=trained.outputs["pruned_graph"], model=model,
        )  # fmt: skip
        published = publish_index(
            encoder=encoder, index=index, version=versions["publish-index"], dataset=dataset, model=model,
            evaluation=evaluated.outputs["evaluation"],
        )  # fmt: skip
        tasks = {"ingest": read, "build-graph": built, "warmup": warm, "prune-retrain": trained,
                 "evaluate": evaluated, "publish-index": published}  # fmt: skip
        for stage, task in tasks.items():
            place(task, stage, retry=retry)
        return Outputs(
            dataset, graph, warm.outputs["warm_model"], model, trained.outputs["pruned_graph"],
            evaluated.outputs["evaluation"], published.outputs["retriever"],
        )  # fmt: skip

    return ramen


def place(task: Any, stage: str, *, retry: bool) -> None:
    """Set a task's resources, node pool, retries, caching, credentials and security context."""
    need = RESOURCES[stage]
    task.set_display_name(stage)
    task.set_cpu_request(need.cpu[0]).set_cpu_limit(need.cpu[1])
    task.set_memory_request(need.memory[0]).set_memory_limit(need.memory[1])
    task.set_caching_options(not STAGES[stage].side_effects)
    if retry:
        # counted from the first attempt's start, run time included: an hour, the default, is over before most fail
        task.set_retry(
            need.retries,
            backoff_duration=f"{need.backoff}s",
            backoff_factor=2.0,
            backoff_max_duration=f"{RETRY_HOURS}h",
        )
    if STAGES[stage].parallel:
        task.set_env_variable(IMAGE_ENV, IMAGE)  # of the job over several nodes that the step may start
    if need.gpus:
        task.set_accelerator_type(GPU).set_accelerator_limit(need.gpus)
        kubernetes.add_node_selector(task, *GPU_POOL)
        kubernetes.add_toleration(task, key=GPU, operator="Exists", effect="NoSchedule")
        # data loaders and gather across processes go through /dev/shm, 64 MiB by default
        kubernetes.empty_dir_mount(task, "dshm", "/dev/shm", medium="Memory", size_limit=need.shared_memory)
    # hours of work: what a lost node leaves there, the next pod goes on from; and tracking kept through an outage
    kubernetes.mount_pvc(task, WORK_CLAIM, WORK_PATH)
    kubernetes.use_secret_as_env(task, MLFLOW_SECRET, {key: key for key in MLFLOW_KEYS}, optional=True)
    kubernetes.use_secret_as_env(task, STORE_SECRET, {key: key for key in STORE_KEYS}, optional=True)
    kubernetes.use_config_map_as_env(task, SETTINGS, {key: key for key in SETTINGS_KEYS}, optional=True)
    kubernetes.use_field_path_as_env(task, NAMESPACE_ENV, "metadata.namespace")
    kubernetes.use_field_path_as_env(task, "KFP_RUN_ID", "metadata.labels['pipeline/runid']")
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
