"""`ramen probe`: what the graphs say about the task, before anything is trained on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options, show_progress
from ramen.stages import check_lineage, default_path

if TYPE_CHECKING:
    from ramen.config import Config
    from ramen.evaluation.uncertainty import Gain
    from ramen.probe import ProbeResult

TITLES = {"p_at_1": "P@1", "psp_at_5": "PSP@5", "r_at_100": "R@100"}


@click.command(short_help="Ask the graphs what they say about the task.")
@config_options
@click.option("--dataset", type=PATH, default=default_path("dataset"), show_default=True, help="Artifact read.")
@click.option("--graph", type=PATH, default=default_path("graph"), show_default=True, help="Artifact read.")
@click.option("--model", type=PATH, metavar="DIR", help="A trained encoder.  [default: the one training starts from]")
@click.option("--test", "on_test", is_flag=True, help="Ask the test documents: to explain a result, never to choose.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(
    resolve: Callable[..., Config], dataset: Path, graph: Path, model: Path | None, on_test: bool, as_json: bool
) -> None:
    """Say, for every anchor set, whether it knows what the text does not.

    Pairs that share an anchor are counted among the true pairs and by chance, and among the labels the encoder missed
    and those it put first by mistake: where the last two are alike, the graph cannot tell where the text cannot. Then
    the neighbours' mean is added to the labels' vectors, to the documents' (an oracle: a new document's are not known),
    and to both; in brackets the paired standard error, clustered by group. Documents are those that training holds out.

    \b
    Examples:
      ramen ingest --preset xc --set data.path=DIR; ramen build-graph --preset xc; ramen probe --preset xc
      ramen probe --dataset artifacts/ramen/dataset --graph artifacts/ramen/graph --model artifacts/ramen/model
    """
    from ramen.artifacts import open_artifact
    from ramen.probe import probe as ask

    settings = resolve()
    show_progress()
    read = {"dataset": open_artifact(dataset, "dataset"), "graph": open_artifact(graph, "graph")}
    check_lineage(read)
    text, said = ask(**read, model=open_artifact(model, "model") if model else None, config=settings, on_test=on_test)
    if as_json:
        sets = {name: dataclasses.asdict(found) for name, found in said.items()}
        click.echo(json.dumps({"text": text, "sets": sets}, indent=1))
        return
    click.echo("text alone: " + ", ".join(f"{TITLES[key]} {value:.2f}" for key, value in text.items()))
    click.echo("\nPer cent with an anchor, and per cent of pairs that share one:\n")
    columns = [
        "set",
        "documents",
        "labels",
        "true pairs",
        "random pairs",
        "missed labels",
        "labels put first by mistake",
    ]
    tables.show([_shares(name, found) for name, found in said.items()], columns, text_columns=1, ends=len(said))
    click.echo(
        "Gain over the text alone with neighbours' means added, [paired standard error, clustered by group]; grey: "
        "below two standard errors:\n"
    )
    lines = [_gains(name, side, gains) for name, found in said.items() for side, gains in found.gains.items()]
    tables.show(lines, ["set", "added to", *TITLES.values()], text_columns=2, ends=max(len(lines), 1))


def _shares(name: str, found: ProbeResult) -> list[str]:
    values = (found.documents, found.labels, found.true, found.chance, found.missed, found.mistaken)
    return [name, *(f"{value:.1f}" for value in values)]


def _gains(name: str, side: str, gains: dict[str, Gain]) -> list[str]:
    return [name, side, *(_cell(gains[key]) if key in gains else "" for key in TITLES)]


def _cell(gain: Gain) -> str:
    error = "" if gain.error is None else f" [{gain.error:.2f}]"
    return tables.mark(f"{gain.points:+.2f}{error}", gain.points, gain.error)
