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
def evaluated(tmp_path: Path) -> Any:
    """Track a pipeline that was evaluated: name, contributions to P@1, dataset, sections."""

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


def compare(*words: str) -> str:
    done = CliRunner().invoke(cli, ["compare", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def found(*words: str) -> dict[str, Any]:
    return {run["run_id"]: run for run in json.loads(compare(*words, "--json"))}


def cluster_error(differences: np.ndarray) -> float:
    sums = np.bincount(GROUPS, differences - differences.mean())
    return float(np.sqrt(6 / 5 * np.square(sums).sum()) / 20)


def test_further_runs_are_compared_with_the_first(evaluated: Any) -> None:
    base, ramen = evaluated("base", BASE, lr=0.1, epochs=4), evaluated("ramen", BETTER, lr=0.2, epochs=4)
    printed = compare("base", "ramen")
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    names = [row[0] for row in rows[2:6]]
    assert names == ["base", "ramen", "gain", "s.e."], "in the order given, though ramen is newer"
    assert rows[4][1:5] == [ramen[:8], "over", base[:8], "+25.00"]
    assert rows[5][1] == f"{cluster_error(BETTER - BASE):.2f}"
    assert "clustered by group" in printed
    parameters = printed[printed.index("Parameters that differ") :]
    assert ["training.lr", "0.1", "0.2"] in [line.split() for line in parameters.splitlines()]
    assert "training.epochs" not in parameters and "data.path" not in parameters
    both = found("base", "ramen")
    assert both[base]["gain"] is None and both[ramen]["gain"]["over"] == base
    assert both[ramen]["gain"]["points"] == pytest.approx(
        {"p_at_1": 25, "tail/p_at_1": 12.5, "psp_at_1": 7.5}, rel=1e-5
    )
    assert both[ramen]["gain"]["errors"]["p_at_1"] == pytest.approx(cluster_error(BETTER - BASE), rel=1e-5)
    assert both[ramen]["metrics"]["p_at_1"] == 50 and both[ramen]["params"]["training.lr"] == "0.2"
    reverse = found("ramen", "base")
    assert reverse[base]["gain"]["points"]["p_at_1"] == pytest.approx(-25)


def test_a_name_stands_for_its_newest_run_that_was_evaluated(evaluated: Any) -> None:
    evaluated("base", SAME)
    newest = evaluated("base", BASE)
    runs = [evaluated("ramen", BETTER) for _ in range(2)]
    with start_pipeline_run("base", ""):
        pass
    gains = {run["run_id"]: run["gain"] for run in found("base", "ramen").values() if run["gain"]}
    assert set(gains) == set(runs) and {gain["over"] for gain in gains.values()} == {newest}
    with start_pipeline_run("failed", ""):
        pass
    assert "no gain: fewer than two of these runs were evaluated" in compare("failed", "ramen")


def test_without_names_the_newest_is_compared_with_the_one_before(evaluated: Any) -> None:
    runs = [evaluated("old", BASE), evaluated("base", SAME), evaluated("ramen", BETTER)]
    with start_pipeline_run("failed", ""):
        pass  # has no metrics
    gains = {run["run_id"]: run["gain"] for run in found().values() if run["gain"]}
    assert set(gains) == {runs[2]} and gains[runs[2]]["over"] == runs[1]
    assert [line.split()[0] for line in compare().splitlines() if "over" in line] == ["gain"]
    assert "No parameter differs." in compare()


def test_runs_of_different_data_have_no_gain(evaluated: Any) -> None:
    evaluated("base", BASE, data="e" * 64)
    ramen = evaluated("ramen", BETTER)
    printed = compare("base", "ramen")
    assert "s.e." not in printed and " over " not in printed
    assert f"no gain: ramen {ramen[:8]} and base " in printed and "evaluated on different datasets" in printed
    assert "over" not in compare() and "no gain" not in compare(), "nobody asked for it"
    assert found("base", "ramen")[ramen]["gain"]["points"] == {}


def test_runs_without_per_document_results_have_gains_without_errors(evaluated: Any) -> None:
    base, ramen = evaluated("base", BASE, stored=False), evaluated("ramen", BETTER, stored=False, a=0.6)
    printed = compare("base", "ramen")
    assert "+25.00" in printed and "s.e." not in printed
    assert f"no standard errors: ramen {ramen[:8]} and base {base[:8]} stored no per-document results" in printed
    gain = found("base", "ramen")[ramen]["gain"]
    assert gain["points"] == {"p_at_1": 25, "tail/p_at_1": 12.5} and gain["errors"] == {}, "PSP of other propensities"


def test_propensities_that_differ_leave_psp_without_a_gain(evaluated: Any) -> None:
    evaluated("base", BASE)
    ramen = evaluated("ramen", BETTER, a=0.6)
    assert set(found("base", "ramen")[ramen]["gain"]["points"]) == {"p_at_1", "tail/p_at_1"}


def test_dataset_of_a_cached_evaluation_is_read_from_its_file(evaluated: Any) -> None:
    evaluated("base", BASE)
    ramen = evaluated("ramen", BETTER, inputs=False)
    other = evaluated("other", BETTER, inputs=False, stored=False)
    gains = {run_id: run["gain"] for run_id, run in found("base", "ramen", "other").items()}
    assert gains[ramen]["points"]["p_at_1"] == 25 and gains[ramen]["errors"]
    assert gains[other]["points"] == {} and "is unknown" in gains[other]["note"]


def test_a_terminal_shows_uncertain_gains_grey(evaluated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated("base", BASE)
    evaluated("ramen", SAME)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b[2m+5.00\x1b[0m" in compare("base", "ramen")
