"""The report: one HTML file that needs nothing else, for a laptop's screen and for paper."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from ramen.evaluation.figures import edges_figure, quantile_figure, training_figure
from ramen.evaluation.metrics import PEER
from ramen.evaluation.template import PAGE, STYLE
from ramen.evaluation.uncertainty import Gain

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
"""Column of the headline table -> key of metrics.json."""
CARDS = {
    "P@1": "p_at_1",
    "PSP@5": "psp_at_5",
    "R@100": "r_at_100",
    "Tail, label-averaged R@100": "tail/label_r_at_100",
}
PEER_NAMES = {"tfidf": "TF-IDF", "untrained": "Untrained encoder"}
"""Peer -> its name in the table."""
SLICES = ("head", "torso", "tail")
Table = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Item:
    """A label in a sample: its text, its training frequency, and whether to mark it."""

    text: str
    frequency: int
    hit: bool


@dataclass(frozen=True)
class Sample:
    """A test document with its truth and the first labels of this run and of the base (None = no base).

    Attributes:
        more: labels of the truth that are not listed.
    """

    uid: str
    text: str
    truth: Sequence[Item]
    run: Sequence[Item]
    base: Sequence[Item] | None
    more: int = 0


@dataclass(frozen=True)
class GraphFacts:
    """Size of one pruned graph."""

    name: str
    rows: int
    anchors: int
    edges: int
    original: int


@dataclass(frozen=True)
class Report:
    """What the report shows.

    Attributes:
        lead: one sentence under the title.
        metrics: flat, percent, with slices `tail/p_at_1`.
        labels: slice -> number of labels, `overall` included.
        bins: table of `quantiles.by_bin`, non-empty bins, most frequent labels first.
        bins_note: how the bins were cut.
        facts: name and value pairs: counts, propensity parameters, settings.
        base, base_bins: the same of the base run; None = no base, or bins that do not match.
        gains: metric -> gain over the base with its standard error.
        error_note: how the standard errors are computed.
        history: records of history.json; missing keys leave gaps.
    """

    lead: str
    metrics: Mapping[str, float]
    labels: Mapping[str, int]
    bins: Table
    bins_note: str
    facts: Sequence[tuple[str, str]]
    base: Mapping[str, float] | None = None
    base_bins: Table | None = None
    gains: Mapping[str, Gain] = field(default_factory=dict)
    error_note: str = ""
    history: Sequence[Mapping[str, Any]] = ()
    graphs: Sequence[GraphFacts] = ()
    samples: Sequence[Sample] = field(default=())


def make_figures(report: Report) -> dict[str, Figure]:
    """The figures that the data allow: `quantiles`, and `training`, `edges` where the history has them."""
    figures = {
        "quantiles": quantile_figure(report.bins, report.base_bins),
        "training": training_figure(report.history),
        "edges": edges_figure(report.history),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def render(report: Report, images: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        report: what to show; texts are escaped.
        images: figure name -> PNG, inlined.
    """
    inlined = {name: f"data:image/png;base64,{base64.b64encode(image).decode()}" for name, image in images.items()}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals["style"] = STYLE
    return environment.from_string(PAGE).render(
        lead=report.lead,
        cards=[{"name": name, **_cell(report, key)} for name, key in CARDS.items()],
        columns=[{"title": title, "split": key.startswith("label_")} for title, key in COLUMNS.items()],
        rows=[_row(report, name) for name in ("overall", *SLICES)],
        peers=[_peer(report, name) for name in PEER_NAMES if f"{PEER}{name}/p_at_1" in report.metrics],
        has_base=report.base is not None,
        error_note=report.error_note,
        bins_note=report.bins_note,
        images={"training": None, "edges": None} | inlined,
        pruned=any(record.get("phase") == "retrain" for record in report.history),
        graphs=[_graph(graph) for graph in report.graphs],
        samples=report.samples,
        facts=report.facts,
    )


def _row(report: Report, name: str) -> dict[str, Any]:
    prefix = "" if name == "overall" else f"{name}/"
    cells = [{**_cell(report, prefix + key), "split": key.startswith("label_")} for key in COLUMNS.values()]
    return {"name": name.capitalize(), "labels": f"{report.labels[name]:,}", "cells": cells}


def _peer(report: Report, name: str) -> dict[str, Any]:
    """A peer's overall figures, without a difference to the base."""
    alone = replace(report, base=None)
    cells = [{**_cell(alone, f"{PEER}{name}/{key}"), "split": key.startswith("label_")} for key in COLUMNS.values()]
    return {"name": PEER_NAMES[name], "cells": cells}


def _cell(report: Report, key: str) -> dict[str, Any]:
    """A number with its gain over the base: "up" or "down" from two standard errors, else "even", shown grey."""
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


def _graph(graph: GraphFacts) -> dict[str, str]:
    share = 100.0 * graph.original / graph.edges if graph.edges else 0.0
    return {
        "name": graph.name,
        "rows": f"{graph.rows:,}",
        "anchors": f"{graph.anchors:,}",
        "edges": f"{graph.edges:,}",
        "original": f"{graph.original:,} ({share:.0f} %)",
        "walked": f"{graph.edges - graph.original:,}",
    }
