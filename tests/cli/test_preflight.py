"""What a later stage needs is checked before anything trains, and nothing is written when it is refused."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ramen.artifacts import create_drafts
from ramen.cli import cli
from ramen.errors import ArtifactError
from ramen.files import check_room, check_writable

USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    (tmp_path / "file").touch()
    return tmp_path


def invoke(source: Path, command: str, *words: str) -> Result:
    sets = [f"--set=data.path={source}", "--set=data.source=xc", "--set=encoder.name=tiny"]
    return CliRunner().invoke(cli, [command, "--preset", "demo", *sets, *words], catch_exceptions=False)


def refused(done: Result) -> str:
    """The one error line of a command that failed."""
    assert done.exit_code != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "publish-index registers in MLflow, but tracking is off: unset RAMEN_TRACKING"),
        (("--set=index.model=", "--set=scoring.base=nowhere"), "scoring.base = nowhere: .*no manifest.json"),
        (("--set=index.model=", "--set=encoder.name=./nowhere"), "encoder './nowhere': is not a directory"),
        (("--set=index.model=", "--set=encoder.name=file"), "encoder 'file': is not a directory"),
        (("--set=index.model=", "--set=encoder.name=."), "has no config.json"),
        (("--set=index.model=", "--set=index.kind=PQ7", "--set=encoder.name=tiny"), "index.kind = PQ7: .* of width 32"),
        (("--set=index.gate={p_at_7: 0.0}",), "index.gate: p_at_7: not measured by `ramen evaluate`; did you mean"),
        (
            ("--set=index.model=", "--set=encoder.name=nobody/none"),
            "encoder 'nobody/none': is neither .* to the directory",
        ),
        (("--set=index.model=", "--set=objective.anchor_sets=[link]"), "'link' is no anchor set of .* category, links"),
        (
            ("--set=index.model=", "--set=objective.lambdas.link.label=1"),
            "lambdas.link.label: .* did you mean links.label",
        ),
        (
            ("--set=index.model=", "--set=guidance.enabled=true", "--set=guidance.anchor_sets=[a]"),
            "guidance.anchor_sets: 'a' is no anchor set",
        ),
        (("--set=index.model=", "--out=file"), "file/base: cannot be written .*is not a directory"),
        (("--set=index.model=", "--out=file/deeper"), "cannot be written"),
        (("--set=index.model=", f"--out={'a' * 300}"), "cannot be written .File name too long"),
    ],
)
def test_run_is_refused_before_it_begins(
    words: tuple[str, ...], said: str, tiny_xc_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert re.search(said, refused(invoke(tiny_xc_folder, "run", *words)))
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set=index.model=a/b",), "index.model: 'a/b': expected a name without /"),
        (("--set=index.alias=latest",), "index.alias: 'latest': expected a name"),
    ],
)
def test_names_that_the_registry_does_not_take_are_refused(
    words: tuple[str, ...], said: str, tiny_xc_folder: Path
) -> None:
    assert said in refused(invoke(tiny_xc_folder, "run", *words)) and not Path("artifacts").exists()


@pytest.mark.parametrize("metrics", ["file/metrics.json", "file/deeper/metrics.json", f"{'a' * 300}.json"])
def test_stage_is_refused_when_its_metrics_cannot_be_written(metrics: str, tiny_xc_folder: Path, here: Path) -> None:
    said = refused(invoke(tiny_xc_folder, "ingest", "--metrics", metrics))
    assert said.startswith(f"error: --metrics {metrics}: cannot be written") and "Errno" not in said
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ("{name: a}", ("--seeds=1e30",), "--seeds 1e30: expected whole numbers"),
        ("{name: a}", ("--seeds=0,-1",), "--seeds 0,-1: expected whole numbers of at least 0"),
        ("{name: a}", ("--seeds=٣",), "expected whole numbers of at least 0"),
        ("{name: a}", (f"--seeds={'9' * 5000}",), "expected whole numbers of at least 0"),
        ("{name: a}", ("--rows=b",), "study mine has no row 'b'"),
        ("{name: a}", ("--rows=",), "study mine has no row ''"),
        ("{name: a, set: [scoring.base=nowhere]}", (), "row 'a': scoring.base = nowhere"),
        ("{name: a, set: [encoder.name=./nowhere]}", (), "row 'a': encoder './nowhere'"),
        ("{name: a, set: [training.epochs=0]}", (), "row 'a': training.epochs"),
        ("{name: a, peer: nobody}", (), "row 'a': peer: "),
        (
            "{name: a, peer: sentence-transformers}",
            (),
            "trains for a given time; set `time_of` to the name of",
        ),
        ("{name: a}", ("--out=file",), "cannot be written"),
        ("{name: a}", ("--out=taken",), "taken/mine.md: is a directory"),
    ],
)
def test_study_is_refused_before_it_begins(
    row: str, words: tuple[str, ...], said: str, tiny_xc_folder: Path, here: Path
) -> None:
    (here / "mine.yaml").write_text(f"title: Mine\nrows:\n  - {row}\n")
    (here / "taken" / "mine.md").mkdir(parents=True)
    assert said in refused(invoke(tiny_xc_folder, "ablate", "--study=mine.yaml", "--seeds=0", *words))
    assert not list(here.rglob("cache"))


def test_output_that_a_knob_reads_is_not_replaced(here: Path) -> None:
    for name, kind in (("dataset", "dataset"), ("evaluation", "evaluation")):
        with create_drafts({kind: here / name}, sections={}, inputs={}, work=here / "work"):
            pass
    named = {"scoring.base": here / "evaluation"}
    with (
        pytest.raises(
            ArtifactError, match="overlaps the directory of scoring.base; give evaluation another --evaluation"
        ),
        create_drafts({"evaluation": here / "evaluation"}, sections={}, inputs={}, work=here / "work", named=named),
    ):
        pass


def test_outputs_on_one_disk_need_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: USAGE(0, 0, 10_000_000))
    check_room({tmp_path / "a": 6_000_000})
    with pytest.raises(ArtifactError, match="10 MB free on its disk, expected at least 12 MB"):
        check_room({tmp_path / "a": 6_000_000, tmp_path / "b" / "c": 6_000_000})


def test_checking_a_path_leaves_nothing_there(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deeper" / "file")
    assert not list(tmp_path.iterdir())
