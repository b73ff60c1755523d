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
    """Clean the metadata graphs and add the edges of random walks.

    Args:
        walk: configuration section `walk`.
        version: further key of the cached result: on the local runner, a hash of the code.
        dataset: the dataset.
        graph: the metadata graphs after cleaning and random walks.
        scalars: the stage's metrics.
    """
    from components.step import run_step

    sections = {"walk": walk}
    artifacts = {"dataset": dataset, "graph": graph}
    run_step("build-graph", sections, artifacts, scalars)
