"""Error lines and exit codes of commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ramen.cli import cli
from ramen.errors import RamenError


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "line", "code"),
    [
        ("ingst", "no command 'ingst'; did you mean ingest?", 2),
        ("qwertz", "no command 'qwertz'; `ramen --help` lists them", 2),
        ("warmup --set training.epoch=3", "error: --set: training.epoch: unknown; did you mean epochs?", 2),
        ("warmup --set trining.lr=3", "error: --set: trining: unknown section; did you mean training?", 2),
        ("ingest --set base.name=ancee", "error: base.name = 'ancee': unknown base algorithm; did you mean ance?", 2),
        (
            "config --set index.kind=foo",
            "error: index.kind: expected auto, flat, hnsw, ivf, or a faiss factory string",
            2,
        ),
        (
            'config --set index.gate={"psp5":0}',
            "error: index.gate: 'psp5' is not a metric; expected one such as",
            2,
        ),
        ("warmup --set training.lr=3", "error: training.lr = 3: input should be less than or equal to 1", 2),
        ("warmup --set training.lr", "error: --set training.lr: expected section.key=value", 2),
        (
            "warmup --set objective.anchor_sets=links,more",
            "error: objective.anchor_sets = 'links,more': expected a list, as in [links,more]",
            2,
        ),
        ("config --preset debain", "error: preset 'debain': unknown; did you mean debian?", 2),
        ("config --params no.yaml", "error: no.yaml: no such file", 2),
        ("run --set walk.restart=0", "error: walk.restart = 0: input should be greater than 0", 2),
        ("ingest --source xc --path nowhere", "error: nowhere: no such", 3),
        (
            "ingest --source debian --path .",
            "error: .: data.source = debian reads a file, found a folder; for a folder in",
            3,
        ),
        ("ingest --source debian --path none.gz", "error: none.gz: no such file or folder; run `ramen fetch`", 3),
        ("ingest --source abc", "error: data.source = 'abc': input should be 'debian' or 'xc'", 2),
        ("run", "error: no configuration: no params.yaml in this directory; give --preset demo (some minutes)", 2),
        ("ablate --study bases", "error: no configuration: no params.yaml in this directory", 2),
        ("build-graph", "error: artifacts/dataset: no manifest.json: not a finished dataset", 4),
        ("evaluate --model m", "error: artifacts/dataset: no manifest.json", 4),
        ("query x -k 0", "Invalid value for '-k'", 2),
        ("query", "give a TEXT, or --input and --output", 2),
        ("query x --input a --output b.parquet", "give a TEXT, or --input and --output", 2),
        ("query --input a", "give a TEXT, or --input and --output", 2),
        ("query --input a --output b.xlsx", "error: b.xlsx: answers cannot be written as .xlsx; use .parquet, .csv", 1),
        ("query --input none.txt --output b.parquet", "error: none.txt: cannot be read (none.txt: No such file", 3),
    ],
)
def test_error_is_one_line_with_its_exit_code_and_writes_nothing(arguments: str, line: str, code: int) -> None:
    result = invoke(*arguments.split())
    assert line in result.stderr
    assert result.exit_code == code
    assert result.stdout == ""
    assert list(Path().rglob("manifest.json")) == [] and not Path("metrics").exists()


@pytest.mark.parametrize(
    ("arguments", "line", "code"),
    [
        (
            "ingest --source xc --path file",
            "error: file: data.source = xc reads a folder, found a file; set data.path",
            3,
        ),
        ("config -o file/x.yaml", "error: file: is a file, expected a directory", 1),
        ("run --preset demo --out file/x", "error: file/x/base: cannot be written", 4),
    ],
)
def test_file_where_a_directory_is_expected_is_reported_and_kept(
    arguments: str, line: str, code: int, tiny_xc_folder: Path
) -> None:
    Path("file").write_text("kept")
    Path("data").mkdir()
    result = invoke(*arguments.replace("--preset demo", f"--preset xc --set data.path={tiny_xc_folder}").split())
    errors = [line for line in result.stderr.splitlines() if line not in ("", "base: without graphs")]
    assert len(errors) == 1 and errors[0].startswith(line) and result.exit_code == code
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"data:\n  path: caf\xe9\n", "error: p.yaml:2: not UTF-8 (byte 0xe9); save it as UTF-8"),
        (
            b"training:\n  lr: 1.0e-4\n  epochs: 3\n  lr: 2.0e-4\n",
            "error: p.yaml:4: not valid YAML ('lr' appears twice)",
        ),
        (b"training: [\n", "error: p.yaml:2: not valid YAML"),
    ],
)
@pytest.mark.parametrize("command", ["config --params p.yaml", "ablate --preset demo --study p.yaml"])
def test_unreadable_yaml_file_is_reported_with_its_line(content: bytes, line: str, command: str) -> None:
    Path("p.yaml").write_bytes(content)
    result = invoke(*command.split())
    assert result.stderr.startswith(line) and result.exit_code == 2


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("title: t\nrows: []\n", "error: p.yaml: has no rows"),
        ("title: t\nrows: [{name: a, set: training.lr=1}]\n", "error: p.yaml: row 'a': set: expected a list, as in ["),
    ],
)
def test_study_without_rows_or_with_a_bad_row_is_refused(content: str, line: str) -> None:
    Path("p.yaml").write_text(content)
    result = invoke("ablate", "--preset", "demo", "--study", "p.yaml")
    assert result.stderr.startswith(line) and result.exit_code == 2


def test_ingest_refuses_to_overwrite_the_users_data(xc_folder: Path) -> None:
    before = sorted(path.name for path in xc_folder.iterdir())
    result = invoke("ingest", "--source", "xc", "--path", str(xc_folder), "--dataset", str(xc_folder))
    assert result.exit_code == 4 and "refusing to overwrite: it was not written by ramen" in result.stderr
    assert sorted(path.name for path in xc_folder.iterdir()) == before


def test_directory_as_metrics_path_is_refused(xc_folder: Path) -> None:
    result = invoke("ingest", "--source", "xc", "--path", str(xc_folder), "--metrics", ".")
    assert (
        result.exit_code == 2
        and "error: --metrics .: is a directory; give a file, such as ingest.json" in result.stderr
    )
    assert not Path("artifacts").exists()


def test_batch_query_refuses_duplicate_uids_bad_encoding_and_overwriting_the_queries() -> None:
    Path("q.jsonl").write_text('{"uid": "a", "text": "mail"}\n{"uid": "a", "text": "web"}\n')
    duplicate = invoke("query", "--input", "q.jsonl", "--output", "a.parquet")
    assert duplicate.exit_code == 3 and "error: q.jsonl:2: query 'a' is already on line 1" in duplicate.stderr
    Path("q.parquet").write_text("queries")
    same = invoke("query", "--input", "q.parquet", "--output", "./q.parquet")
    assert same.exit_code == 1 and "q.parquet: holds the queries" in same.stderr
    Path("q.txt").write_bytes("mail\ncafé\n".encode("latin-1"))
    latin_1 = invoke("query", "--input", "q.txt", "--output", "a.parquet")
    assert "error: q.txt:2: expected UTF-8 text, found the byte 0xe9; save it as UTF-8" in latin_1.stderr


def test_blank_query_is_refused() -> None:
    result = invoke("query", " \t")
    assert "Invalid value for TEXT: expected at least one word" in result.stderr and result.exit_code == 2


def test_every_config_error_has_its_own_line() -> None:
    result = invoke("config", "--set", "walk.hops=-1", "--set", "walk.restart=2")
    assert result.stderr.splitlines() == [
        "error: walk.hops = -1: input should be greater than or equal to 0",
        "error: walk.restart = 2: input should be less than or equal to 1",
    ]


def test_process_prints_the_error_without_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "ramen", "build-graph"], capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.startswith("error: artifacts/dataset") and "Traceback" not in done.stderr


def test_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.config.to_yaml", lambda config, **_: 1 / 0)
    assert isinstance(invoke("config").exception, ZeroDivisionError)


@pytest.mark.parametrize("error", [RamenError, *RamenError.__subclasses__()])
def test_each_error_class_sets_the_exit_code(error: type[RamenError], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object, **_: object) -> str:
        raised = error.__new__(error)
        Exception.__init__(raised, "one", "two")
        raise raised

    monkeypatch.setattr("ramen.config.to_yaml", fail)
    result = invoke("config")
    assert result.exit_code == error.exit_code
    assert result.stderr.splitlines() == ["error: one", "error: two"]


def test_keyboard_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: object, **_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("ramen.config.to_yaml", interrupt)
    result = invoke("config")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m ramen config --all | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("# Written by") and done.stderr == ""


def test_config_writes_a_file_that_later_commands_read() -> None:
    assert invoke("config", "--preset", "demo", "--set", "walk.hops=7", "-o", "params.yaml").exit_code == 0
    assert "  hops: 7  #" in invoke("config").stdout
    assert "  hops: 9  #" in invoke("config", "--set", "walk.hops=9").stdout


@pytest.mark.slow
def test_ingest_writes_metrics_and_dataset(xc_folder: Path) -> None:
    result = invoke("ingest", "--source", "xc", "--path", str(xc_folder), "--dataset", "d", "--metrics", "m.json")
    assert result.exit_code == 0, result.stderr
    metrics = json.loads(Path("m.json").read_text())
    assert metrics and list(metrics) == sorted(metrics)
    assert result.stdout.splitlines()[-1] == "dataset: d"
    assert json.loads(Path("d/manifest.json").read_text())["sections"]["data"]["source"] == "xc"


def test_ingest_of_broken_data_leaves_no_artifact(xc_folder: Path) -> None:
    lines = (xc_folder / "trn_X_Y.txt").read_text().splitlines()
    (xc_folder / "trn_X_Y.txt").write_text("\n".join([lines[0], "99:1.0", *lines[2:]]) + "\n")
    result = invoke("ingest", "--source", "xc", "--path", str(xc_folder))
    assert result.exit_code == 3
    assert "trn_X_Y.txt:2" in result.stderr
    assert not Path("artifacts").exists()


def run_process(*arguments: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, b"-m", b"ramen", *arguments], capture_output=True)


@pytest.mark.parametrize("arguments", [(b"caf\xe9",), (b"config", b"--set", b"data.path=caf\xe9"), (b"query", b"\xe9")])
def test_argument_that_is_not_utf8_is_refused_in_one_line(arguments: tuple[bytes, ...]) -> None:
    done = run_process(*arguments)
    assert done.returncode == 2 and b"is not UTF-8; rename the file or folder" in done.stderr
    assert rb"\xe9" in done.stderr and b"Traceback" not in done.stderr


def test_working_directory_that_is_not_utf8_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = invoke("config")
    assert done.exit_code == 1 and done.stderr.splitlines() == [
        f"error: {tmp_path}/caf\\xe9: the path of the working directory is not UTF-8; rename the folder"
    ]


@pytest.mark.parametrize(
    "arguments",
    [["\x1b[31m\u202e"], ["config", "\x1b[31m\u202e"], ["config", "--\x1b[31m\u202e"],
     ["config", "--preset", "\x1b[31m\u202e"], ["config", "--set", "walk.\x1b[31m\u202e=1"],
     ["ingest", "--source", "xc", "--path", "\x1b[31m\u202e"], ["ingest", "--metrics", "\x1b[31m\u202e/x"]],
)  # fmt: skip
def test_control_characters_of_arguments_are_escaped(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0 and result.stderr.strip()
    assert "\x1b" not in result.stderr and "\u202e" not in result.stderr


@pytest.mark.parametrize("image", ["", " ", "a b", "a\nb", "-x", "$(id)"])
@pytest.mark.parametrize("command", ["compile", "submit"])
def test_invalid_image_name_is_refused(command: str, image: str) -> None:
    result = invoke(command, "--image", image)
    assert result.exit_code == 2 and "Invalid value for '--image': expected an image such as" in result.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("- 1\n", "not a study: expected a mapping with a text `title`"),
        ("title: [a]\nrows: []\n", "not a study: expected a mapping with a text `title`"),
        ("title: t\nrows: abc\n", "rows: expected a list of mappings"),
        ("title: t\nrows: [1]\n", "rows: expected a list of mappings"),
        ("title: t\nrows: [{name: [a]}]\n", "row ['a']: name: expected a text"),
        ("title: t\nrows: [{name: a, set: {a: 1}}]\n", "row 'a': set: expected a list of assignments"),
        ("title: t\nrows: [{name: a, set: [1]}]\n", "row 'a': set: expected a list of assignments"),
        ("title: t\nrows: [{name: a, against: [b]}]\n", "row 'a': against: expected a text, found ['b']"),
        ("title: t\nrow: []\n", "row: unknown; did you mean rows?"),
    ],
)
def test_study_of_wrong_types_is_refused_with_the_field(content: str, line: str) -> None:
    Path("p.yaml").write_text(content)
    result = invoke("ablate", "--preset", "demo", "--study", "p.yaml")
    assert result.stderr.startswith(f"error: p.yaml: {line}") and result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_memory_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(config: object, **_: object) -> str:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr("ramen.config.to_yaml", allocate)
    result = invoke("config")
    assert (result.exit_code, result.stderr) == (
        1, "error: not enough memory (Unable to allocate 9 TiB); use a larger machine or less data\n"
    )  # fmt: skip


def test_query_with_a_lone_surrogate_is_refused() -> None:
    from ramen.index.retriever import check_unicode

    check_unicode("caf\u00e9 \U0001f600")
    with pytest.raises(RamenError, match=r"query: character 4 is a lone surrogate \(U\+DCE9\); give valid UTF-8"):
        check_unicode(os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--preset", "demo", "--out"),
        ("ablate", "--preset", "demo", "--out"),
        ("ingest", "--dataset"),
        ("ingest", "--metrics"),
        ("config", "-o"),
        ("compile", "-o"),
        ("query", "--input", "queries.txt", "--output"),
        ("gc", "--out"),
    ],
)
def test_path_with_control_characters_is_refused(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments, "a\x1b")
    expected = rf"error: {arguments[-1]} 'a\x1b': the path has control characters; choose another path"
    assert result.stderr.splitlines() == [expected] and result.exit_code == 2
    assert not list(Path().iterdir())


def test_circular_link_is_refused_in_one_line(xc_folder: Path) -> None:
    Path("loop").symlink_to("loop")
    for arguments in (
        ("query", "--input", "loop", "--output", "answers.csv"),
        ("ingest", "--preset", "xc", "--path", str(xc_folder), "--dataset", "loop"),
    ):
        result = invoke(*arguments)
        assert result.exit_code in (3, 4) and len(result.stderr.splitlines()) == 1
        assert "loop: " in result.stderr and isinstance(result.exception, SystemExit)
