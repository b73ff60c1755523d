"""Component `build-graph`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def build_graph(
    walk: dict,
    version: str,
    dataset: dsl.Input[dsl.Dataset],
    graph: dsl.Output[dsl.Artifact],
    scalars: dsl.Output[dsl.Metrics],
) -> None:
    """Clean the metadata graphs and walk them.

    Args:
        walk: configuration section `walk`.
        version: what the cached result depends on beside its inputs: on the local runner the code.
        dataset: the dataset.
        graph: the metadata graphs, cleaned and walked.
        scalars: the stage's metrics.
    """
    from components.step import run_step

    sections = {"walk": walk}
    artifacts = {"dataset": dataset, "graph": graph}
    run_step("build-graph", sections, artifacts, scalars)
