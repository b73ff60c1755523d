"""`ramen ablate`: run a study and print its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options, require_config, show_progress
from ramen.console import warn
from ramen.errors import ConfigError

if TYPE_CHECKING:
    from ramen.ablation.study import Row, Study
    from ramen.ablation.summary import Summary
    from ramen.config import Config


@click.command(short_help="Run a study: train and evaluate its rows over seeds.")
@config_options
@click.option("--study", default="design", show_default=True, metavar="NAME", help="Name of a study, or a YAML file.")
@click.option("--rows", metavar="A,B", help="Run only these rows, and the rows they need.")
@click.option("--seeds", default="0,1,2", show_default=True, metavar="N,N", help="Seeds of training.")
@click.option(
    "--out", type=PATH, default=Path("ablations"), show_default=True, metavar="DIR", help="Folder for the results."
)
def ablate(resolve: Callable[..., Config], study: str, rows: str | None, seeds: str, out: Path) -> None:
    """Train and evaluate every row of a study under every seed, and compare the rows.

    DIR/cache keeps the results of stages by content: rows share results, and an interrupted study resumes where it
    stopped. Writes DIR/STUDY.md (with the papers' results for the same data set), .json and .png. Each row and seed is
    a run of the MLflow experiment "ramen-ablate".

    \b
    Studies: bases, design, graphs, mogic, peers, volume, zero-shot.
    Examples:
      ramen ablate --preset demo --study design --seeds 0
      ramen ablate --preset debian --study bases --rows "RAMEN(ance)"
      ramen ablate --study my-study.yaml --seeds 0,1,2,3,4
    """
    from ramen.ablation.report import check_report_files, report_files, write_report
    from ramen.ablation.run import EXPERIMENT, check_rows, prepare_dataset, run_study
    from ramen.ablation.study import read_study
    from ramen.data import sources
    from ramen.data.dataset import anchor_set_names
    from ramen.tracking import environment_defaults

    def config_of(row: Row) -> Config:
        try:
            return resolve(*row.sets)
        except ConfigError as error:
            raise ConfigError(f"study {study}: row {row.name!r}: {error}") from None

    def check(chosen: Study) -> None:
        check_report_files(chosen, out)
        for seed in seed_numbers:
            resolve(f"training.seed={seed}")
        check_rows(chosen, config_of, out / "cache")

    require_config()
    seed_numbers = _parse_seeds(seeds)
    settings = resolve()
    known = read_study(study)  # checked before data are fetched; rows of anchor sets are known only with the data
    check(known if known.per_set else known.select(rows))
    show_progress()
    sources.fetch_if_missing(settings.data)
    cache = out / "cache"
    with environment_defaults({"MLFLOW_EXPERIMENT_NAME": EXPERIMENT}):
        chosen = read_study(study, anchor_set_names(prepare_dataset(settings, cache))).select(rows)
        chosen, repeats = chosen.without_repeats(config_of)
        for name, repeated in repeats.items():
            warn(f"{chosen.name}: row {name!r} is left out: its configuration equals that of row {repeated!r}")
        chosen = chosen.without_unavailable_peers()
        check(chosen)
        runs = run_study(
            chosen,
            seed_numbers,
            lambda row, seed: resolve(*row.sets, f"training.seed={seed}"),
            cache,
            lambda line: click.echo(f"\n{line}", err=True),
        )
        for count, outcomes in enumerate(runs, 1):
            summaries = write_report(chosen, seed_numbers[:count], outcomes, Path(settings.data.path).name, out)
    _print_tables(chosen, summaries)
    files = report_files(chosen, out)
    click.echo(f"table: {files['md']}   figure: {files['png']}")


def _parse_seeds(seeds: str) -> list[int]:
    try:
        numbers = {int(text) for text in seeds.split(",")}
    except ValueError:
        numbers = {-1}
    if min(numbers) < 0 or not seeds.isascii():
        raise ConfigError(f"--seeds {seeds}: expected whole numbers of at least 0, such as 0,1,2")
    return sorted(numbers)


def _print_tables(study: Study, summaries: Mapping[str, Summary]) -> None:
    """Print the overall metrics of each row, and the gains, grey below two standard errors."""
    from ramen.ablation.report import COLUMNS, ERROR_TITLE, GAINS_TITLE, format_gain, gain_rows, has_errors, mean_rows

    def marked_gain(summary: Summary, key: str) -> str:
        return tables.mark(format_gain(summary, key), summary.gain.get(key), summary.gain_error.get(key))

    overall = {name: key for name, key in COLUMNS.items() if "/" not in key}
    rows = mean_rows(study, summaries, overall.values())
    click.echo(f"{study.title}; in per cent, mean and deviation over seeds.\n")
    tables.print_table(rows, ["row", *overall, "train s"], text_columns=1, ends=len(rows))
    if gains := gain_rows(study, summaries, overall.values(), marked_gain):
        note = f"{ERROR_TITLE}; grey: below two standard errors" if has_errors(summaries, overall.values()) else ""
        click.echo(f"{GAINS_TITLE}{note}.\n")
        tables.print_table(gains, ["row", "against", *overall], text_columns=2, ends=len(gains))
