"""Checks before training: a run that would fail later is refused, and writes nothing."""

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
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    (tmp_path / "file").touch()
    return tmp_path


def invoke(source: Path, command: str, *words: str) -> Result:
    sets = [f"--set=data.path={source}", "--set=data.source=xc", "--set=encoder.name=tiny"]
    return CliRunner().invoke(cli, [command, "--preset", "demo", *sets, *words], catch_exceptions=False)


def read_error(done: Result) -> str:
    """Return the only error line of a failed command."""
    assert done.exit_code != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


@pytest.mark.parametrize(
    ("words", "error"),
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
def test_run_is_refused_before_anything_is_written(
    words: tuple[str, ...], error: str, tiny_xc_folder: Path, working_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert re.search(error, read_error(invoke(tiny_xc_folder, "run", *words)))
    assert [path.name for path in working_directory.iterdir()] == ["file"]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--set=index.model=a/b",), "index.model: 'a/b': expected a name without /"),
        (("--set=index.alias=latest",), "index.alias: 'latest': expected a name"),
    ],
)
def test_invalid_registry_names_are_refused(words: tuple[str, ...], error: str, tiny_xc_folder: Path) -> None:
    assert error in read_error(invoke(tiny_xc_folder, "run", *words)) and not Path("artifacts").exists()


@pytest.mark.parametrize("metrics", ["file/metrics.json", "file/deeper/metrics.json", f"{'a' * 300}.json"])
def test_stage_is_refused_when_its_metrics_cannot_be_written(
    metrics: str, tiny_xc_folder: Path, working_directory: Path
) -> None:
    error = read_error(invoke(tiny_xc_folder, "ingest", "--metrics", metrics))
    assert error.startswith(f"error: --metrics {metrics}: cannot be written") and "Errno" not in error
    assert [path.name for path in working_directory.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("row", "words", "error"),
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
def test_study_is_refused_before_anything_is_computed(
    row: str, words: tuple[str, ...], error: str, tiny_xc_folder: Path, working_directory: Path
) -> None:
    (working_directory / "mine.yaml").write_text(f"title: Mine\nrows:\n  - {row}\n")
    (working_directory / "taken" / "mine.md").mkdir(parents=True)
    assert error in read_error(invoke(tiny_xc_folder, "ablate", "--study=mine.yaml", "--seeds=0", *words))
    assert not list(working_directory.rglob("cache"))


def test_output_path_that_a_knob_reads_is_refused(working_directory: Path) -> None:
    for name, kind in (("dataset", "dataset"), ("evaluation", "evaluation")):
        with create_drafts({kind: working_directory / name}, sections={}, inputs={}, work=working_directory / "work"):
            pass
    named = {"scoring.base": working_directory / "evaluation"}
    error = "overlaps the directory of scoring.base; give evaluation another --evaluation"
    with (
        pytest.raises(ArtifactError, match=error),
        create_drafts(
            {"evaluation": working_directory / "evaluation"},
            sections={},
            inputs={},
            work=working_directory / "work",
            named=named,
        ),
    ):
        pass


def test_free_space_is_checked_for_the_sum_of_outputs_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: USAGE(0, 0, 10_000_000))
    check_room({tmp_path / "a": 6_000_000})
    with pytest.raises(ArtifactError, match="10 MB free on its disk, expected at least 12 MB"):
        check_room({tmp_path / "a": 6_000_000, tmp_path / "b" / "c": 6_000_000})


def test_check_writable_creates_no_files(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deeper" / "file")
    assert not list(tmp_path.iterdir())
