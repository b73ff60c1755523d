"""Tables on the terminal: metrics of runs, gains with their standard errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

COLUMNS = {
    "P@1": "p_at_1",
    "P@3": "p_at_3",
    "P@5": "p_at_5",
    "N@5": "n_at_5",
    "PSP@1": "psp_at_1",
    "PSP@3": "psp_at_3",
    "PSP@5": "psp_at_5",
    "R@100": "r_at_100",
}
"""Column -> key of metrics.json."""

ERROR_NOTE = "s.e.: paired standard error of the gain, clustered by group; grey: a gain below two standard errors."

SLICES = ("overall", "head", "torso", "tail")
"""Rows of the table; head, torso and tail are contributions that sum to the overall value."""


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return the overall metrics of a run as text."""
    return _format([metrics.get(key) for key in COLUMNS.values()])


def comparison_rows(base: Mapping[str, float] | None, ours: Mapping[str, float]) -> list[list[str]]:
    """Return rows `slice, run, metrics...`: base, ramen, gain and s.e. of each slice; ramen only without base."""
    rows = []
    for part in SLICES:
        prefix = "" if part == "overall" else f"{part}/"
        values = [ours.get(prefix + key) for key in COLUMNS.values()]
        if base is None:
            rows.append([part, "ramen", *_format(values)])
            continue
        base_values = [base.get(prefix + key) for key in COLUMNS.values()]
        gains = [None if a is None or b is None else a - b for a, b in zip(values, base_values, strict=True)]
        errors = [ours.get(f"gain_se/{prefix}{key}") for key in COLUMNS.values()]
        rows.append([part, "base", *_format(base_values)])
        rows.append(["", "ramen", *_format(values)])
        rows.append(["", "gain", *gain_cells(gains, errors)])
        if has_errors(ours):
            rows.append(["", "s.e.", *error_cells(errors)])
    return rows


def has_errors(metrics: Mapping[str, float]) -> bool:
    """Return whether an evaluation reports standard errors of its gains."""
    return any(key.startswith("gain_se/") for key in metrics)


def gain_cells(gains: Iterable[float | None], errors: Iterable[float | None]) -> list[str]:
    """Return gains as text with the markup of `mark`."""
    pairs = list(zip(gains, errors, strict=True))
    texts = _format((gain for gain, _ in pairs), sign=True)
    return [mark(text, *pair) for text, pair in zip(texts, pairs, strict=True)]


def error_cells(errors: Iterable[float | None]) -> list[str]:
    """Return standard errors as grey text."""
    return [f"[dim]{text}[/dim]" if text else "" for text in _format(errors)]


def mark(text: str, gain: float | None, error: float | None) -> str:
    """Add rich's markup to a gain: green or red from two standard errors, grey below, none if the error is unknown."""
    from ramen.evaluation.uncertainty import is_significant

    if not text or gain is None or error is None:
        return text
    if not is_significant(gain, error):
        return f"[dim]{text}[/dim]"
    colour = "green" if gain > 0 else "red"
    return f"[bold {colour}]{text}[/bold {colour}]"


def print_evaluation(ours: Mapping[str, float], base: Mapping[str, float] | None = None) -> None:
    """Print a run's metrics by slice, with those of its base if given, below the overall metrics of its peers."""
    rows, peers = comparison_rows(base, ours), peer_rows(ours)
    ends = len(rows) if base is None else len(rows) // len(SLICES)
    if peers:
        peers[0][0], rows[0][0] = rows[0][0], ""
    print_table([*peers, *rows], ["slice", "run", *COLUMNS], text_columns=2, ends=ends, offset=len(peers))
    if base is not None and has_errors(ours):
        print(f"{ERROR_NOTE}\n")


def peer_rows(metrics: Mapping[str, float]) -> list[list[str]]:
    """Return rows `"", peer, metrics...` of the peers in an evaluation."""
    names = dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith("peers/"))
    return [
        ["", name, *_format([metrics.get(f"peers/{name}/{key}") for key in COLUMNS.values()])] for name in sorted(names)
    ]


def _format(values: Iterable[float | None], *, sign: bool = False) -> list[str]:
    form = "{:+.2f}" if sign else "{:.2f}"
    return ["" if value is None else form.format(value) for value in values]


def print_table(
    rows: Sequence[Sequence[str]],
    columns: Sequence[str],
    *,
    text_columns: int,
    ends: int,
    wrap: bool = False,
    offset: int = 0,
) -> None:
    """Print a table on standard output.

    Args:
        rows, columns: cells, which may contain rich's markup, and headings.
        text_columns: number of left-aligned columns; the others contain numbers.
        ends: rows per group; a line separates groups.
        wrap: whether cells too long for the terminal are wrapped rather than cut.
        offset: rows before the first group.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column,
            justify="left" if number < text_columns else "right",
            no_wrap=not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    for number, row in enumerate(rows, 1):
        table.add_row(*row, end_section=number > offset and (number - offset) % ends == 0 and number < len(rows))
    console = Console(highlight=False)
    if not console.is_terminal:  # pipes and files get the full width, so that no cell is cut
        console.width = 200
    console.print(table)
