"""Commands about registered versions: list them, move the alias that serves, change a version's labels."""

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

SHOWN = {"P@1": "p_at_1", "PSP@5": "psp_at_5", "tail P@1": "tail/p_at_1"}
"""Column title -> tag."""


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options `--model` and `--alias`."""
    alias = click.option("--alias", default="champion", show_default=True, help="Alias that serving follows.")
    model = click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
    return model(alias(function))


@click.command(short_help="List the published versions.")
@click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with all that is recorded of each version.")
def registry(model: str, as_json: bool) -> None:
    """List the registered versions, newest first: aliases, metrics, size, provenance, and what the gate said.

    \b
    Examples:
      ramen registry
      ramen registry --json
    """
    from ramen.publishing.registry import versions

    found = versions(model)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=1, sort_keys=True))
        return
    rows = []
    for one in found:
        tags = one.tags
        rows.append(
            [
                str(one.number),
                ", ".join(one.aliases),
                datetime.fromtimestamp(one.created / 1000).strftime("%Y-%m-%d %H:%M"),
                f"{tags.get('index', '')} {_number(tags, 'labels', ',.0f') or '0'}",
                (tags.get("git") or "")[:8],
                tags.get("dataset", "")[:8] + ("+" if "+" in tags.get("dataset", "") else ""),
                _gate(tags),
                *(_number(tags, key, ".2f") for key in SHOWN.values()),
                _number(tags, "ann_recall", ".3f"),
                tags.get("query_ms", ""),
                _number(tags, "bytes", ",.1f", 1e6),
            ]
        )
    columns = ["version", "alias", "created", "index, labels", "git", "dataset", "gate", *SHOWN, "recall", "ms", "MB"]
    tables.show(rows, columns, text_columns=7, ends=len(rows) or 1)


def _number(tags: dict[str, str], key: str, form: str, unit: float = 1.0) -> str:
    """A tag's number as text; empty when the tag is missing or holds no number."""
    from ramen.publishing.registry import finite

    value = finite(tags.get(key))
    return "" if value is None else format(value / unit, form)


def _gate(tags: dict[str, str]) -> str:
    """What became of a version: passed, refused, withdrawn, or that it does not answer."""
    return "does not answer" if tags.get("smoke") != "passed" else tags.get("gate", "")


@click.command(short_help="Point the alias to another version, if the gate lets it.")
@click.argument("version", metavar="N|ALIAS")
@config_options
@model_options
@click.option("--force", is_flag=True, help="Move it whatever the gate says.")
def promote(version: str, resolve: Callable[..., Config], model: str, alias: str, force: bool) -> None:
    """Point the alias to a registered version; the gate (section index) compares it with the present holder.

    The decision and its numbers are recorded on the version. Exit code 5 when the gate refuses.

    \b
    Examples:
      ramen promote 7
      ramen promote 7 --set 'index.gate={"psp_at_5": 0.5, "tail/p_at_1": 0}'
      ramen promote 3 --force
    """
    from ramen.publishing.gate import promote as move

    settings = None if force else resolve().index
    try:
        now, before = move(model, alias, version, settings)
    except GateRefused as error:
        raise GateRefused(f"{error}; {alias} stays (--force moves it)") from None
    said = " already" if before == now else f", was {before}" if before else ""
    click.echo(f"{model}: {alias} is version {now}{said}")


@click.command(short_help="Point the alias back to the version before.")
@model_options
def rollback(model: str, alias: str) -> None:
    """Point the alias back to the version that held it before; no later run hands it forward by itself.

    \b
    Example:
      ramen rollback
    """
    from ramen.publishing.gate import rollback as back

    left, taken = back(model, alias)
    click.echo(f"{model}: {alias} is version {taken}, was {left}")


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
    """Publish a version with other labels: nothing is trained, new labels are encoded and added.

    The new version takes the alias if it answers and passes the gate (ANN recall and latency; figures of other
    labels are not compared). A label that is there already gets its new text.

    \b
    Examples:
      ramen index-update --add new.jsonl
      ramen index-update --remove gone.txt --version 3 --set index.min_recall=0.95
    """
    if add is None and remove is None:
        raise ConfigError("give --add FILE, --remove FILE or both")
    from ramen.publishing.update import publish_update, read_changes

    settings = resolve(f"index.model={model}", f"index.alias={alias}").index
    published = publish_update(version, read_changes(add, remove), settings)
    held = f"{alias} stays where it was: {published.refused}" if published.refused else f"alias {published.alias}"
    click.echo(f"{published.name} version {published.version}; {held}")
