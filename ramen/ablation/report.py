"""Report of a study: one table as Markdown, all results as JSON, one figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ramen.ablation.published import published
from ramen.ablation.run import Outcome
from ramen.ablation.study import Study
from ramen.ablation.summary import Summary, summarise
from ramen.errors import ConfigError
from ramen.evaluation.figures import png, study_figure
from ramen.evaluation.metrics import ENCODER
from ramen.files import atomic_write, check_writable, write_text

COLUMNS = {
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
PANELS = {"P@1": "p_at_1", "PSP@5": "psp_at_5", "R@100": "r_at_100"}
"""Panel of the figure -> metric."""
ENCODER_TITLE = "Encoder only, without label context and classifiers"
LINKS_TITLE = "Link prediction: R@100 of the raw edges of each anchor set"
GAINS_TITLE = "Gains, ± deviation over seeds"
ERROR_TITLE = ", [paired standard error over the test documents, clustered by group]"


def report_files(study: Study, out: Path) -> dict[str, Path]:
    """Return the files of a report by suffix: md, json, png."""
    return {suffix: out / f"{study.name}.{suffix}" for suffix in ("md", "json", "png")}


def check_report_files(study: Study, out: Path) -> None:
    """Check that a report can be written. Raises RamenError."""
    for file in report_files(study, out).values():
        check_writable(file)
        if file.is_dir():
            raise ConfigError(f"{file}: is a directory, but the study's report is a file; choose another --out")


def write_report(
    study: Study, seeds: Sequence[int], outcomes: Mapping[str, Sequence[Outcome]], data_set: str, out: Path
) -> dict[str, Summary]:
    """Write STUDY.md, STUDY.json and STUDY.png.

    Args:
        seeds: seeds of the outcomes.
        outcomes: row -> one outcome per seed.
        data_set: name of the raw data, for published results.
        out: folder of the report.

    Returns:
        Row -> summary.
    """
    groups = group_columns(outcomes)
    keys = [key for columns in groups.values() for key in columns.values()]
    summaries = {row.name: summarise(outcomes[row.name], outcomes.get(row.against), keys) for row in study.rows}
    files = report_files(study, out)
    write_text(files["md"], _render_markdown(study, seeds, summaries, groups, data_set))
    results = _collect_results(study, seeds, summaries, outcomes)
    write_text(files["json"], json.dumps(results, indent=1, sort_keys=True) + "\n")
    points = {row.name: (summaries[row.name].mean, summaries[row.name].deviation) for row in study.rows}
    with atomic_write(files["png"]) as temporary:
        temporary.write_bytes(png(study_figure(points, PANELS)))
    return summaries


def group_columns(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, str]]:
    """Return the columns of each table by title; encoder-only metrics and links only if some row has them."""
    known = {key for row in outcomes.values() for outcome in row for key in outcome.metrics}
    encoder = {name: f"{ENCODER}{key}" for name, key in COLUMNS.items() if f"{ENCODER}{key}" in known}
    links = {key.removeprefix("links/"): key for key in sorted(known) if key.startswith("links/")}
    optional = {ENCODER_TITLE: encoder, LINKS_TITLE: links}
    return {"": COLUMNS} | {title: columns for title, columns in optional.items() if columns}


def mean_rows(study: Study, summaries: Mapping[str, Summary], keys: Iterable[str]) -> list[list[str]]:
    """Return a table row per row of the study: name, mean ± deviation over seeds of each metric, training seconds."""
    return [
        [row.name, *(_format_mean(summaries[row.name], key) for key in keys), f"{summaries[row.name].seconds:.0f}"]
        for row in study.rows
    ]


def gain_rows(
    study: Study, summaries: Mapping[str, Summary], keys: Iterable[str], format_cell: Callable[[Summary, str], str]
) -> list[list[str]]:
    """Return a table row per row of the study that is compared with another: both names, the gain in each metric."""
    compared = [row for row in study.rows if row.against in summaries]
    return [[row.name, row.against, *(format_cell(summaries[row.name], key) for key in keys)] for row in compared]


def has_errors(summaries: Mapping[str, Summary], keys: Iterable[str]) -> bool:
    """Return whether any gain in these metrics has a standard error."""
    return any(key in summary.gain_error for key in keys for summary in summaries.values())


def format_gain(summary: Summary, key: str) -> str:
    """Return a gain as `+1.20 ±0.10 [0.30]`: deviation over seeds, standard error over documents; "" if unknown."""
    value = summary.gain.get(key)
    if value is None or value != value:
        return ""
    error = f" [{summary.gain_error[key]:.2f}]" if key in summary.gain_error else ""
    return f"{value:+.2f}{_format_deviation(summary.gain_deviation[key])}{error}"


def _format_mean(summary: Summary, key: str) -> str:
    value = summary.mean.get(key)
    return "" if value is None or value != value else f"{value:.2f}{_format_deviation(summary.deviation[key])}"


def _format_deviation(deviation: float) -> str:
    """Return ` ±0.10`; "" for a single seed, whose deviation is NaN."""
    return "" if deviation != deviation else f" ±{deviation:.2f}"


def _render_markdown(
    study: Study,
    seeds: Sequence[int],
    summaries: Mapping[str, Summary],
    groups: Mapping[str, Mapping[str, str]],
    data_set: str,
) -> str:
    parts = [
        f"# {study.title}\n\nPer cent, mean ± deviation over seeds {', '.join(map(str, seeds))}; head, torso and tail "
        "sum to P@1.\n\n"
    ]
    for title, columns in groups.items():
        parts.append(f"\n## {title}\n\n" if title else "")
        parts.append(_markdown_table(["row", *columns, "training, s"], mean_rows(study, summaries, columns.values())))
        if gains := gain_rows(study, summaries, columns.values(), format_gain):
            known = has_errors(summaries, columns.values())
            note = f"{ERROR_TITLE}: gains below two standard errors may be chance" if known else ""
            parts.append(f"\n{GAINS_TITLE}{note}.\n\n")
            parts.append(_markdown_table(["row", "against", *columns], gains))
    parts += _render_missed(study, summaries)
    parts += _render_published(study, data_set)
    return "".join(parts)


def _render_missed(study: Study, summaries: Mapping[str, Summary]) -> list[str]:
    """Return the section on missed labels by bin (R-ICLR, Table 8); empty if no row has any."""
    parts = ["\n## Labels missed\n"] if any(summary.missed for summary in summaries.values()) else []
    for row in study.rows:
        if missed := summaries[row.name].missed:
            depths = sorted({k for line in missed.values() for k in line})
            lines = [[name, *(f"{line[k]:+.3f}" if k in line else "" for k in depths)] for name, line in missed.items()]
            parts.append(
                f"\nFN@k of {row.name} minus that of {row.against}, by bin of labels (R-ICLR, Table 8); negative means "
                "fewer missed labels.\n\n"
            )
            parts.append(_markdown_table(["bin", *(f"k={k}" for k in depths)], lines))
    return parts


def _render_published(study: Study, data_set: str) -> list[str]:
    """Return a section per table of published results; empty for a data set that no paper reports."""
    parts = []
    for table in ("", *study.published):
        if results := published(data_set, table):
            metrics = list(dict.fromkeys(metric for values in results.values() for metric in values))
            header = [metric.upper().replace("_AT_", "@") for metric in metrics]
            lines = [
                [source, method, *(f"{values[metric]:.2f}" if metric in values else "" for metric in metrics)]
                for (source, method), values in results.items()
            ]
            parts.append(f"\n## Published{f', {table}' if table else ''}\n\n")
            parts.append(_markdown_table(["source", "method", *header], lines))
    return parts


def _markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *lines])


def _collect_results(
    study: Study,
    seeds: Sequence[int],
    summaries: Mapping[str, Summary],
    outcomes: Mapping[str, Sequence[Outcome]],
) -> dict[str, object]:
    """Return the content of STUDY.json: each row's definition, errors, and results by seed."""
    return {
        row.name: {
            "set": row.sets,
            "against": row.against,
            "peer": row.peer,
            "gain_error": summaries[row.name].gain_error,
            "missed": summaries[row.name].missed,
            "seeds": {
                str(seed): {
                    "metrics": outcome.metrics,
                    "seconds": outcome.seconds,
                    "evaluation": str(outcome.evaluation),
                }
                for seed, outcome in zip(seeds, outcomes[row.name], strict=True)
            },
        }
        for row in study.rows
    }
