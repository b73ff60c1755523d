"""The report is complete, self-contained, escaped, and works without a training history."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ramen.evaluation.figures import png, study_figure, training_figure
from ramen.evaluation.report import COLUMNS, TEMPLATE, GraphSize, Report, Sample, SampleLabel, make_figures, render
from ramen.evaluation.uncertainty import Gain
from ramen.stages import STAGES, Stage

KEYS = list(COLUMNS.values())
METRICS = {f"{prefix}{key}": 10.0 + i for prefix in ("", "head/", "torso/", "tail/") for i, key in enumerate(KEYS)}
BINS = {str(i): {"labels": 10 * i, **dict.fromkeys(KEYS, 5.0 * i)} for i in (1, 2, 3)}
HISTORY = [
    {"epoch": 1, "phase": "warmup", "round": 0, "loss": 0.9, "task_loss": 0.5, "val_p_at_1": 11.0, "edges_kept": {}},
    {"epoch": 2, "phase": "retrain", "round": 1, "loss": 0.7, "val_p_at_1": None, "edges_kept": {"links.label": 0.8}},
    {"epoch": 3, "phase": "retrain", "round": 2, "loss": 0.6, "val_p_at_1": 15.0, "edges_kept": {"links.label": 0.7}},
]
REPORT = Report(
    lead="4 test documents, 60 labels.",
    metrics=METRICS,
    labels={"overall": 60, "head": 10, "torso": 20, "tail": 30},
    bins=BINS,
    bins_note="Bins of equal volume.",
    facts=[("propensity", "A = 0.55, B = 1.5, N = 10")],
    history=HISTORY,
    graphs=[GraphSize("links, documents", 10, 5, 40, 30)],
    samples=[
        Sample(
            "d<1>",
            'a <script>alert("x")</script> document',
            truth=[SampleLabel("salt & pepper", 3, True)],
            run=[SampleLabel("salt & pepper", 3, True), SampleLabel("sugar", 1234, False)],
            base=None,
        )
    ],
)


class PageParser(HTMLParser):
    """Collects tags and link targets, and checks that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"unbalanced {tag}"


def render_page(report: Report) -> str:
    return render(report, {name: png(figure) for name, figure in make_figures(report).items()})


def test_page_is_self_contained_and_well_formed() -> None:
    html = render_page(REPORT)
    parser = PageParser()
    parser.feed(html)
    assert not parser.open
    assert "link" not in parser.tags and "script" not in parser.tags
    assert len(parser.targets) == 3 and all(target.startswith("data:image/png;base64,") for target in parser.targets)
    assert not re.search(r"https?://|@import|url\(", html)


def test_texts_are_escaped_and_hits_marked() -> None:
    html = render_page(REPORT)
    assert "&lt;script&gt;" in html and "<script>" not in html
    hits = re.findall(r'<li class="hit">.*?<span class="label">(.*?)</span>', html, re.S)
    assert hits == ["salt &amp; pepper", "salt &amp; pepper"]
    assert "1,234" in html and "BASE" not in html


def test_gains_below_two_standard_errors_are_grey() -> None:
    base = {key: value - 1.25 for key, value in METRICS.items()} | {"tail/p_at_1": METRICS["tail/p_at_1"] + 2}
    gains = {key: Gain(1.25, 0.6) for key in METRICS} | {"tail/p_at_1": Gain(-2.0, 0.5), "p_at_5": Gain(1.25, 0.63)}
    del gains["head/p_at_1"]
    html = render_page(
        replace(REPORT, base=base, base_bins=BINS, gains=gains, error_note="paired over 4 test documents")
    )
    cells = re.findall(r'<span class="delta (.*?)">(.*?)</span>', html)
    assert cells.count(("even", "+1.25 ±0.63")) == 1 and cells.count(("down", "−2.00 ±0.50")) == 1
    assert cells.count(("even", "+1.25")) == 1, "a gain with an unknown error is not significant"
    assert set(cells) == {("even", "+1.25 ±0.63"), ("down", "−2.00 ±0.50"), ("even", "+1.25"), ("up", "+1.25 ±0.60")}
    assert "standard error,\npaired over 4 test documents; gains below two standard errors are grey" in html
    plain = render_page(REPORT).split("</style>")[1]
    assert "delta" not in plain and "standard error" not in plain


def test_figures_are_drawn_for_the_values_in_the_history() -> None:
    assert set(make_figures(REPORT)) == {"quantiles", "training", "edges"}
    assert set(make_figures(replace(REPORT, history=HISTORY[:1]))) == {"quantiles", "training"}
    assert set(make_figures(replace(REPORT, history=[{"epoch": 1}]))) == {"quantiles"}
    assert "The model has no training history" in render_page(replace(REPORT, history=[]))


def test_edge_curve_starts_at_100_percent_and_has_a_point_per_round() -> None:
    (line,) = make_figures(REPORT)["edges"].axes[0].get_lines()
    assert list(line.get_xdata()) == [0, 1, 2]
    assert [round(y) for y in line.get_ydata()] == [100, 80, 70]


def test_training_figure_skips_missing_values_and_marks_rounds() -> None:
    loss, validation = make_figures(REPORT)["training"].axes
    assert list(validation.get_lines()[0].get_xdata()) == [1, 3]
    dashed = [line for line in loss.get_lines() if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [1.5, 2.5]


def test_quantile_figure_shows_base_next_to_run() -> None:
    base_bins = {name: dict.fromkeys(row, 1.0) for name, row in BINS.items()}
    axes = make_figures(replace(REPORT, base=METRICS, base_bins=base_bins))["quantiles"].axes[0]
    base, run = axes.containers
    assert [bar.get_height() for bar in base] == [1.0] * 3
    assert [bar.get_height() for bar in run] == [5.0, 10.0, 15.0]


def test_equal_reports_give_equal_bytes() -> None:
    assert render_page(REPORT) == render_page(REPORT)


def test_weights_are_drawn_if_they_changed() -> None:
    def history(*values: float) -> list[dict[str, object]]:
        return [{"epoch": i, "loss": 1.0, "lambda": {"task": 1.0, "links.label": v}} for i, v in enumerate(values, 1)]

    titles = [axes.get_title(loc="left") for axes in training_figure(history(0.1, 0.2, 0.3)).axes]
    assert titles[-1] == "Regularisation weights λ"
    assert len(training_figure(history(0.1, 0.1)).axes) == len(titles) - 1


def test_study_figure_has_a_minimum_axis_span() -> None:
    rows = {name: ({"near": near, "far": far}, {}) for name, near, far in (("a", 50.0, 10.0), ("b", 50.01, 60.0))}
    near, far = (axes.get_xlim() for axes in study_figure(rows, {"Near": "near", "Far": "far"}).axes)
    assert near[1] - near[0] >= 3 and near[0] < 50 < near[1]
    assert far[0] < 10 and far[1] > 60


def test_code_version_covers_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.stages.PACKAGE", tmp_path)
    monkeypatch.setattr(Stage, "code_paths", lambda self: [tmp_path / "evaluation"])
    copy = tmp_path / "evaluation" / TEMPLATE.name
    copy.parent.mkdir()
    copy.write_bytes(TEMPLATE.read_bytes())
    before = STAGES["evaluate"].code_version()
    copy.write_text(copy.read_text() + "<!-- changed -->")
    assert STAGES["evaluate"].code_version() != before
