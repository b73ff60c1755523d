"""Commands that use what was published."""

from __future__ import annotations

from pathlib import Path

import click

from ramen.cli.common import PATH


@click.command(short_help="Ask the published index, one query or a file of them.")
@click.argument("text", required=False)
@click.option(
    "--input",
    "source",
    type=PATH,
    metavar="FILE",
    help="Queries: .csv, .tsv, .jsonl or .parquet with the columns text and, optionally, uid; else a text per line.",
)
@click.option(
    "--output",
    type=PATH,
    metavar="FILE",
    help="Where their answers go, by suffix: .parquet, .csv, .tsv or .jsonl.",
)
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
def query(
    text: str | None, source: Path | None, output: Path | None, k: int, version: str, model: str, as_json: bool
) -> None:
    """Print the best labels of a text, with their cosine; or write those of a file of queries.

    \b
    Examples:
      ramen query "command line mail client" -k 5
      ramen query --input queries.csv --output answers.csv -k 100
      ramen query "command line mail client" --version 3 --json
    """
    from ramen.serving import query as asking

    if (source is None) != (output is None) or (source is None) == (text is None):
        raise click.UsageError("give a TEXT, or --input and --output")
    if source is not None and output is not None:
        count = asking.answer_file(source, output, k=k, model=model, version=version)
        click.echo(f"{output}: {count:,} queries answered")
        return
    if text is None or not text.strip():
        raise click.BadParameter("a query has at least one word", param_hint="TEXT")
    hits = asking.answer(text, k=k, model=model, version=version)
    click.echo(asking.as_json(hits) if as_json else asking.as_table(hits))


@click.command(short_help="Answer queries over HTTP; with --ui, a page to compare versions.")
@click.option("--ui", is_flag=True, help="Serve a page too: two versions side by side, with what explains a label.")
@click.option(
    "--artifacts", type=PATH, metavar="DIR", help="A run's artifacts (dataset, pruned_graph), to explain labels."
)
@click.option(
    "--version", default="champion", show_default=True, metavar="N|ALIAS", help="That answers if none is named."
)
@click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 = any free one.")
def serve(ui: bool, artifacts: Path | None, version: str, model: str, host: str, port: int) -> None:
    """Serve registered versions for people to look at; an alias that moves is followed within half a minute.

    Programs are better served by `mlflow models serve -m models:/ramen@champion --env-manager local`.

    \b
    Examples:
      ramen serve --ui --artifacts artifacts/ramen
      curl localhost:8000/api/query -H 'Content-Type: application/json' -d '{"text": "mail client", "k": 3}'
    """
    from ramen.serving.app import make_app
    from ramen.serving.explain import TrainingGraph
    from ramen.serving.server import bind
    from ramen.serving.server import serve as serve_app

    listening = bind(host, port)  # before a version is loaded, which takes seconds
    app = make_app(model, version, ui=ui, graph=TrainingGraph(artifacts) if artifacts else None)
    serve_app(app, listening, lambda address: click.echo(f"{address}/{'' if ui else 'api/query'}"))
