"""Tables for people: metrics of runs side by side, gains with their standard errors."""

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
"""Column title -> key of metrics.json."""

ERROR_NOTE = "s.e.: paired standard error of the gain, clustered by group; grey: a gain below two standard errors."

SLICES = ("overall", "head", "torso", "tail")
"""Rows; head, torso and tail are contributions that add up to the overall figure."""


def value(metrics: Mapping[str, float], part: str, key: str) -> float | None:
    """A metric of a slice, None where the evaluation does not report it."""
    return metrics.get(key if part == "overall" else f"{part}/{key}")


def figures(metrics: Mapping[str, float]) -> list[str]:
    """The overall figures of a run, as text."""
    return _numbers([metrics.get(key) for key in COLUMNS.values()])


def comparison(base: Mapping[str, float] | None, ours: Mapping[str, float]) -> list[list[str]]:
    """Rows `slice, run, figures...`: base, ramen, gain and standard error by slice; ramen alone without a base."""
    rows = []
    for part in SLICES:
        own = [value(ours, part, key) for key in COLUMNS.values()]
        if base is None:
            rows.append([part, "ramen", *_numbers(own)])
            continue
        beside = [value(base, part, key) for key in COLUMNS.values()]
        gains = [None if a is None or b is None else a - b for a, b in zip(own, beside, strict=True)]
        rows.append([part, "base", *_numbers(beside)])
        rows.append(["", "ramen", *_numbers(own)])
        errors = [value(ours, f"gain_se/{part}".removesuffix("/overall"), key) for key in COLUMNS.values()]
        rows.append(["", "gain", *gain_cells(gains, errors)])
        if has_errors(ours):
            rows.append(["", "s.e.", *error_cells(errors)])
    return rows


def has_errors(metrics: Mapping[str, float]) -> bool:
    """Whether an evaluation reports standard errors of its gains."""
    return any(key.startswith("gain_se/") for key in metrics)


def gain_cells(gains: Iterable[float | None], errors: Iterable[float | None]) -> list[str]:
    """Gains as text, marked up by `mark`."""
    pairs = list(zip(gains, errors, strict=True))
    texts = _numbers((gain for gain, _ in pairs), sign=True)
    return [mark(text, *pair) for text, pair in zip(texts, pairs, strict=True)]


def error_cells(errors: Iterable[float | None]) -> list[str]:
    """Standard errors as grey text."""
    return [f"[dim]{text}[/dim]" if text else "" for text in _numbers(errors)]


def mark(text: str, gain: float | None, error: float | None) -> str:
    """A gain's text in rich's markup: green or red from two standard errors, grey below, plain without an error."""
    from ramen.evaluation.uncertainty import is_significant

    if not text or gain is None or error is None:
        return text
    if not is_significant(gain, error):
        return f"[dim]{text}[/dim]"
    colour = "green" if gain > 0 else "red"
    return f"[bold {colour}]{text}[/bold {colour}]"


def show_evaluation(ours: Mapping[str, float], base: Mapping[str, float] | None = None) -> None:
    """Print the figures of a run by slice, next to those of its base where there is one, and its peers' above them."""
    rows, peers = comparison(base, ours), peer_rows(ours)
    ends = len(rows) if base is None else len(rows) // len(SLICES)
    if peers:
        peers[0][0], rows[0][0] = rows[0][0], ""
    show([*peers, *rows], ["slice", "run", *COLUMNS], text_columns=2, ends=ends, offset=len(peers))
    if base is not None and has_errors(ours):
        print(f"{ERROR_NOTE}\n")


def peer_rows(metrics: Mapping[str, float]) -> list[list[str]]:
    """Rows `"", peer, figures...` of the peers in an evaluation, overall."""
    names = dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith("peers/"))
    return [
        ["", name, *_numbers([metrics.get(f"peers/{name}/{key}") for key in COLUMNS.values()])]
        for name in sorted(names)
    ]


def _numbers(values: Iterable[float | None], *, sign: bool = False) -> list[str]:
    form = "{:+.2f}" if sign else "{:.2f}"
    return ["" if figure is None else form.format(figure) for figure in values]


def show(
    rows: Sequence[Sequence[str]],
    columns: Sequence[str],
    *,
    text_columns: int,
    ends: int,
    wrap: bool = False,
    offset: int = 0,
) -> None:
    """Print a table on standard output; a line is drawn after every `ends` rows. Cells may have rich's markup.

    Args:
        rows, columns: cells and headings.
        text_columns: columns aligned on the left; the others hold numbers.
        ends: rows between two lines, counted from row `offset`.
        wrap: whether long cells go on in a further line where the terminal is too narrow; otherwise they are cut.
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
    if not console.is_terminal:  # a pipe or a file gets the whole width, whatever the terminal's
        console.width = 200
    console.print(table)
