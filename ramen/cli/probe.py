"""`ramen probe`: estimate the information in the graphs before training."""

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
SHARES = {
    "documents": "documents",
    "labels": "labels",
    "true": "true pairs",
    "chance": "random pairs",
    "missed": "missed labels",
    "mistaken": "wrong first labels",
}
"""Field of `ProbeResult` -> column."""


@click.command(short_help="Estimate what the graphs add, before training.")
@config_options
@click.option("--dataset", type=PATH, default=default_path("dataset"), show_default=True, help="Artifact to read.")
@click.option("--graph", type=PATH, default=default_path("graph"), show_default=True, help="Artifact to read.")
@click.option(
    "--model", type=PATH, metavar="DIR", help="A trained encoder.  [default: the encoder from which training starts]"
)
@click.option("--test", "on_test", is_flag=True, help="Probe the test documents, only to explain a result.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(
    resolve: Callable[..., Config], dataset: Path, graph: Path, model: Path | None, on_test: bool, as_json: bool
) -> None:
    """Estimate for every anchor set whether it has information that the texts lack.

    The first table gives the share of pairs with a common anchor: among true pairs and random pairs, and, for documents
    whose first label is wrong, among the relevant labels and the wrong label. If the last two are similar, the graph
    cannot correct the encoder's mistakes. The second table gives the gain from adding the mean of the neighbours'
    vectors to the label vectors, to the document vectors (an oracle: new documents have no known anchors), or to both,
    with the paired standard error clustered by group. The documents are those that training holds out.

    \b
    Examples:
      ramen ingest --preset xc --set data.path=DIR; ramen build-graph --preset xc; ramen probe --preset xc
      ramen probe --dataset artifacts/ramen/dataset --graph artifacts/ramen/graph --model artifacts/ramen/model
    """
    from ramen.artifacts import open_artifact
    from ramen.probe import probe

    settings = resolve()
    show_progress()
    artifacts = {"dataset": open_artifact(dataset, "dataset"), "graph": open_artifact(graph, "graph")}
    check_lineage(artifacts)
    trained = open_artifact(model, "model") if model else None
    text_only, results = probe(**artifacts, model=trained, config=settings, on_test=on_test)
    if as_json:
        sets = {name: dataclasses.asdict(result) for name, result in results.items()}
        click.echo(json.dumps({"text": text_only, "sets": sets}, indent=1))
        return
    click.echo("encoder only: " + ", ".join(f"{TITLES[key]} {value:.2f}" for key, value in text_only.items()))
    click.echo("\nPer cent with an anchor, and per cent of pairs with a common anchor:\n")
    shares = [_share_row(name, result) for name, result in results.items()]
    tables.print_table(shares, ["set", *SHARES.values()], text_columns=1, ends=len(results))
    click.echo(
        "Gain over the encoder only from adding the neighbours' means, [paired standard error, clustered by group]; "
        "grey: below two standard errors:\n"
    )
    gains = [_gain_row(name, side, gains) for name, result in results.items() for side, gains in result.gains.items()]
    tables.print_table(gains, ["set", "added to", *TITLES.values()], text_columns=2, ends=max(len(gains), 1))


def _share_row(name: str, result: ProbeResult) -> list[str]:
    return [name, *(f"{getattr(result, field):.1f}" for field in SHARES)]


def _gain_row(name: str, side: str, gains: dict[str, Gain]) -> list[str]:
    return [name, side, *(_gain_cell(gains[key]) if key in gains else "" for key in TITLES)]


def _gain_cell(gain: Gain) -> str:
    error = "" if gain.error is None else f" [{gain.error:.2f}]"
    return tables.mark(f"{gain.points:+.2f}{error}", gain.points, gain.error)
