"""`ramen compare`: gains with standard errors between runs of one dataset, and the parameters that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ramen.cli import cli
from ramen.evaluation.uncertainty import PER_DOCUMENT, PerDocument
from ramen.tracking import open_tracker, start_pipeline_run

pytestmark = pytest.mark.usefixtures("store")

GROUPS = np.repeat(np.arange(6), [8, 4, 3, 2, 2, 1])
BASE, BETTER, SAME = (np.repeat(column, 5) * 100.0 for column in ([0, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 0]))
SAME[0] = 100.0


@pytest.fixture
def track_evaluation(tmp_path: Path) -> Any:
    """Return a function that tracks an evaluated pipeline run and returns its id."""

    def run(
        name: str, p1: np.ndarray, *, data: str = "d" * 64, stored: bool = True, inputs: bool = True, **sets: Any
    ) -> str:
        scoring = {"propensity_a": sets.pop("a", 0.55)}
        file = tmp_path / PER_DOCUMENT
        weight = np.linspace(0.5, 1.5, 20) ** scoring["propensity_a"]
        values = {"p_at_1": p1, "tail/p_at_1": p1 / 2, "psp_at_1": p1 * 0.3}
        PerDocument(
            [str(i) for i in range(20)], values, {"psp_at_1": weight / weight.mean()}, GROUPS, {"dataset": data}
        ).write(file)
        sections = {"data": {"path": "data/things"}, "training": sets, "scoring": scoring}
        with start_pipeline_run(name, "", {}, sections) as parent, open_tracker("evaluate") as track:
            if inputs:
                track.dataset("dataset", data, "artifacts/dataset")
            track.headline({key: float(each.mean()) for key, each in values.items()})
            if stored:
                track.artifact(file)
        assert parent is not None
        return parent

    return run


def run_compare(*words: str) -> str:
    result = CliRunner().invoke(cli, ["compare", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def compare_json(*words: str) -> dict[str, Any]:
    return {run["run_id"]: run for run in json.loads(run_compare(*words, "--json"))}


def compute_cluster_error(differences: np.ndarray) -> float:
    sums = np.bincount(GROUPS, differences - differences.mean())
    return float(np.sqrt(6 / 5 * np.square(sums).sum()) / 20)


def test_named_runs_are_compared_with_the_first(track_evaluation: Any) -> None:
    base, ramen = track_evaluation("base", BASE, lr=0.1, epochs=4), track_evaluation("ramen", BETTER, lr=0.2, epochs=4)
    printed = run_compare("base", "ramen")
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    names = [row[0] for row in rows[2:6]]
    assert names == ["base", "ramen", "gain", "s.e."], "in the order given, though ramen is newer"
    assert rows[4][1:5] == [ramen[:8], "over", base[:8], "+25.00"]
    assert rows[5][1] == f"{compute_cluster_error(BETTER - BASE):.2f}"
    assert "clustered by group" in printed
    parameters = printed[printed.index("Parameters that differ") :]
    assert ["training.lr", "0.1", "0.2"] in [line.split() for line in parameters.splitlines()]
    assert "training.epochs" not in parameters and "data.path" not in parameters
    both = compare_json("base", "ramen")
    assert both[base]["gain"] is None and both[ramen]["gain"]["over"] == base
    assert both[ramen]["gain"]["points"] == pytest.approx(
        {"p_at_1": 25, "tail/p_at_1": 12.5, "psp_at_1": 7.5}, rel=1e-5
    )
    assert both[ramen]["gain"]["errors"]["p_at_1"] == pytest.approx(compute_cluster_error(BETTER - BASE), rel=1e-5)
    assert both[ramen]["metrics"]["p_at_1"] == 50 and both[ramen]["params"]["training.lr"] == "0.2"
    reverse = compare_json("ramen", "base")
    assert reverse[base]["gain"]["points"]["p_at_1"] == pytest.approx(-25)


def test_name_selects_its_newest_evaluated_run(track_evaluation: Any) -> None:
    track_evaluation("base", SAME)
    newest = track_evaluation("base", BASE)
    runs = [track_evaluation("ramen", BETTER) for _ in range(2)]
    with start_pipeline_run("base", ""):
        pass
    gains = {run["run_id"]: run["gain"] for run in compare_json("base", "ramen").values() if run["gain"]}
    assert set(gains) == set(runs) and {gain["over"] for gain in gains.values()} == {newest}
    with start_pipeline_run("failed", ""):
        pass
    assert "no gain: fewer than two of these runs were evaluated" in run_compare("failed", "ramen")


def test_newest_run_is_compared_with_the_previous_by_default(track_evaluation: Any) -> None:
    runs = [track_evaluation("old", BASE), track_evaluation("base", SAME), track_evaluation("ramen", BETTER)]
    with start_pipeline_run("failed", ""):
        pass  # has no metrics
    gains = {run["run_id"]: run["gain"] for run in compare_json().values() if run["gain"]}
    assert set(gains) == {runs[2]} and gains[runs[2]]["over"] == runs[1]
    assert [line.split()[0] for line in run_compare().splitlines() if "over" in line] == ["gain"]
    assert "No parameter differs." in run_compare()


def test_runs_on_different_datasets_have_no_gain(track_evaluation: Any) -> None:
    track_evaluation("base", BASE, data="e" * 64)
    ramen = track_evaluation("ramen", BETTER)
    printed = run_compare("base", "ramen")
    assert "s.e." not in printed and " over " not in printed
    assert f"no gain: ramen {ramen[:8]} and base " in printed and "evaluated on different datasets" in printed
    assert "over" not in run_compare() and "no gain" not in run_compare(), "no note for runs that were not named"
    assert compare_json("base", "ramen")[ramen]["gain"]["points"] == {}


def test_runs_without_per_document_results_have_gains_without_errors(track_evaluation: Any) -> None:
    base, ramen = track_evaluation("base", BASE, stored=False), track_evaluation("ramen", BETTER, stored=False, a=0.6)
    printed = run_compare("base", "ramen")
    assert "+25.00" in printed and "s.e." not in printed
    assert f"no standard errors: ramen {ramen[:8]} and base {base[:8]} stored no per-document results" in printed
    gain = compare_json("base", "ramen")[ramen]["gain"]
    assert gain["points"] == {"p_at_1": 25, "tail/p_at_1": 12.5} and gain["errors"] == {}, "no PSP with different a"


@pytest.mark.slow
def test_psp_with_different_propensities_has_no_gain(track_evaluation: Any) -> None:
    track_evaluation("base", BASE)
    ramen = track_evaluation("ramen", BETTER, a=0.6)
    assert set(compare_json("base", "ramen")[ramen]["gain"]["points"]) == {"p_at_1", "tail/p_at_1"}


def test_dataset_of_a_cached_evaluation_is_read_from_its_file(track_evaluation: Any) -> None:
    track_evaluation("base", BASE)
    ramen = track_evaluation("ramen", BETTER, inputs=False)
    other = track_evaluation("other", BETTER, inputs=False, stored=False)
    gains = {run_id: run["gain"] for run_id, run in compare_json("base", "ramen", "other").items()}
    assert gains[ramen]["points"]["p_at_1"] == 25 and gains[ramen]["errors"]
    assert gains[other]["points"] == {} and "is unknown" in gains[other]["note"]


def test_terminal_shows_insignificant_gains_in_grey(track_evaluation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    track_evaluation("base", BASE)
    track_evaluation("ramen", SAME)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b[2m+5.00\x1b[0m" in run_compare("base", "ramen")
