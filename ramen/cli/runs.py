"""Commands about whole pipeline runs: run one, and set them side by side."""

from __future__ import annotations

import dataclasses
import json
import math
import os
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
from ramen.stages import STAGES, preflight

if TYPE_CHECKING:
    from ramen.config import Config
    from ramen.tracking import PipelineRun

OURS, BASE = "ramen", "base"
"""The two arms of a run: with graphs or an oracle, and without. Folders under `--out`, and names of the MLflow runs."""


@click.command(short_help="Run the whole pipeline, beside its base.")
@config_options
@click.option(
    "--out", type=PATH, default=Path("artifacts"), show_default=True, metavar="DIR", help="Where the artifacts go."
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

    The artifacts are in DIR/ramen, those of the base (no graphs, no oracle, otherwise the same) in DIR/base; the
    base is not registered.

    \b
    Examples:
      ramen run --preset demo
      ramen run --preset debian --set training.epochs=20 --no-base
      ramen run --preset xc --set data.path=DIR --out DIR2
    """
    from pipelines.local import check_links
    from ramen.data import sources

    require_config()
    settings = resolve()
    preflight(STAGES, dict(settings), (out / arm for arm in (BASE, OURS)))
    for arm in (BASE, OURS) if with_base else (OURS,):
        check_links(out, arm)
    show_progress()
    sources.fetch_if_missing(settings.data)
    base: Mapping[str, Path] | None = None
    helped = bool(_helps(settings))
    if with_base and helped:
        base = _run_arm(BASE, base_of(settings), out)
        settings = beside(settings, base["evaluation"])
    made = _run_arm(OURS if helped else BASE, settings, out)
    _close(made, base, settings)


def base_of(settings: Config) -> Config:
    """The same configuration without anything of the graphs in training, unregistered; the other arm has the peers."""
    return settings.model_copy(
        update={
            "objective": settings.objective.model_copy(update={"graphs": False, "augment_labels": False}),
            "guidance": settings.guidance.model_copy(update={"enabled": False}),
            "scoring": settings.scoring.model_copy(update={"peers": []}),
            "index": settings.index.model_copy(update={"model": ""}),
        }
    )


def _helps(settings: Config) -> list[str]:
    """What of the graphs training gets, in words; nothing of a base."""
    objective = settings.objective
    helps = {
        "graphs": objective.graphs,
        "edges taken for truth": objective.augment_labels,
        "an oracle": settings.guidance.enabled,
    }
    return [name for name, on in helps.items() if on]


def beside(settings: Config, evaluation: Path) -> Config:
    """The same configuration with the base's evaluation set beside its own.

    The folder itself is named, not the link to it: another evaluation is then another value, which the cache sees.
    """
    place = os.path.relpath(evaluation.resolve())
    return settings.model_copy(update={"scoring": settings.scoring.model_copy(update={"base": place})})


def _run_arm(arm: str, settings: Config, out: Path) -> dict[str, Path]:
    """Run the pipeline once, under an MLflow run of its own."""
    from pipelines.local import run_local
    from ramen.config import to_yaml
    from ramen.tracking import start_pipeline_run

    told = _helps(settings)
    click.echo(f"\n{arm}: with {' and '.join(told)}" if told else f"\n{arm}: without graphs", err=True)
    with start_pipeline_run(arm, to_yaml(settings), {"ramen.arm": arm}, settings.sections()):
        return run_local(settings, out, arm=arm)


def _close(made: Mapping[str, Path], base: Mapping[str, Path] | None, settings: Config) -> None:
    """Print the closing table, and where to go from here."""
    from ramen.publishing.registry import tracking_uri

    _table(_metrics(made["evaluation"]), None if base is None else _metrics(base["evaluation"]))
    click.echo(f"report:     {made['evaluation'] / 'report.html'}")
    click.echo(f"published:  {_published(made['retriever'])}")
    if settings.index.model:
        click.echo(f"ask it:     {_example(made['dataset'], settings)}")
    uri = tracking_uri()
    ui = f": mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else ""
    click.echo(f"compare:    ramen compare, or the MLflow UI{ui}")


def _table(ours: Mapping[str, float], base: Mapping[str, float] | None) -> None:
    click.echo("Test documents, in per cent; head, torso and tail add up to the overall figure.\n")
    tables.print_evaluation(ours, base)


def _metrics(evaluation: Path) -> dict[str, float]:
    found = read_json(evaluation / "metrics.json", dict[str, float | None])
    return {key: math.nan if value is None else value for key, value in found.items()}


def _published(retriever: Path) -> str:
    """What the receipt says about the registered version."""
    entry = read_json(retriever / "receipt.json", dict[str, Any])["registered"]
    if entry is None:
        return f"{retriever}, not registered (index.model is empty)"
    version = f"{entry['name']} version {entry['version']}"
    if entry["refused"]:
        return f"{version}; the alias stays where it was: {entry['refused']}"
    alias = f", alias {entry['alias']}" if entry["alias"] else ""
    return version + alias + (f" ({entry['note']})" if alias and entry.get("note") else "")


def _example(dataset: Path, settings: Config) -> str:
    """A query that works: the text of a test document."""
    from ramen.data.dataset import Texts

    texts = [text for text in Texts.read(dataset / "texts" / "test.parquet").texts if text.strip()]
    words = ["ramen", "query", texts[0] if texts else "...", "-k", "5"]
    if settings.index.model != "ramen":
        words += ["--model", settings.index.model]
    if settings.index.alias != "champion":
        words += ["--version", settings.index.alias or "1"]
    return shlex.join(words)


@click.command(short_help="Set runs side by side.")
@click.argument("runs", nargs=-1)
@click.option(
    "--last", type=click.IntRange(min=1), default=10, show_default=True, help="Newest runs, if none is named."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of runs with all metrics and parameters.")
def compare(runs: tuple[str, ...], last: int, as_json: bool) -> None:
    """Print pipeline runs from MLflow; RUNS are names or beginnings of ids.

    With several RUNS, each further run is compared with the first (the newest of that name): the gain, its paired
    standard error clustered by the groups of the test documents, and the parameters that differ. Otherwise the newest
    run is compared with the one before it. Gains below two standard errors are grey; runs evaluated on different
    datasets have none.

    \b
    Examples:
      ramen compare
      ramen compare base ramen
      ramen compare 1f0c 88ab --json
    """
    from ramen.tracking import list_pipeline_runs

    found = list_pipeline_runs()
    if not found:
        raise RamenError("no pipeline runs in MLflow yet: `ramen run` makes them")
    chosen = select(found, runs) if runs else found[:last]
    pairs = comparison.select_pairs(chosen, len(select(found, runs[:1])) if runs else len(chosen))
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
        [_name(run), run.run_id[:8], _when(run.started), _data(run), *tables.format_metrics(run.metrics)]
        for run in chosen
    ]
    gained = gain_rows(comparisons)
    columns = ["run", "id", "started", "data", *tables.COLUMNS]
    tables.print_table([*rows, *gained], columns, text_columns=4, ends=len(rows))
    if any(each.errors for each in comparisons):
        click.echo(f"{tables.ERROR_NOTE}\n")
    if len(runs) > 1 or gained:  # runs that were not named are compared only where they can be
        notes = [each.note for each in comparisons if each.note]
        for note in notes if pairs else ["no gain: fewer than two of these runs were evaluated"]:
            click.echo(f"{note}\n")
        _show_parameters(chosen if len(runs) > 1 else [each for pair in pairs for each in reversed(pair)])


def _show_parameters(compared: Sequence[PipelineRun]) -> None:
    """Print the parameters in which runs differ."""
    from rich.markup import escape

    differing = [[escape(cell) for cell in row] for row in comparison.differing_parameters(compared)]
    if len(compared) < 2 or not differing:
        click.echo("No parameter differs.")
        return
    columns = ["parameter", *(escape(comparison.run_label(run)) for run in compared)]
    click.echo("Parameters that differ:\n")
    tables.print_table(differing, columns, text_columns=len(columns), ends=len(differing), wrap=True)


def select(found: Sequence[PipelineRun], wanted: Sequence[str]) -> list[PipelineRun]:
    """The runs of these names or beginnings of ids, in the order given, newest first for each.

    Raises:
        RamenError: a name or id matches no run.
    """
    chosen: dict[str, PipelineRun] = {}
    for text in wanted:
        matching = {run.run_id: run for run in found if run.name == text or run.run_id.startswith(text)}
        if not matching:
            names = ", ".join(sorted({run.name for run in found})) or "none yet: `ramen run` makes them"
            raise RamenError(f"no pipeline run {text!r} in MLflow; there are: {names}")
        chosen |= {run_id: run for run_id, run in matching.items() if run_id not in chosen}
    return list(chosen.values())


def _data(run: PipelineRun) -> str:
    """The name of the raw data, and of how many documents of it: figures of other data are not to be compared."""
    name = re.sub(r"(\.jsonl?)?(\.gz|\.xz)?$", "", Path(run.params.get("data.path", "")).name)
    most = run.params.get("data.max_documents", "0")
    return name if most == "0" else f"{name} {int(most):,}"


def _name(run: PipelineRun) -> str:
    """The name of a run, with its status unless it finished."""
    return run.name if run.status == "FINISHED" else f"{run.name}, {run.status.lower()}"


def _when(started: int) -> str:
    """Local time; the year is left out so that a row fits into 100 columns."""
    return datetime.fromtimestamp(started / 1000).strftime("%m-%d %H:%M")
