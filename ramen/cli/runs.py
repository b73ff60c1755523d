"""Commands about whole pipeline runs: `ramen run` and `ramen compare`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options, require_config, show_progress
from ramen.cli.comparison import gain_rows
from ramen.errors import RamenError
from ramen.evaluation import comparison
from ramen.files import read_json

if TYPE_CHECKING:
    from ramen.config import Config
    from ramen.tracking import PipelineRun


@click.command(short_help="Run the whole pipeline and compare it with its base.")
@config_options
@click.option(
    "--out", type=PATH, default=Path("artifacts"), show_default=True, metavar="DIR", help="Folder for the artifacts."
)
@click.option(
    "--base/--no-base",
    "with_base",
    default=True,
    show_default=True,
    help="First train the same pipeline with graphs and oracle off, and compare with it.",
)
def run(resolve: Callable[..., Config], out: Path, with_base: bool) -> None:
    """Run all stages on Kubeflow's local runner; finished stages come from its cache.

    The artifacts are written to DIR/ramen, and those of the base run (the same training without graphs and oracle) to
    DIR/base. The base run is not registered.

    \b
    Examples:
      ramen run --preset demo
      ramen run --preset debian --set training.epochs=20 --no-base
      ramen run --preset xc --set data.path=DIR --out DIR2
    """
    from pipelines.local import check_run, run_with_base

    require_config()
    config = resolve()
    check_run(config, out, with_base=with_base)
    show_progress()
    artifacts, base = run_with_base(
        config, out, with_base=with_base, announce=lambda line: click.echo(f"\n{line}", err=True)
    )
    _show_results(artifacts, base, config)


def _show_results(artifacts: Mapping[str, Path], base: Mapping[str, Path] | None, config: Config) -> None:
    """Print the table of metrics, where the results are, and commands to run next."""
    from ramen.publishing.registry import tracking_uri

    click.echo("Test documents, in per cent; head, torso and tail add up to the overall figure.\n")
    tables.print_evaluation(
        _read_metrics(artifacts["evaluation"]), None if base is None else _read_metrics(base["evaluation"])
    )
    click.echo(f"report:     {artifacts['evaluation'] / 'report.html'}")
    click.echo(f"published:  {_registered_version(artifacts['retriever'])}")
    if config.index.model:
        click.echo(f"query it:   {_example_query(artifacts['dataset'], config)}")
    uri = tracking_uri()
    ui = f": mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else ""
    click.echo(f"compare:    ramen compare, or the MLflow UI{ui}")


def _read_metrics(evaluation: Path) -> dict[str, float]:
    metrics = read_json(evaluation / "metrics.json", dict[str, float | None])
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def _registered_version(retriever: Path) -> str:
    """Return the registered version and its alias, as the receipt records them."""
    entry = read_json(retriever / "receipt.json", dict[str, Any])["registered"]
    if entry is None:
        return f"{retriever}, not registered (index.model is empty)"
    version = f"{entry['name']} version {entry['version']}"
    if entry["refused"]:
        return f"{version}; the alias did not move: {entry['refused']}"
    alias = f", alias {entry['alias']}" if entry["alias"] else ""
    return version + alias + (f" ({entry['note']})" if alias and entry.get("note") else "")


def _example_query(dataset: Path, config: Config) -> str:
    """Return a `ramen query` command with the text of a test document."""
    from ramen.data.dataset import Texts

    texts = [text for text in Texts.read(dataset / "texts" / "test.parquet").texts if text.strip()]
    words = ["ramen", "query", texts[0] if texts else "...", "-k", "5"]
    if config.index.model != "ramen":
        words += ["--model", config.index.model]
    if config.index.alias != "champion":
        words += ["--version", config.index.alias or "1"]
    return shlex.join(words)


@click.command(short_help="Compare runs: metrics, gains and parameters.")
@click.argument("runs", nargs=-1)
@click.option(
    "--last", type=click.IntRange(min=1), default=10, show_default=True, help="Number of newest runs, without RUNS."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of runs with all metrics and parameters.")
def compare(runs: tuple[str, ...], last: int, as_json: bool) -> None:
    """Print pipeline runs from MLflow; RUNS are names or beginnings of ids.

    With several RUNS, each of them is compared with the first (the newest run of that name): the gain, its paired
    standard error clustered by the groups of the test documents, and the parameters that differ. Otherwise the newest
    run is compared with the previous one. Gains below two standard errors are grey. No gain is printed for runs that
    were evaluated on different datasets.

    \b
    Examples:
      ramen compare
      ramen compare base ramen
      ramen compare 1f0c 88ab --json
    """
    from ramen.tracking import list_pipeline_runs

    found = list_pipeline_runs()
    if not found:
        raise RamenError("MLflow has no pipeline runs; start one with `ramen run`")
    chosen = select_runs(found, runs) if runs else found[:last]
    pairs = comparison.select_pairs(chosen, len(select_runs(found, runs[:1])) if runs else len(chosen))
    comparisons = comparison.compare_runs(pairs) if pairs else []
    if as_json:
        gains = {each.run: dataclasses.asdict(each) for each in comparisons}
        click.echo(
            json.dumps(
                [{**dataclasses.asdict(run), "gain": gains.get(run.run_id)} for run in chosen], indent=1, sort_keys=True
            )
        )
        return
    rows = [
        [_name(run), run.run_id[:8], _start_time(run), _dataset_name(run), *tables.format_metrics(run.metrics)]
        for run in chosen
    ]
    gains_table = gain_rows(comparisons)
    columns = ["run", "id", "started", "data", *tables.COLUMNS]
    tables.print_table([*rows, *gains_table], columns, text_columns=4, ends=len(rows))
    if any(each.errors for each in comparisons):
        click.echo(f"{tables.ERROR_NOTE}\n")
    if len(runs) > 1 or gains_table:  # without RUNS, print nothing about runs that cannot be compared
        notes = [each.note for each in comparisons if each.note]
        for note in notes if pairs else ["no gain: fewer than two of these runs were evaluated"]:
            click.echo(f"{note}\n")
        _show_parameters(chosen if len(runs) > 1 else [each for pair in pairs for each in reversed(pair)])


def _show_parameters(compared: Sequence[PipelineRun]) -> None:
    """Print the parameters that differ between runs."""
    from rich.markup import escape

    differing = [[escape(cell) for cell in row] for row in comparison.differing_parameters(compared)]
    if len(compared) < 2 or not differing:
        click.echo("No parameter differs.")
        return
    columns = ["parameter", *(escape(comparison.run_label(run)) for run in compared)]
    click.echo("Parameters that differ:\n")
    tables.print_table(differing, columns, text_columns=len(columns), ends=len(differing), wrap=True)


def select_runs(found: Sequence[PipelineRun], wanted: Sequence[str]) -> list[PipelineRun]:
    """Return the runs with these names or beginnings of ids: in the order of `wanted`, then newest first.

    Raises:
        RamenError: a name or id matches no run.
    """
    chosen: dict[str, PipelineRun] = {}
    for text in wanted:
        matching = {run.run_id: run for run in found if run.name == text or run.run_id.startswith(text)}
        if not matching:
            names = ", ".join(sorted({run.name for run in found})) or "none; start one with `ramen run`"
            raise RamenError(f"MLflow has no pipeline run {text!r}; the runs are: {names}")
        chosen |= {run_id: run for run_id, run in matching.items() if run_id not in chosen}
    return list(chosen.values())


def _dataset_name(run: PipelineRun) -> str:
    """Return the name of the raw data and the limit on documents: metrics compare only where both are equal."""
    name = re.sub(r"(\.jsonl?)?(\.gz|\.xz)?$", "", Path(run.params.get("data.path", "")).name)
    limit = run.params.get("data.max_documents", "0")
    return name if limit == "0" else f"{name} {int(limit):,}"


def _name(run: PipelineRun) -> str:
    """Return the name of a run, with its status unless it finished."""
    return run.name if run.status == "FINISHED" else f"{run.name}, {run.status.lower()}"


def _start_time(run: PipelineRun) -> str:
    """Return the local start time, without the year so that a row fits into 100 columns."""
    return datetime.fromtimestamp(run.started / 1000).strftime("%m-%d %H:%M")
