"""Commands for the project's files: data snapshot, parameter files, compiled pipeline, generated files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ramen.cli.common import FILE, PATH, config_options, image_name, show_progress
from ramen.errors import printable

if TYPE_CHECKING:
    from ramen.config import Config


@click.command(short_help="Write the Debian package snapshot that the demo trains on.")
@config_options
@click.option("--packages", type=FILE, metavar="FILE", help="Read this Packages file instead of calling apt.")
def fetch(resolve: Callable[..., Config], packages: Path | None) -> None:
    """Write the snapshot of the Debian package metadata to data.path.

    \b
    Examples:
      ramen fetch
      ramen fetch --packages /path/to/Packages.gz
    """
    from ramen.data.sources import packages as snapshot

    show_progress()
    path = Path(resolve("data.source=debian").data.path)
    snapshot.fetch(path, packages=packages)
    click.echo(path)


@click.command(short_help="Delete files that no finished or resumable run needs.")
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@click.option(
    "--out", type=PATH, default=Path("artifacts"), show_default=True, metavar="DIR", help="--out of `ramen run`."
)
@click.option(
    "--studies", type=PATH, default=Path("ablations"), show_default=True, metavar="DIR", help="--out of `ramen ablate`."
)
@click.option(
    "--unfinished",
    is_flag=True,
    help="Also delete results of runs that did not finish, unless they can resume from a checkpoint.",
)
def gc(dry_run: bool, out: Path, studies: Path, unfinished: bool) -> None:
    """Delete results that later runs replaced, training state that no stage needs, and drafts of killed processes.

    It keeps the results that the links in DIR point to, checkpoints with all that they need, and the registry. Run it
    in the directory in which you run ramen. `dvc gc` cleans the files of DVC.

    \b
    Examples:
      ramen gc --dry-run
      ramen gc
    """
    from pipelines.local import STORE
    from ramen.cleanup import delete_removals, find_unneeded

    runs = out / STORE
    found = find_unneeded(out, runs, studies, unfinished=unfinished)
    for each in found:
        click.echo(printable(f"{each.bytes:>15,}  {each.path}: {each.reason}"))
    if not dry_run:
        delete_removals(found, runs)
    total = sum(each.bytes for each in found)
    click.echo(f"{total:>15,}  bytes {'would be deleted' if dry_run else 'deleted'}")


@click.command(short_help="Print or write a parameter file with comments.")
@config_options
@click.option("--all", "all_knobs", is_flag=True, help="Write every knob, as DVC needs it in params.yaml.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write here instead of standard output.")
def config(resolve: Callable[..., Config], all_knobs: bool, output: Path | None) -> None:
    """Print knobs with their values, ranges and descriptions, as a parameter file.

    These are the knobs that are changed most often and those that differ from their default; --all prints every knob.

    \b
    Examples:
      ramen config --preset demo -o params.yaml
      ramen config --all --set training.epochs=5
    """
    from ramen.config import to_yaml
    from ramen.files import write_text

    text = to_yaml(resolve(), all_knobs=all_knobs)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
        click.echo(output)


@click.command(short_help="Compile the pipeline for Kubeflow.")
@click.option(
    "-o", "--output", type=FILE, default=Path("pipelines/ramen.yaml"), show_default=True, help="The compiled pipeline."
)
@click.option("--image", callback=image_name, metavar="IMAGE", help="Image of all steps; an immutable tag or digest.")
@config_options
def compile(output: Path, image: str | None, resolve: Callable[..., Config]) -> None:
    """Compile the pipeline to a file for `kfp run submit -e ramen -f FILE`.

    The configuration sets the defaults of the pipeline's parameters.

    \b
    Example:
      ramen compile --preset debian --image registry.example/ramen@sha256:... -o ramen.yaml
    """
    from pipelines.compile import compile_pipeline

    compile_pipeline(output, resolve(), image)
    click.echo(output)


@click.command(short_help="Update generated files: dvc.yaml, compiled pipeline, READMEs, reference pages.")
@click.option("--check", is_flag=True, help="Change nothing; list outdated files, and exit with 1 if there are any.")
def sync(check: bool) -> None:
    """Update the files that are generated from the stage table, the configuration and the command line.

    These are dvc.yaml, pipelines/ramen.yaml, components/*/README.md, docs/config.md, docs/cli.md, and the comments in
    params.yaml (its values are kept).

    \b
    Example:
      ramen sync --check
    """
    from ramen.cli.sync import ROOT, generated_files, outdated_files

    files = generated_files()
    changed = outdated_files(files)
    for path in changed:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        click.echo(f"{'outdated' if check else 'wrote'}: {path.relative_to(ROOT)}")
    if check and changed:
        click.echo("error: generated files are outdated; run `ramen sync` and commit them", err=True)
        raise SystemExit(1)
