"""`ramen ablate`: a study's rows over seeds, as one table and one figure."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options, require_config, show_progress
from ramen.console import warn
from ramen.errors import ConfigError, RamenError, nearest
from ramen.files import check_writable, replacing, write_text

if TYPE_CHECKING:
    from ramen.ablation.run import Outcome, Summary
    from ramen.ablation.study import Row, Study
    from ramen.config import Config

KEYS = {
    "P@1": "p_at_1",
    "P@5": "p_at_5",
    "PSP@1": "psp_at_1",
    "PSP@5": "psp_at_5",
    "R@100": "r_at_100",
    "head P@1": "head/p_at_1",
    "torso P@1": "torso/p_at_1",
    "tail P@1": "tail/p_at_1",
}
"""Column -> metric; head, torso and tail are contributions to P@1."""
EXPERIMENT = "ramen-ablate"
"""MLflow experiment of all studies, unless the environment names one."""
ALONE, LINKS = (
    "By the texts' vectors alone, without label context and classifiers",
    "Raw links of the anchor sets found",
)
GAINS, ERROR = "Gains, ± deviation over seeds", ", [paired standard error over the test documents, clustered by group]"


@click.command(short_help="Run a study: rows over seeds, one table.")
@config_options
@click.option("--study", default="design", show_default=True, metavar="NAME", help="A shipped study or a YAML file.")
@click.option("--rows", metavar="A,B", help="Only these rows (and those they are compared with).")
@click.option("--seeds", default="0,1,2", show_default=True, metavar="N,N", help="Seeds of training.")
@click.option("--out", type=PATH, default=Path("ablations"), show_default=True, metavar="DIR", help="Where it goes.")
def ablate(resolve: Callable[..., Config], study: str, rows: str | None, seeds: str, out: Path) -> None:
    """Train and evaluate every row of a study under every seed, and set them side by side.

    Results of stages are kept in DIR/cache by content: what two rows share is computed once, a stopped study goes on
    where it was, a finished one is read. Writes DIR/STUDY.md (with what the papers report of these data), .json and
    .png; every row and seed is a run of the MLflow experiment "ramen-ablate".

    \b
    Studies: bases, design, graphs, mogic, peers, volume, zero-shot.
    Examples:
      ramen ablate --preset demo --study design --seeds 0
      ramen ablate --preset debian --study bases --rows "RAMEN(ance)"
      ramen ablate --study my-study.yaml --seeds 0,1,2,3,4
    """
    from ramen.ablation.run import prepare, run_peer, run_row, summarise
    from ramen.ablation.study import read_study
    from ramen.config import to_yaml
    from ramen.data import sources
    from ramen.data.dataset import anchor_set_names
    from ramen.tracking import environment_defaults, start_pipeline_run

    require_config()
    numbers = _numbers(seeds)
    settings = resolve()
    known = read_study(study)  # before anything is fetched; rows of anchor sets are known once the data are
    check = functools.partial(_check, resolve, study, numbers, out)
    check(known if known.per_set else _chosen(known, rows))
    show_progress()
    sources.fetch_if_missing(settings.data)
    cache = out / "cache"
    with environment_defaults({"MLFLOW_EXPERIMENT_NAME": EXPERIMENT}):
        found = _chosen(read_study(study, anchor_set_names(prepare(settings, cache))), rows)
        found, repeats = found.without_repeats(functools.partial(_config, resolve, study))  # before anything trains
        for name, same in repeats.items():
            warn(f"{found.name}: row {name!r} is {same!r} under this configuration, and left out")
        found = _runnable(found)
        check(found)
        outcomes: dict[str, list[Outcome]] = {row.name: [] for row in found.rows}
        for seed in numbers:  # seed by seed: a study that is stopped early still compares all rows
            for row in found.rows:
                config = resolve(*row.sets, f"training.seed={seed}")
                click.echo(f"\n{found.name}: {row.name}, seed {seed}", err=True)
                tags = {"ramen.study": found.name, "ramen.row": row.name, "ramen.seed": str(seed)}
                with start_pipeline_run(f"{row.name} seed {seed}", to_yaml(config), tags, config.sections()):
                    if row.peer:
                        seconds = outcomes[row.time_of][-1].seconds if row.time_of else 0.0
                        outcomes[row.name].append(run_peer(row.peer, config, cache, seconds))
                    else:
                        outcomes[row.name].append(run_row(config, cache))
            groups = _groups(outcomes)
            keys = [key for columns in groups.values() for key in columns.values()]
            done = {row.name: summarise(outcomes[row.name], outcomes.get(row.against), keys) for row in found.rows}
            _write(found, done, groups, outcomes, numbers[: numbers.index(seed) + 1], out, settings)
    _show(found, done)
    click.echo(f"table: {out / f'{found.name}.md'}   figure: {out / f'{found.name}.png'}")


def _check(resolve: Callable[..., Config], study: str, seeds: Sequence[int], out: Path, found: Study) -> None:
    """Check what all rows under all seeds will need, before anything is computed.

    Raises:
        RamenError: a row cannot run, or the table cannot be written.
    """
    from ramen.ablation.run import CHAIN
    from ramen.peers import PEERS
    from ramen.stages import preflight

    for suffix in (".md", ".json", ".png"):
        place = out / f"{found.name}{suffix}"
        check_writable(place)
        if place.is_dir():
            raise ConfigError(f"{place}: is a directory, but the study's table is written there; choose another --out")
    for seed in seeds:
        resolve(f"training.seed={seed}")
    for row in found.rows:
        config = _config(resolve, study, row)
        if row.peer and row.peer not in PEERS:
            raise ConfigError(f"study {found.name}: row {row.name!r}: peer: {nearest(row.peer, PEERS)}")
        if row.peer and PEERS[row.peer].timed and not row.time_of:
            raise ConfigError(
                f"study {found.name}: row {row.name!r}: peer {row.peer} trains for a given time; name a row above it "
                "as `time_of`"
            )
        try:
            preflight(() if row.peer else CHAIN, dict(config), [out / "cache"])
        except RamenError as error:
            raise type(error)(f"study {found.name}: row {row.name!r}: {error}") from None


def _config(resolve: Callable[..., Config], study: str, row: Row) -> Config:
    try:
        return resolve(*row.sets)
    except ConfigError as error:
        raise ConfigError(f"study {study}: row {row.name!r}: {error}") from None


def _groups(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, str]]:
    """Columns of a table each, under what is said of it; the last two only where a row has them."""
    from ramen.evaluation.metrics import ENCODER

    names = {key for each in outcomes.values() for outcome in each for key in outcome.metrics}
    alone = {name: f"{ENCODER}{key}" for name, key in KEYS.items() if f"{ENCODER}{key}" in names}
    links = {key.removeprefix("links/"): key for key in sorted(names) if key.startswith("links/")}
    return {"": KEYS} | {said: columns for said, columns in ((ALONE, alone), (LINKS, links)) if columns}


def _numbers(seeds: str) -> list[int]:
    try:
        numbers = {int(text) for text in seeds.split(",")}
    except ValueError:
        numbers = {-1}
    if min(numbers) < 0 or not seeds.isascii():
        raise ConfigError(f"--seeds {seeds}: expected whole numbers of at least 0, e.g. 0,1,2")
    return sorted(numbers)


def _chosen(study: Study, rows: str | None) -> Study:
    """The study with only the named rows, and those that they need: as comparison, or for their time."""
    from dataclasses import replace

    if rows is None:
        return study
    wanted = {name.strip() for name in rows.split(",")}
    if lost := wanted - {row.name for row in study.rows}:
        names = ", ".join(row.name for row in study.rows)
        raise ConfigError(f"--rows: {sorted(lost)[0]!r} is no row of {study.name}; there are {names}")
    needs = {row.name: {row.against, row.time_of} - {""} for row in study.rows}
    while more := {need for name in wanted for need in needs[name]} - wanted:
        wanted |= more
    return replace(study, rows=tuple(row for row in study.rows if row.name in wanted))


def _runnable(study: Study) -> Study:
    """The study without peers that cannot run here. Raises ConfigError if no row is left."""
    from dataclasses import replace

    from ramen.peers import PEERS

    rows: list[Row] = []
    for row in study.rows:
        obstacle = PEERS[row.peer].obstacle() if row.peer in PEERS else ""
        if not obstacle and row.time_of and row.time_of not in {kept.name for kept in rows}:
            obstacle = f"row {row.time_of!r}, which gives its time, is skipped"
        if obstacle:
            warn(f"{study.name}: row {row.name!r} is skipped: {obstacle}")
        else:
            rows.append(row)
    if not rows:
        raise ConfigError(f"study {study.name}: no row can run here")
    return replace(study, rows=tuple(rows))


def _lines(study: Study, done: Mapping[str, Summary], keys: Iterable[str]) -> list[list[str]]:
    """A line per row: mean and deviation over seeds."""
    return [
        [row.name, *(_plain(done[row.name], key) for key in keys), f"{done[row.name].seconds:.0f}"]
        for row in study.rows
    ]


def _plain(summary: Summary, key: str) -> str:
    value = summary.mean.get(key)
    return "" if value is None or value != value else f"{value:.2f}{_spread(summary.deviation[key])}"


def _spread(deviation: float) -> str:
    """A deviation, nothing of a single seed."""
    return "" if deviation != deviation else f" ±{deviation:.2f}"


def _gains(
    study: Study, done: Mapping[str, Summary], keys: Iterable[str], cell: Callable[[Summary, str], str]
) -> list[list[str]]:
    """A line per row that is compared with another: the gain, its deviation over seeds, its error over documents."""
    compared = [row for row in study.rows if row.against in done]
    return [[row.name, row.against, *(cell(done[row.name], key) for key in keys)] for row in compared]


def _has_error(done: Mapping[str, Summary], keys: Iterable[str]) -> bool:
    """Whether any gain has its error: rows of the same documents, and metrics that are known by document."""
    return any(key in each.gain_error for key in keys for each in done.values())


def _gain(summary: Summary, key: str) -> str:
    value = summary.gain.get(key)
    if value is None or value != value:
        return ""
    error = f" [{summary.gain_error[key]:.2f}]" if key in summary.gain_error else ""
    return f"{value:+.2f}{_spread(summary.gain_deviation[key])}{error}"


def _marked(summary: Summary, key: str) -> str:
    """A gain as the terminal shows it: grey below two standard errors."""
    return tables.mark(_gain(summary, key), summary.gain.get(key), summary.gain_error.get(key))


def _show(study: Study, done: Mapping[str, Summary]) -> None:
    names = [name for name, key in KEYS.items() if "/" not in key]
    keys = [KEYS[name] for name in names]
    rows = _lines(study, done, keys)
    click.echo(f"{study.title}; in per cent, mean and deviation over seeds.\n")
    tables.show(rows, ["row", *names, "train s"], text_columns=1, ends=len(rows))
    if gains := _gains(study, done, keys, _marked):
        click.echo(f"{GAINS}{f'{ERROR}; grey: below two standard errors' if _has_error(done, keys) else ''}.\n")
        tables.show(gains, ["row", "against", *names], text_columns=2, ends=len(gains))


def _write(
    study: Study,
    done: Mapping[str, Summary],
    groups: Mapping[str, Mapping[str, str]],
    outcomes: Mapping[str, Sequence[Outcome]],
    seeds: Sequence[int],
    out: Path,
    settings: Config,
) -> None:
    """Write the table as Markdown, everything as JSON, and the figure."""
    from ramen.ablation.published import published
    from ramen.evaluation.figures import gains_figure, png

    text = io.StringIO()
    text.write(
        f"# {study.title}\n\nPer cent, mean ± deviation over seeds {', '.join(map(str, seeds))}; head, torso and "
    )
    text.write("tail add up to P@1.\n\n")
    for said, columns in groups.items():
        text.write(f"\n## {said}\n\n" if said else "")
        _table(text, ["row", *columns, "training, s"], _lines(study, done, columns.values()))
        if gains := _gains(study, done, columns.values(), _gain):
            known = _has_error(done, columns.values())
            note = f"{ERROR}: a gain of less than twice the error may be chance" if known else ""
            text.write(f"\n{GAINS}{note}.\n\n")
            _table(text, ["row", "against", *columns], gains)
    if any(each.missed for each in done.values()):
        text.write("\n## Labels missed\n")
    for row in study.rows:
        if missed := done[row.name].missed:
            text.write(f"\nFN@k of {row.name} less that of {row.against}, by bin of labels (R-ICLR table 8; below 0 ")
            text.write("fewer are missed).\n\n")
            depths = sorted({k for line in missed.values() for k in line})
            lines = [[name, *(f"{line[k]:+.3f}" if k in line else "" for k in depths)] for name, line in missed.items()]
            _table(text, ["bin", *(f"k={k}" for k in depths)], lines)
    for table in ("", *study.published):
        if papers := published(Path(settings.data.path).name, table):
            metrics = list(dict.fromkeys(metric for values in papers.values() for metric in values))
            text.write(f"\n## Published{f', {table}' if table else ''}\n\n")
            header = [metric.upper().replace("_AT_", "@") for metric in metrics]
            lines = [
                [source, method, *(f"{values[metric]:.2f}" if metric in values else "" for metric in metrics)]
                for (source, method), values in papers.items()
            ]
            _table(text, ["source", "method", *header], lines)
    write_text(out / f"{study.name}.md", text.getvalue())
    whole = {
        row.name: {
            "set": row.sets,
            "against": row.against,
            "peer": row.peer,
            "gain_error": done[row.name].gain_error,
            "missed": done[row.name].missed,
            "seeds": {
                str(seed): {"metrics": each.metrics, "seconds": each.seconds, "evaluation": str(each.evaluation)}
                for seed, each in zip(seeds, outcomes[row.name], strict=True)
            },
        }
        for row in study.rows
    }
    write_text(out / f"{study.name}.json", json.dumps(whole, indent=1, sort_keys=True) + "\n")
    shown = {row.name: (done[row.name].mean, done[row.name].deviation) for row in study.rows}
    image = png(gains_figure(shown, {"P@1": "p_at_1", "PSP@5": "psp_at_5", "R@100": "r_at_100"}))
    with replacing(out / f"{study.name}.png") as beside:
        beside.write_bytes(image)


def _table(text: io.StringIO, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A Markdown table."""
    for line in [header, ["---"] * len(header), *lines]:
        text.write(f"| {' | '.join(line)} |\n")
