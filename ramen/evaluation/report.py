"""The evaluation report: one self-contained HTML file, for screen and print."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from ramen.evaluation.figures import edges_figure, quantile_figure, training_figure
from ramen.evaluation.metrics import PEER
from ramen.evaluation.uncertainty import Gain

TEMPLATE = Path(__file__).with_name("report.html.j2")
COLUMNS = {
    "P@1": "p_at_1",
    "P@5": "p_at_5",
    "nDCG@5": "n_at_5",
    "PSP@1": "psp_at_1",
    "PSP@5": "psp_at_5",
    "PSnDCG@5": "psn_at_5",
    "R@10": "r_at_10",
    "R@100": "r_at_100",
    "Label R@100": "label_r_at_100",
}
"""Column of the accuracy table -> key of metrics.json."""
CARDS = {
    "P@1": "p_at_1",
    "PSP@5": "psp_at_5",
    "R@100": "r_at_100",
    "Tail, label-averaged R@100": "tail/label_r_at_100",
}
"""Card at the top of the page -> key of metrics.json."""
PEER_NAMES = {"tfidf": "TF-IDF", "untrained": "Untrained encoder"}
"""Peer -> name in the table."""
SLICES = ("head", "torso", "tail")
BinTable = Mapping[str, Mapping[str, float]]
"""Name of a label bin -> column -> value, see `quantiles.metrics_by_bin`."""


@dataclass(frozen=True)
class SampleLabel:
    """A label of a sample: text, training frequency, and whether it is a hit."""

    text: str
    frequency: int
    hit: bool


@dataclass(frozen=True)
class Sample:
    """A test document with its relevant labels and the top labels of this run and of the base (None = no base).

    Attributes:
        more: number of relevant labels that are not listed.
    """

    uid: str
    text: str
    truth: Sequence[SampleLabel]
    run: Sequence[SampleLabel]
    base: Sequence[SampleLabel] | None
    more: int = 0


@dataclass(frozen=True)
class GraphSize:
    """Size of one pruned graph; `original` edges were in the data, the others were added by the random walk."""

    name: str
    rows: int
    anchors: int
    edges: int
    original: int


@dataclass(frozen=True)
class Report:
    """Content of the report.

    Attributes:
        lead: one sentence under the title.
        metrics: metrics.json of this run, in percent, with slices such as `tail/p_at_1`.
        labels: number of labels in head, torso, tail and overall.
        bins: table of the non-empty label bins, most frequent labels first.
        bins_note: how the bins were cut.
        facts: name and value pairs: counts, propensity parameters, settings.
        base: metrics of the base run; None = no base.
        base_bins: table of the base run; None = no base, or different bins.
        gains: metric -> gain over the base.
        error_note: how the standard errors are computed.
        history: records of history.json; missing keys leave gaps in the figures.
    """

    lead: str
    metrics: Mapping[str, float]
    labels: Mapping[str, int]
    bins: BinTable
    bins_note: str
    facts: Sequence[tuple[str, str]]
    base: Mapping[str, float] | None = None
    base_bins: BinTable | None = None
    gains: Mapping[str, Gain] = field(default_factory=dict)
    error_note: str = ""
    history: Sequence[Mapping[str, Any]] = ()
    graphs: Sequence[GraphSize] = ()
    samples: Sequence[Sample] = field(default=())


def make_figures(report: Report) -> dict[str, Figure]:
    """Return the figures `quantiles`, and `training` and `edges` if the history has their values."""
    figures = {
        "quantiles": quantile_figure(report.bins, report.base_bins),
        "training": training_figure(report.history),
        "edges": edges_figure(report.history),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def render(report: Report, images: Mapping[str, bytes]) -> str:
    """Render the HTML page.

    Args:
        report: content; texts are escaped.
        images: figure name -> PNG, inlined.
    """
    data_urls = {name: f"data:image/png;base64,{base64.b64encode(image).decode()}" for name, image in images.items()}
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(TEMPLATE.name).render(
        lead=report.lead,
        cards=[{"name": name, **_cell(report, key)} for name, key in CARDS.items()],
        columns=[{"title": title, "split": _starts_group(key)} for title, key in COLUMNS.items()],
        rows=[_slice_row(report, name) for name in ("overall", *SLICES)],
        peers=[_peer_row(report, name) for name in PEER_NAMES if f"{PEER}{name}/p_at_1" in report.metrics],
        has_base=report.base is not None,
        error_note=report.error_note,
        bins_note=report.bins_note,
        images={"training": None, "edges": None} | data_urls,
        pruned=any(record.get("phase") == "retrain" for record in report.history),
        graphs=[_graph_row(graph) for graph in report.graphs],
        samples=report.samples,
        facts=report.facts,
    )


def _starts_group(key: str) -> bool:
    """Whether a vertical rule precedes the column, which separates label averages from contributions."""
    return key.startswith("label_")


def _slice_row(report: Report, name: str) -> dict[str, Any]:
    prefix = "" if name == "overall" else f"{name}/"
    cells = [{**_cell(report, prefix + key), "split": _starts_group(key)} for key in COLUMNS.values()]
    return {"name": name.capitalize(), "labels": f"{report.labels[name]:,}", "cells": cells}


def _peer_row(report: Report, name: str) -> dict[str, Any]:
    """Return a peer's overall metrics, without gains over the base."""
    without_base = replace(report, base=None)
    cells = [{**_cell(without_base, f"{PEER}{name}/{key}"), "split": _starts_group(key)} for key in COLUMNS.values()]
    return {"name": PEER_NAMES[name], "cells": cells}


def _cell(report: Report, key: str) -> dict[str, Any]:
    """Return a metric's text with its gain; sign is "up" or "down" for significant gains, else "even" (grey)."""
    value = report.metrics.get(key)
    if value is None:
        return {"text": "–", "delta": None, "sign": "even"}
    base = None if report.base is None else report.base.get(key)
    if base is None:
        return {"text": f"{value:.2f}", "delta": None, "sign": "even"}
    gain = report.gains.get(key, Gain(value - base, None))
    sign = "even" if not gain.significant else "up" if gain.points > 0 else "down"
    points = f"{round(gain.points, 2) + 0.0:+.2f}".replace("-", "−")
    error = "" if gain.error is None else f" ±{gain.error:.2f}"
    return {"text": f"{value:.2f}", "delta": points + error, "sign": sign}


def _graph_row(graph: GraphSize) -> dict[str, str]:
    share = 100.0 * graph.original / graph.edges if graph.edges else 0.0
    return {
        "name": graph.name,
        "rows": f"{graph.rows:,}",
        "anchors": f"{graph.anchors:,}",
        "edges": f"{graph.edges:,}",
        "original": f"{graph.original:,} ({share:.0f} %)",
        "walked": f"{graph.edges - graph.original:,}",
    }
