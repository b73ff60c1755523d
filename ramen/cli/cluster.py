"""Commands for a cluster: submit a run, adopt its data, send tracking writes that were kept during an outage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ramen.cli.common import PATH, config_options, image_name
from ramen.errors import RamenError

if TYPE_CHECKING:
    from ramen.config import Config


@click.command(short_help="Run the pipeline on a Kubeflow cluster.")
@click.argument("pipeline", type=PATH, default=Path("pipelines/ramen.yaml"))
@config_options
@click.option(
    "--image",
    callback=image_name,
    metavar="IMAGE",
    help="Compile now, with this image for all steps, instead of using PIPELINE.",
)
@click.option(
    "--endpoint", default="", metavar="URL", help="Address of the server.  [default: KF_PIPELINES_ENDPOINT, or kfp's]"
)
@click.option("--namespace", default="", help="Namespace of the run, on a multi-user server.")
@click.option(
    "-e", "--experiment", default="ramen", show_default=True, help="Experiment of the run; created if missing."
)
@click.option("-r", "--name", default="", help="Name of the run.  [default: ramen and the time]")
@click.option(
    "--service-account", default="", metavar="NAME", help="Service account of the steps (infra: ramen-pipeline)."
)
@click.option("--root", metavar="URL", help="Where the server stores this run's artifacts.")
@click.option("--no-cache", is_flag=True, help="Do not use the server's cache; a schedule never uses it.")
@click.option("-w", "--watch", is_flag=True, help="Follow the run; exit code 1 unless it succeeds.")
@click.option("--cron", metavar="SPEC", help='Schedule runs, such as "0 3 * * 1"; one run at a time.')
def submit(
    pipeline: Path,
    resolve: Callable[..., Config],
    image: str | None,
    endpoint: str,
    namespace: str,
    experiment: str,
    name: str,
    service_account: str,
    root: str | None,
    no_cache: bool,
    watch: bool,
    cron: str | None,
) -> None:
    """Submit the compiled PIPELINE with the resolved configuration, and print the link to the run.

    A bearer token is read from KF_PIPELINES_TOKEN. Ctrl-C while watching does not stop the run. The server's cache
    identifies a step by its parameters, inputs and image: if the data behind data.path changed, use --no-cache or
    another path. A schedule runs all steps, so it always reads the current data.

    \b
    Examples:
      ramen submit --endpoint http://localhost:8080 --watch
      ramen submit --preset debian --image registry.example/ramen@sha256:... --service-account ramen-pipeline
      ramen submit --cron "0 3 * * 1"
    """
    from pipelines import submit as pipeline_submit

    config = resolve()
    target = pipeline_submit.Target(endpoint, namespace, experiment, service_account)
    name = name or time.strftime("ramen %Y-%m-%d %H:%M")
    if watch and cron is not None:
        raise click.UsageError(
            "--watch follows a run that starts now, but --cron only schedules runs; give one of them"
        )
    with pipeline_submit.package(pipeline, config, image) as file:
        if cron is not None:
            job = pipeline_submit.schedule(file, config, target, name=name, cron=cron, root=root)
            click.echo(f"schedule {job.id}: {job.url}")
            return
        run = pipeline_submit.submit(file, config, target, name=name, caching=False if no_cache else None, root=root)
    click.echo(f"run {run.id}: {run.url}")
    if watch:
        state = pipeline_submit.watch(run.id, target, lambda line: click.echo(line, err=True))
        if state != "SUCCEEDED":
            raise RamenError(f"run {run.id} ended as {state}; see {run.url}")
        click.echo(f"run {run.id} succeeded")


@click.command("dvc-adopt", short_help="Add the data of a cluster run to this DVC repository.")
@click.argument("run")
@click.option(
    "--to",
    type=PATH,
    metavar="DIR",
    help="Folder for the pointers.  [default: adopted/ and the first 8 digits of the run id]",
)
def dvc_adopt(run: str, to: Path | None) -> None:
    """Write DVC pointers to the data that a run's pods pushed (RAMEN_DVC_REMOTE) into this repository.

    RUN is the name of a pipeline run in MLflow, or the beginning of its id; the newest match is used. `dvc pull` then
    downloads the dataset and the graphs of that run. The remote is added to .dvc/config if it is missing; access keys
    are read from the environment.

    \b
    Examples:
      ramen dvc-adopt 3f2a91c0
      dvc pull -R adopted/3f2a91c0
      ramen warmup --dataset adopted/3f2a91c0/dataset --graph adopted/3f2a91c0/graph
    """
    from ramen.cli.runs import select_runs
    from ramen.dvc_pointers import POINTER_FOLDER, REMOTE_ENV, Pointer, adopt
    from ramen.errors import RamenError
    from ramen.tracking import list_pipeline_runs, read_run_files

    chosen = select_runs(list_pipeline_runs(), [run])[0]
    pointers = [Pointer.from_yaml(text) for _, text in sorted(read_run_files(chosen.run_id, POINTER_FOLDER).items())]
    if not pointers:
        raise RamenError(
            f"run {chosen.name} ({chosen.run_id[:8]}): pushed no data; set {REMOTE_ENV} in its pods, or name the run "
            "that computed its cached steps"
        )
    folder = to or Path("adopted") / chosen.run_id[:8]
    for path, pointer in zip(adopt(pointers, folder), pointers, strict=True):
        click.echo(f"{path}  {pointer.files} files, {pointer.size:,} bytes, {pointer.remote}")
    click.echo(f"download the files: dvc pull -R {folder}", err=True)


@click.group(short_help="Send tracking writes that were kept during an outage.")
def tracking() -> None:
    """Handle tracking writes that runs kept on disk while the tracking store was unreachable.

    \b
    Example:
      ramen tracking push
    """


@tracking.command(short_help="Send the kept writes.")
@click.option(
    "--spool", type=PATH, metavar="DIR", help="Folder of the journals.  [default: RAMEN_SPOOL, .ramen/tracking]"
)
def push(spool: Path | None) -> None:
    """Send the kept writes to the store of MLFLOW_TRACKING_URI; call it again after an error, and it resumes.

    \b
    Example:
      ramen tracking push --spool /workspace/spool
    """
    from ramen.tracking import push_pending_writes

    sent, left = push_pending_writes(spool)
    if left:
        click.echo(f"sent {sent} writes, {left} are still kept: the store became unreachable again")
        raise SystemExit(1)
    click.echo(f"sent {sent} writes" if sent else "no writes are kept")
