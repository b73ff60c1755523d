"""Commands for registered versions: `registry`, `promote`, `rollback`, `index-update`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options
from ramen.errors import ConfigError, GateRefused

if TYPE_CHECKING:
    from ramen.config import Config

METRIC_COLUMNS = {"P@1": "p_at_1", "PSP@5": "psp_at_5", "tail P@1": "tail/p_at_1"}
"""Column title -> version tag."""


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options `--model` and `--alias`."""
    alias = click.option("--alias", default="champion", show_default=True, help="Alias that serving follows.")
    model = click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
    return model(alias(function))


@click.command(short_help="List the published versions.")
@click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with all tags of each version.")
def registry(model: str, as_json: bool) -> None:
    """List the registered versions, newest first: aliases, provenance, gate decision, metrics, latency and size.

    \b
    Examples:
      ramen registry
      ramen registry --json
    """
    from ramen.publishing.registry import list_versions

    listed = list_versions(model)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(version) for version in listed], indent=1, sort_keys=True))
        return
    rows = []
    for version in listed:
        tags = version.tags
        dataset = tags.get("dataset", "")
        rows.append(
            [
                str(version.number),
                ", ".join(version.aliases),
                datetime.fromtimestamp(version.created / 1000).strftime("%Y-%m-%d %H:%M"),
                f"{tags.get('index', '')} {_format_number(tags, 'labels', ',.0f') or '0'}",
                (tags.get("git") or "")[:8],
                dataset[:8] + ("+" if "+" in dataset else ""),  # + = with changed labels
                _gate_status(tags),
                *(_format_number(tags, key, ".2f") for key in METRIC_COLUMNS.values()),
                _format_number(tags, "ann_recall", ".3f"),
                tags.get("query_ms", ""),
                _format_number(tags, "bytes", ",.1f", 1e6),
            ]
        )
    columns = ["version", "alias", "created", "index, labels", "git", "dataset", "gate"]
    columns += [*METRIC_COLUMNS, "recall", "ms", "MB"]
    tables.print_table(rows, columns, text_columns=7, ends=len(rows) or 1)


def _format_number(tags: dict[str, str], key: str, form: str, unit: float = 1.0) -> str:
    """Return a tag's number as text, empty if the tag is missing or not a number."""
    from ramen.publishing.registry import finite_number

    value = finite_number(tags.get(key))
    return "" if value is None else format(value / unit, form)


def _gate_status(tags: dict[str, str]) -> str:
    return "does not answer" if tags.get("smoke") != "passed" else tags.get("gate", "")


@click.command(short_help="Point the alias to another version, if it passes the gate.")
@click.argument("version", metavar="N|ALIAS")
@config_options
@model_options
@click.option("--force", is_flag=True, help="Move the alias without the gate.")
def promote(version: str, resolve: Callable[..., Config], model: str, alias: str, force: bool) -> None:
    """Point the alias to a registered version, if it passes the gate (config section index).

    The gate compares the version with the current champion, the version that the alias points to now, and stores its
    decision in the version's tags. Exit code 5 if the gate refuses the version.

    \b
    Examples:
      ramen promote 7
      ramen promote 7 --set 'index.gate={"psp_at_5": 0.5, "tail/p_at_1": 0}'
      ramen promote 3 --force
    """
    from ramen.publishing import gate

    settings = None if force else resolve().index
    try:
        now, before = gate.promote(model, alias, version, settings)
    except GateRefused as error:
        raise GateRefused(f"{error}; {alias} has not moved (--force moves it)") from None
    change = " already" if before == now else f", was {before}" if before else ""
    click.echo(f"{model}: {alias} is version {now}{change}")


@click.command(short_help="Point the alias back to the previous version.")
@model_options
def rollback(model: str, alias: str) -> None:
    """Point the alias back to the previous champion; later runs do not promote the withdrawn version again.

    \b
    Example:
      ramen rollback
    """
    from ramen.publishing import gate

    withdrawn, current = gate.rollback(model, alias)
    click.echo(f"{model}: {alias} is version {current}, was {withdrawn}")


@click.command("index-update", short_help="Add and remove labels of a published version.")
@config_options
@click.option("--add", type=PATH, metavar="FILE", help="Labels to add: uid and text in .jsonl, .csv, .tsv or .parquet.")
@click.option("--remove", type=PATH, metavar="FILE", help="Labels to remove: a uid per line.")
@click.option("--version", default="champion", show_default=True, metavar="N|ALIAS", help="Version to start from.")
@model_options
def index_update(
    resolve: Callable[..., Config],
    add: Path | None,
    remove: Path | None,
    version: str,
    model: str,
    alias: str,
) -> None:
    """Publish a version with changed labels, without training: new labels are encoded and added to the index.

    The new version is promoted if it passes its smoke test and the gate on ANN recall, latency, and the evaluation of
    the version it was made from. Adding an existing label replaces its text.

    \b
    Examples:
      ramen index-update --add new.jsonl
      ramen index-update --remove gone.txt --version 3 --set index.min_recall=0.95
    """
    if add is None and remove is None:
        raise ConfigError("index-update: no labels to change; give --add FILE, --remove FILE or both")
    from ramen.publishing.update import publish_update, read_changes

    settings = resolve(f"index.model={model}", f"index.alias={alias}").index
    published = publish_update(version, read_changes(add, remove), settings)
    result = f"{alias} has not moved: {published.refused}" if published.refused else f"alias {published.alias}"
    click.echo(f"{published.name} version {published.version}; {result}")
