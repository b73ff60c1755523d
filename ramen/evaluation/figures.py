"""Figures of the report and of studies, as matplotlib `Figure` objects without pyplot's global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

RUN, BASE, INK, GRID = "#2f5d9b", "#b9c2cf", "#1d2733", "#e3e8ee"
LINES = ("#2f5d9b", "#d9822b", "#3a8f6b", "#a5486b", "#7a63b8", "#8a7a3f", "#3b8ea5", "#6b7480")
MIN_AXIS_SPAN = 3.0
"""Points that the axis of `study_figure` spans at least, so that a difference of 0.01 does not look large."""
PANELS = {
    "label_r_at_100": "Label-averaged R@100 (%)",
    "p_at_1": "Contribution to P@1 (points)",
    "psp_at_5": "Contribution to PSP@5 (points)",
}
"""Metric -> title of its panel in the quantile figure."""

History = Sequence[Mapping[str, Any]]


def _style_axes(axes: Axes, title: str) -> Axes:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab4c0")
    axes.tick_params(colors="#4a5665", labelsize=8.5, length=3)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def png(figure: Figure, dpi: int = 160) -> bytes:
    """Return the figure as PNG; equal figures give equal bytes."""
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def quantile_figure(
    bins: Mapping[str, Mapping[str, float]], base: Mapping[str, Mapping[str, float]] | None = None
) -> Figure:
    """Return bars of each metric per label bin, next to those of the base.

    Args:
        bins: table of `quantiles.metrics_by_bin`, most frequent labels first.
        base: table of the base run over the same bins; None = no base.
    """
    figure = Figure(figsize=(10.4, 3.5), layout="constrained")
    positions = np.arange(len(bins))
    width = 0.38 if base else 0.62
    ticks = [f"{name}\n{_format_count(row['labels'])}\nlabels" for name, row in bins.items()]
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _style_axes(axes, title)
        values = [row.get(key, 0.0) for row in bins.values()]
        if base:
            base_values = [base.get(name, {}).get(key, 0.0) for name in bins]
            axes.bar(positions - width / 2, base_values, width, color=BASE, label="base")
        bars = axes.bar(positions + (width / 2 if base else 0), values, width, color=RUN, label="this run")
        axes.bar_label(bars, fmt="%.1f", fontsize=7.5, color=INK, padding=2)
        axes.set_xticks(positions, ticks)
        axes.margins(y=0.16)
        if base and axes is figure.axes[0]:
            axes.legend(frameon=False, fontsize=8.5)
    figure.supxlabel("label bin, 1 = most frequent in training", fontsize=8.5, color="#4a5665")
    return figure


def study_figure(
    rows: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]], panels: Mapping[str, str]
) -> Figure:
    """Return one panel per metric with a point per row of a study, with its standard deviation over seeds if finite.

    Points rather than bars, because the axis does not start at 0: rows differ by a point or two out of fifty.

    Args:
        rows: name -> (means, deviations) by metric, in percent; drawn from top to bottom.
        panels: title -> metric.
    """
    figure = Figure(figsize=(10.4, 1.1 + 0.34 * len(rows)), layout="constrained")
    positions = np.arange(len(rows))[::-1]
    for number, (axes, (title, key)) in enumerate(
        zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True)
    ):
        _style_axes(axes, title)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.grid(axis="y", visible=False)
        values = [means.get(key, 0.0) for means, _ in rows.values()]
        spreads = [deviations.get(key, 0.0) for _, deviations in rows.values()]
        axes.errorbar(values, positions, xerr=spreads, fmt="o", ms=6, color=RUN, ecolor=INK, elinewidth=1, capsize=3)
        for value, position in zip(values, positions, strict=True):
            axes.annotate(f"{value:.1f}", (value, position), xytext=(0, 6), textcoords="offset points",
                          ha="center", fontsize=7.5, color=INK)  # fmt: skip
        axes.margins(x=0.25)
        low, high = axes.get_xlim()
        padding = max(0.0, MIN_AXIS_SPAN - (high - low)) / 2
        axes.set_xlim(low - padding, high + padding)
        axes.set_ylim(-0.6, len(rows) - 0.3)
        axes.set_yticks(positions, list(rows) if number == 0 else [""] * len(rows))
    return figure


def _format_count(count: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _record_steps(history: History) -> list[float]:
    """Return the epochs, or record numbers if epochs are missing or not increasing."""
    epochs = [record["epoch"] for record in history if isinstance(record.get("epoch"), int)]
    if len(epochs) == len(history) and all(a < b for a, b in pairwise(epochs)):
        return [float(epoch) for epoch in epochs]
    return [float(i) for i in range(1, len(history) + 1)]


def training_figure(history: History) -> Figure | None:
    """Return curves of loss, validation P@1 and the regularisation weights λ (if a bandit tuned them) per epoch.

    A dashed line marks each pruning. None if the history has no values.
    """
    curves = {
        "Training loss": [("total", "loss", RUN), ("task", "task_loss", LINES[1])],
        "Validation P@1 (%)": [("", "val_p_at_1", LINES[2])],
    }
    steps = _record_steps(history)
    names = sorted({name for record in history for name in record.get("lambda", {})})
    tuned = [name for name in names if len({record["lambda"].get(name) for record in history}) > 1]
    if tuned:
        curves["Regularisation weights λ"] = [(name, name, LINES[i % len(LINES)]) for i, name in enumerate(tuned)]
        history = [{**record, **{name: record["lambda"].get(name) for name in tuned}} for record in history]
    shown = {
        title: [line for line in lines if any(record.get(line[1]) is not None for record in history)]
        for title, lines in curves.items()
    }
    shown = {title: lines for title, lines in shown.items() if lines}
    if not shown:
        return None
    figure = Figure(figsize=(10.4, 3.1), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        _style_axes(axes, title)
        for label, key, color in lines:
            points = [(step, rec[key]) for step, rec in zip(steps, history, strict=True) if rec.get(key) is not None]
            marker = "o" if len(points) <= 40 else None
            axes.plot(*zip(*points, strict=True), color=color, lw=1.8, marker=marker, ms=3.5, label=label)
        _mark_rounds(axes, steps, history)
        axes.set_xlabel("epoch", fontsize=8.5, color="#4a5665")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8.5)
    return figure


def _mark_rounds(axes: Axes, steps: Sequence[float], history: History) -> None:
    """Draw a dashed line between the last epoch before each pruning and the first after it."""
    starts = [
        (steps[i], record.get("round"))
        for i, record in enumerate(history)
        if record.get("phase") == "retrain" and (i == 0 or record.get("round") != history[i - 1].get("round"))
    ]
    label_every = -(-len(starts) // 12)
    for i, (step, number) in enumerate(starts):
        axes.axvline(step - 0.5, color="#8b96a5", lw=0.9, ls="--", zorder=0)
        if i % label_every == 0:
            axes.annotate(
                f"round {number}" if i == 0 else f"{number}", (step - 0.5, 1.0), xycoords=("data", "axes fraction"),
                xytext=(3, -8), textcoords="offset points", fontsize=7, color="#5d6977",
            )  # fmt: skip


def edges_figure(history: History) -> Figure | None:
    """Return the share of each graph's edges used by training, per pruning round; None without prunings.

    Round 0 is the warm-up. One colour per anchor set; document graphs solid, label graphs dashed.
    """
    rounds: dict[int, Mapping[str, float]] = {}
    for record in history:
        if isinstance(record.get("round"), int) and record.get("edges_kept"):
            rounds[record["round"]] = record["edges_kept"]
    if not rounds:
        return None
    names = sorted({name for kept in rounds.values() for name in kept})
    sets = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    figure = Figure(figsize=(10.4, 3.1), layout="constrained")
    axes = _style_axes(figure.subplots(), "Edges kept per graph (%)")
    for name in names:
        points = [(0, 100.0)] + [(n, 100.0 * kept[name]) for n, kept in sorted(rounds.items()) if n and name in kept]
        anchor_set, _, side = name.rpartition(".")
        style = "--" if side == "label" else "-"
        color = LINES[sets.index(anchor_set) % len(LINES)]
        axes.plot(*zip(*points, strict=True), color=color, ls=style, lw=1.8, marker="o", ms=3.5, label=name)
    axes.set_ylim(0, 105)
    axes.set_xlabel("pruning round, 0 = warm-up on the full graphs", fontsize=8.5, color="#4a5665")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    columns = 1 + len(names) // 12
    axes.legend(
        frameon=False, fontsize=8.5, handlelength=3, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns
    )
    return figure
