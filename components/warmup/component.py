"""Component `warmup`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def warmup(
    encoder: dict,
    objective: dict,
    bandit: dict,
    base: dict,
    training: dict,
    guidance: dict,
    version: str,
    dataset: dsl.Input[dsl.Dataset],
    graph: dsl.Input[dsl.Artifact],
    warm_model: dsl.Output[dsl.Model],
    scalars: dsl.Output[dsl.Metrics],
) -> None:
    """Train the encoder on the unpruned graphs.

    Args:
        encoder: configuration section `encoder`.
        objective: configuration section `objective`.
        bandit: configuration section `bandit`.
        base: configuration section `base`.
        training: configuration section `training`.
        guidance: configuration section `guidance`.
        version: further key of the cached result: on the local runner, a hash of the code.
        dataset: the dataset.
        graph: the metadata graphs after cleaning and random walks.
        warm_model: the encoder after warm-up.
        scalars: the stage's metrics.
    """
    from components.step import run_step

    sections = {
        "encoder": encoder,
        "objective": objective,
        "bandit": bandit,
        "base": base,
        "training": training,
        "guidance": guidance,
    }
    artifacts = {"dataset": dataset, "graph": graph, "warm_model": warm_model}
    run_step("warmup", sections, artifacts, scalars)
