"""Component `publish-index`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def publish_index(
    encoder: dict,
    index: dict,
    version: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    retriever: dsl.Output[dsl.Model],
    scalars: dsl.Output[dsl.Metrics],
) -> None:
    """Build the ANN index, measure its recall, and register the retriever.

    Args:
        encoder: configuration section `encoder`.
        index: configuration section `index`.
        version: further key of the cached result: on the local runner, a hash of the code.
        dataset: the dataset.
        model: the trained encoder.
        evaluation: metrics, predictions and report.
        retriever: index, label table and receipt of the registered version.
        scalars: the stage's metrics.
    """
    from components.step import run_step

    sections = {"encoder": encoder, "index": index}
    artifacts = {"dataset": dataset, "model": model, "evaluation": evaluation, "retriever": retriever}
    run_step("publish-index", sections, artifacts, scalars)
