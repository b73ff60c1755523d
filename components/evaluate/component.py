"""Component `evaluate`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    encoder: dict,
    scoring: dict,
    version: str,
    dataset: dsl.Input[dsl.Dataset],
    pruned_graph: dsl.Input[dsl.Artifact],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    scalars: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Retrieve labels for the test documents; write metrics, predictions and the report.

    Args:
        encoder: configuration section `encoder`.
        scoring: configuration section `scoring`.
        version: further key of the cached result: on the local runner, a hash of the code.
        dataset: the dataset.
        pruned_graph: the graphs after the last pruning round.
        model: the trained encoder.
        evaluation: metrics, predictions and report.
        scalars: the stage's metrics.
        report: the evaluation report.
    """
    from components.step import run_step

    sections = {"encoder": encoder, "scoring": scoring}
    artifacts = {"dataset": dataset, "pruned_graph": pruned_graph, "model": model, "evaluation": evaluation}
    run_step("evaluate", sections, artifacts, scalars, report)
