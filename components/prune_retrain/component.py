"""Component `prune-retrain`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prune_retrain(
    encoder: dict,
    objective: dict,
    bandit: dict,
    base: dict,
    training: dict,
    guidance: dict,
    pruning: dict,
    classifier: dict,
    version: str,
    dataset: dsl.Input[dsl.Dataset],
    graph: dsl.Input[dsl.Artifact],
    warm_model: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
    pruned_graph: dsl.Output[dsl.Artifact],
    scalars: dsl.Output[dsl.Metrics],
) -> None:
    """Prune noisy edges with the encoder and retrain, round by round.

    Args:
        encoder: configuration section `encoder`.
        objective: configuration section `objective`.
        bandit: configuration section `bandit`.
        base: configuration section `base`.
        training: configuration section `training`.
        guidance: configuration section `guidance`.
        pruning: configuration section `pruning`.
        classifier: configuration section `classifier`.
        version: further key of the cached result: on the local runner, a hash of the code.
        dataset: the dataset.
        graph: the metadata graphs after cleaning and random walks.
        warm_model: the encoder after warm-up.
        model: the trained encoder.
        pruned_graph: the graphs after the last pruning round.
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
        "pruning": pruning,
        "classifier": classifier,
    }
    artifacts = {
        "dataset": dataset,
        "graph": graph,
        "warm_model": warm_model,
        "model": model,
        "pruned_graph": pruned_graph,
    }
    run_step("prune-retrain", sections, artifacts, scalars)
