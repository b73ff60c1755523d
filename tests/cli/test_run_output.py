"""The results that `ramen run` prints, and the base run that it compares with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramen.base_run import base_config, graph_uses, with_base_evaluation
from ramen.cli import cli, runs, tables
from ramen.config import Config, resolve
from ramen.files import write_texts
from ramen.publishing.registry import tracking_uri

OURS = {"p_at_1": 40.0, "psp_at_5": 30.5, "head/p_at_1": 10.0, "torso/p_at_1": 12.0, "tail/p_at_1": 18.0}
BASE = {"p_at_1": 38.25, "psp_at_5": 31.0, "head/p_at_1": 10.0, "torso/p_at_1": 13.0, "tail/p_at_1": 15.25}


def write_artifacts(folder: Path, metrics: dict[str, float], registered: dict[str, object] | None) -> dict[str, Path]:
    """Write the artifacts that the results are read from."""
    for name in ("evaluation", "retriever", "dataset"):
        (folder / name).mkdir(parents=True)
    (folder / "evaluation" / "metrics.json").write_text(json.dumps(metrics))
    (folder / "retriever" / "receipt.json").write_text(json.dumps({"registered": registered}))
    write_texts(folder / "dataset" / "texts" / "test.parquet", ["a", "b"], [" ", "mutt's mail"])
    return {name: folder / name for name in ("evaluation", "retriever", "dataset")}


def test_comparison_has_rows_for_base_ramen_and_gain() -> None:
    rows = tables.comparison_rows(BASE, OURS)
    p1 = 2 + list(tables.COLUMNS).index("P@1")
    psp5 = 2 + list(tables.COLUMNS).index("PSP@5")
    assert [row[:2] for row in rows[:3]] == [["overall", "base"], ["", "ramen"], ["", "gain"]]
    assert [row[p1] for row in rows] == [
        *("38.25", "40.00", "+1.75"),
        *("10.00", "10.00", "+0.00"),
        *("13.00", "12.00", "-1.00"),
        *("15.25", "18.00", "+2.75"),
    ]
    assert [row[psp5] for row in rows[:4]] == ["31.00", "30.50", "-0.50", ""], "a metric without a value stays empty"
    assert [row[:2] for row in tables.comparison_rows(None, OURS)] == [
        [part, "ramen"] for part in ("overall", "head", "torso", "tail")
    ]


def test_gains_below_two_standard_errors_are_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"gain_se/p_at_1": 0.9, "gain_se/psp_at_5": 0.2, "gain_se/torso/p_at_1": 0.6, "gain_se/tail/p_at_1": 1.0}
    rows = tables.comparison_rows(BASE, OURS | errors)
    p1 = 2 + list(tables.COLUMNS).index("P@1")
    psp5 = 2 + list(tables.COLUMNS).index("PSP@5")
    assert [row[1] for row in rows] == ["base", "ramen", "gain", "s.e."] * 4
    assert rows[2][p1] == "[dim]+1.75[/dim]" and rows[3][p1] == "[dim]0.90[/dim]"
    assert rows[2][psp5] == "[bold red]-0.50[/bold red]" and rows[14][p1] == "[bold green]+2.75[/bold green]"
    assert rows[6][p1] == "+0.00" and rows[7][p1] == "", "a gain without a standard error has no colour"
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setenv("COLUMNS", "100")
    tables.print_evaluation(OURS | errors, BASE)
    assert (
        "+1.75" in stdout.getvalue() and "[dim]" not in stdout.getvalue() and "clustered by group" in stdout.getvalue()
    )


def test_rows_of_peers_come_before_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {"peers/untrained/p_at_1": 20.5, "peers/tfidf/p_at_1": 25.25, "peers/tfidf/r_at_100": 70.0}
    assert [row[:3] for row in tables.peer_rows({**OURS, **peers})] == [
        ["", "tfidf", "25.25"],
        ["", "untrained", "20.50"],
    ]
    assert not tables.peer_rows(OURS)
    for base in (BASE, None):
        tables.print_evaluation({**OURS, **peers}, base)
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if "." in line]
        assert lines[0][:3] == ["overall", "tfidf", "25.25"] and lines[1][0] == "untrained"
        assert lines[2][0] == ("base" if base else "ramen")


def test_results_show_report_version_and_example_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"name": "ramen", "version": 4, "alias": "champion", "refused": None}
    ours, base = write_artifacts(tmp_path / "a", OURS, entry), write_artifacts(tmp_path / "b", BASE, None)
    runs._show_results(ours, base, resolve(preset="demo"))
    text = capsys.readouterr().out
    assert f"{tmp_path}/a/evaluation/report.html" in text
    assert "ramen version 4, alias champion" in text
    assert """ramen query 'mutt'"'"'s mail' -k 5\n""" in text
    assert f"mlflow ui --backend-store-uri {tracking_uri()}" in text and "+1.75" in text and "R@100" in text


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (None, "not registered (index.model is empty)"),
        (
            {"name": "m", "version": 2, "alias": None, "refused": "worse"},
            "m version 2; the alias did not move: worse",
        ),
        ({"name": "m", "version": 2, "alias": None, "refused": None}, "m version 2"),
        (
            {"name": "m", "version": 2, "alias": "champion", "refused": None, "note": "not compared"},
            "m version 2, alias champion (not compared)",
        ),
    ],
)
def test_registered_version_is_described_with_alias_and_gate(
    entry: dict[str, object] | None, line: str, tmp_path: Path
) -> None:
    assert runs._registered_version(write_artifacts(tmp_path, OURS, entry)["retriever"]).endswith(line)


def test_base_config_differs_only_in_graphs_peers_and_registration() -> None:
    config = resolve(preset="demo")
    ours, base = config.sections(), base_config(config).sections()
    changed = {(name, key) for name, values in ours.items() for key in values if values[key] != base[name][key]}
    assert changed == {("objective", "graphs"), ("scoring", "peers"), ("index", "model")}
    assert base["objective"]["graphs"] is False and base["index"]["model"] == ""
    config = resolve(preset="demo", sets=["guidance.enabled=true", "objective.augment_labels=true"])
    base_of_all = base_config(config)
    assert len(graph_uses(config)) == 3 and not graph_uses(base_of_all)
    assert not base_of_all.objective.augment_labels, "label augmentation reads the graphs"
    assert not base_of_all.guidance.enabled, "an oracle reads the graphs"


def test_base_evaluation_is_set_to_the_target_of_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache compares paths, so it would not notice that a link points to another evaluation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store" / "run-1").mkdir(parents=True)
    (tmp_path / "evaluation").symlink_to("store/run-1")
    config = resolve(preset="demo")
    assert with_base_evaluation(config, Path("evaluation")).scoring.base == "store/run-1"
    assert with_base_evaluation(config, Path("x")).training == config.training


@pytest.mark.parametrize(
    ("sets", "arms"),
    [
        ([], [("base", False, False, ""), ("ramen", True, False, "ramen")]),
        (["guidance.enabled=true"], [("base", False, False, ""), ("ramen", True, True, "ramen")]),
        (
            ["objective.graphs=false", "guidance.enabled=true"],
            [("base", False, False, ""), ("ramen", False, True, "ramen")],
        ),
        (["objective.graphs=false"], [("base", False, False, "ramen")]),
    ],
)
def test_run_with_graphs_or_oracle_runs_its_base_first(
    sets: list[str], arms: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def run_arm(arm: str, config: Config, out: Path, announce: object) -> dict[str, Path]:
        seen.append((arm, config.objective.graphs, config.guidance.enabled, config.index.model))
        return {"evaluation": out}

    monkeypatch.setattr("pipelines.local.run_arm", run_arm)
    monkeypatch.setattr(runs, "_show_results", lambda *_: None)
    monkeypatch.setattr("ramen.data.sources.fetch_if_missing", lambda _: False)
    words = ["run", "--preset", "demo", "--out", str(tmp_path), *(f"--set={text}" for text in sets)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0 and seen == arms
