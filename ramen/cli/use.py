"""Commands that use published versions: `query` and `serve`."""

from __future__ import annotations

from pathlib import Path

import click

from ramen.cli.common import PATH


@click.command(short_help="Query a published index with a text or a file of texts.")
@click.argument("text", required=False)
@click.option(
    "--input",
    "source",
    type=PATH,
    metavar="FILE",
    help="File of queries: .csv, .tsv, .jsonl or .parquet with columns text and optionally uid; else a text per line.",
)
@click.option(
    "--output",
    type=PATH,
    metavar="FILE",
    help="File for the answers; its suffix sets the format: .parquet, .csv, .tsv or .jsonl.",
)
@click.option("-k", type=click.IntRange(min=1), default=10, show_default=True, help="Labels per query.")
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
    """Print the best labels of a text with their cosine, or write those of a file of queries.

    \b
    Examples:
      ramen query "command line mail client" -k 5
      ramen query --input queries.csv --output answers.csv -k 100
      ramen query "command line mail client" --version 3 --json
    """
    from ramen.serving.query import answer, answer_file, format_json, format_table

    if (source is None) != (output is None) or (source is None) == (text is None):
        raise click.UsageError("give a TEXT, or --input and --output")
    if source is not None and output is not None:
        count = answer_file(source, output, k=k, model=model, version=version)
        click.echo(f"{output}: {count:,} queries answered")
        return
    if text is None or not text.strip():
        raise click.BadParameter("expected at least one word", param_hint="TEXT")
    hits = answer(text, k=k, model=model, version=version)
    click.echo(format_json(hits) if as_json else format_table(hits))


@click.command(short_help="Answer queries over HTTP; --ui adds a page to compare versions.")
@click.option("--ui", is_flag=True, help="Add a page that shows two versions side by side and explains their labels.")
@click.option(
    "--artifacts", type=PATH, metavar="DIR", help="Artifacts of a run (dataset, pruned_graph) that explain labels."
)
@click.option(
    "--version", default="champion", show_default=True, metavar="N|ALIAS", help="Default version of a request."
)
@click.option("--model", default="ramen", show_default=True, metavar="NAME", help="Registered model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 = any free port.",
)
def serve(ui: bool, artifacts: Path | None, version: str, model: str, host: str, port: int) -> None:
    """Serve registered versions for inspection; when an alias moves, the server follows within half a minute.

    For production use `mlflow models serve -m models:/ramen@champion --env-manager local`.

    \b
    Examples:
      ramen serve --ui --artifacts artifacts/ramen
      curl localhost:8000/api/query -H 'Content-Type: application/json' -d '{"text": "mail client", "k": 3}'
    """
    from ramen.serving.app import make_app
    from ramen.serving.explain import TrainingGraph
    from ramen.serving.server import bind
    from ramen.serving.server import serve as serve_app

    bound = bind(host, port)  # fails on a busy port before a version loads, which takes seconds
    app = make_app(model, version, ui=ui, graph=TrainingGraph(artifacts) if artifacts else None)
    serve_app(app, bound, lambda address: click.echo(f"{address}/{'' if ui else 'api/query'}"))
