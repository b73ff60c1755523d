"""Commands that use what was published."""

from __future__ import annotations

import click


@click.command(short_help="Ask the published index.")
@click.argument("text")
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Labels to answer with.")
@click.option(
    "--version",
    default="champion",
    show_default=True,
    metavar="N|ALIAS",
    help="Registered version, by number or alias.",
)
@click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of {uid, text, score}.")
def query(text: str, k: int, version: str, model: str, as_json: bool) -> None:
    """Print the best labels of a text, with their cosine.

    \b
    Examples:
      ramen query "command line mail client" -k 5
      ramen query "command line mail client" --version 3 --json
    """
    from ramen.index import query as asking

    hits = asking.answer(text, k=k, model=model, version=version)
    click.echo(asking.as_json(hits) if as_json else asking.as_table(hits))
