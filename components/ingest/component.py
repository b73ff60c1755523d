"""Component `ingest`."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def ingest(
    data: dict,
    version: str,
    dataset: dsl.Output[dsl.Dataset],
    scalars: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> None:
    """Read a source, validate it, and write the dataset.

    Args:
        data: configuration section `data`.
        version: further key of the cached result: on the local runner, a hash of the code and the raw data.
        dataset: the dataset.
        scalars: the stage's metrics.
        report: the validation report.
    """
    from components.step import run_step

    sections = {"data": data}
    artifacts = {"dataset": dataset}
    run_step("ingest", sections, artifacts, scalars, report)
