"""Commands on a tracking store that cannot be used: one line without the password, and an end in time."""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from ramen.cli import cli
from ramen.errors import RamenError
from ramen.publishing import registry
from ramen.tracking import runs

COMMANDS = {
    "registry": ["registry"],
    "query": ["query", "rook"],
    "promote": ["promote", "1", "--preset", "demo"],
    "rollback": ["rollback"],
    "serve": ["serve", "--port", "0"],
    "compare": ["compare"],
    "index-update": ["index-update", "--preset", "demo", "--add", "labels.csv"],
    "dvc-adopt": ["dvc-adopt", "3f2a"],
    "push": ["tracking", "push"],
}
ANSWERS = {
    "/login": (200, "text/html", b"<html>" + b"x" * 100_000),
    "/garbage": (200, "application/json", b"{"),
    "/list": (200, "application/json", b"[1, 2]"),
    "/numbers": (200, "application/json", b'{"registered_model": 1, "experiment": "x", "runs": 7}'),
    "/redirect": (302, "text/html", b""),
    "/failing": (500, "text/html", b"<html>"),
    "/forbidden": (403, "application/json", b'{"message": "no"}'),
    "/empty": (200, "application/json", b"{}"),
    "/types": (200, "application/json", b'{"registered_model": {"name": 7}, "experiment": {"experiment_id": {}}}'),
    "/busy": (503, "text/html", b"<html>"),
    "/itself": (302, "text/html", b""),
    "/trickle": (200, "application/json", b" " * 1000),
    "/versions": (
        200,
        "application/json",
        b'{"registered_model": {"name": "ramen", "aliases": [{"alias": "champion", "version": "x\\n\\u001b[31m"}]},'
        b' "model_version": {"name": "ramen", "version": "x"}, "experiment": {"experiment_id": "1"}}',
    ),
}
SAID = {
    "/login": "the server's answer is not JSON (a login page or a proxy?); check MLFLOW_TRACKING_URI",
    "/failing": "the server answers with status 500; check MLFLOW_TRACKING_URI",
    "/busy": "the server answers with status 503; check MLFLOW_TRACKING_URI",
    "/empty": "the answer names the model '', expected 'ramen'",
    "/itself": "the server redirects more than 30 times",
    "/trickle": "no complete answer after 2 s",
    "/versions": "the answer names the version 'x",
}
"""What `ramen query` reports of some of the answers."""


class Stranger(BaseHTTPRequestHandler):
    """A server that is no MLflow; the first part of the path says what it answers."""

    def do_GET(self) -> None:
        status, kind, body = ANSWERS["/" + self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status == 302:
            self.send_header("Location", self.path if "itself" in self.path else "/login/page")
        self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if "trickle" not in self.path:
            self.wfile.write(body)
            return
        with suppress(OSError):
            for byte in body:
                self.wfile.write(bytes([byte]))
                if self.server.stopped.wait(0.2):  # type: ignore[attr-defined]
                    return

    do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://me:geheim@127.0.0.1:{server.server_port}"
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a URI the tracking store of commands that are run in an empty folder."""
    import mlflow

    mlflow.set_tracking_uri(None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("uid,text\na,b\n")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    return lambda uri: monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


def _keep_a_write(folder: Path) -> None:
    place = folder / ".ramen" / "tracking" / "one"
    place.mkdir(parents=True)
    (place / "writes.jsonl").write_text('{"write": "tags", "run": "r", "values": {"values": {"a": "b"}}}\n')


def _refused(name: str) -> str:
    """Run a command; returns its one line."""
    _keep_a_write(Path.cwd()) if name == "push" else None
    done = CliRunner().invoke(cli, COMMANDS[name])
    assert isinstance(done.exception, SystemExit), (name, done.output, repr(done.exception))
    assert done.exit_code == 1 and len(done.output.splitlines()) == 1, (name, done.output)
    assert done.output.startswith("error: ") and "geheim" not in done.output, (name, done.output)
    assert len(done.output) < 700, (name, done.output)
    return done.output


@pytest.mark.parametrize("name", COMMANDS)
def test_database_whose_driver_is_missing(use: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    use("mysql+pymysql://me:geheim@127.0.0.1:9/mlflow?password=geheim")
    assert "'pymysql' is not installed: pip install pymysql" in _refused(name)


@pytest.mark.parametrize("name", ["registry", "query", "promote", "rollback", "serve", "push"])
def test_store_of_an_unknown_kind_or_in_a_folder(use: Any, tmp_path: Path, name: str) -> None:
    use("ftp://me:geheim@127.0.0.1/runs")
    assert "ftp://***@127.0.0.1/runs" in _refused(name)
    os.environ["MLFLOW_TRACKING_URI"] = f"file://{tmp_path}/mlruns"
    if name != "push":
        assert "MLflow no longer supports a folder of files; use sqlite:///mlflow.db or a server" in _refused(name)


@pytest.mark.parametrize("name", ["registry", "serve", "compare", "index-update"])
def test_damaged_database(use: Any, tmp_path: Path, tracking_template: Path, name: str) -> None:
    (tmp_path / "noise.db").write_bytes(b"noise" * 5000)
    use(f"sqlite:///{tmp_path}/noise.db")
    assert "file is not a database" in _refused(name)
    (tmp_path / "tables.db").write_bytes(tracking_template.read_bytes())
    with sqlite3.connect(tmp_path / "tables.db") as database:
        for table in ("registered_models", "experiments", "runs"):
            database.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/tables.db"
    assert "tables.db" in _refused(name)


@pytest.mark.parametrize("place", ANSWERS)
def test_http_server_that_is_no_mlflow(use: Any, stranger: str, place: str) -> None:
    use(stranger + place)
    slow = place == "/trickle"
    assert SAID.get(place, "127.0.0.1") in _refused("query")
    if place == "/versions":  # an experiment without runs is an answer
        assert "the answer names the version 'x', expected a number" in _refused("promote")
        return
    for name in ("registry", "promote") if slow else COMMANDS:
        assert "127.0.0.1" in _refused(name)
        if name == "push":
            break


@pytest.mark.parametrize("place", ["/busy", "/empty", "/trickle", "/itself"])
def test_run_is_refused_before_it_begins_when_the_server_is_no_mlflow(use: Any, stranger: str, place: str) -> None:
    use(stranger + place)
    done = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert done.exit_code == 1 and len(done.output.splitlines()) == 1, done.output
    assert "cannot be used" in done.output and "geheim" not in done.output and not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "many", "a whole number"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "99", "a number from 0 to 10"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "-5", "a number from 1 to 86,400"),
        ("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "nan", "a number from 0 to 120"),
        ("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "perhaps", "true or false"),
        ("MLFLOW_EXPERIMENT_ID", "banana", "a number of at most 18 digits"),
        ("MLFLOW_EXPERIMENT_NAME", "x" * 501, "a name of at most 500 printable characters"),
    ],
)
def test_wrong_setting_of_mlflow_is_named(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["compare"])
    assert done.exit_code == 2 and done.output.startswith(f"error: {name} = "), done.output
    assert f"expected {expected}; correct the variable or unset it" in done.output


def test_unknown_experiment_id_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    assert "77 exists); check MLFLOW_EXPERIMENT_ID" in _refused("compare")


@pytest.mark.parametrize("name", ["registry", "query", "promote"])
def test_failing_registry_is_named_when_it_is_not_the_tracking_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://me:geheim@127.0.0.1:9")
    said = _refused(name)
    assert "in http://***@127.0.0.1:9: " in said and "check MLFLOW_REGISTRY_URI" in said
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{store.parent}/other.db")
    assert "other.db; run `ramen run` here or set MLFLOW_REGISTRY_URI" in _refused(name)
    assert not (store.parent / "other.db").exists()


@pytest.mark.parametrize("name", ["registry", "query", "compare"])
def test_reading_commands_leave_an_empty_database_empty(use: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.db").touch()
    use(f"sqlite:///{tmp_path}/empty.db")
    assert "empty.db: the database is empty; run `ramen run` here" in _refused(name)
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_database_that_is_a_directory_is_named_as_one(use: Any, tmp_path: Path) -> None:
    use(f"sqlite:///{tmp_path}")
    for name in ("registry", "compare", "promote"):
        assert f"{tmp_path}: is a directory, expected a database file" in _refused(name)
    done = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert done.exit_code == 1 and "is a directory, expected a database file" in done.output


def test_database_in_a_folder_that_cannot_be_made_is_one_line(use: Any, tmp_path: Path) -> None:
    use(f"sqlite:///{tmp_path}/labels.csv/mlflow.db")
    done = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert done.exit_code == 1 and len(done.output.splitlines()) == 1 and "labels.csv" in done.output


@pytest.mark.parametrize("name", ["registry", "query", "promote", "compare"])
def test_locked_database_is_one_line(store: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(runs, "LOCK_SECONDS", 0.1)
    with closing(sqlite3.connect(store)) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert "mlflow.db: database is locked; end the process that locks it" in _refused(name)


def _register(source: str) -> None:
    client = MlflowClient()
    client.create_registered_model("ramen")
    client.create_model_version("ramen", source)
    client.set_registered_model_alias("ramen", "champion", "1")


@pytest.mark.usefixtures("s3")
def test_artifact_store_that_is_out_of_reach_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register("s3://graphs/models/1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    said = _refused("query")
    assert "Could not connect to the endpoint URL" in said and "check AWS_ENDPOINT_URL, MLFLOW_S3_ENDPOINT_URL" in said


@pytest.mark.usefixtures("s3")
def test_unknown_bucket_is_one_line(store: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3_server)  # MLflow keeps a client for each value
    _register("s3://no-such-bucket/models/1")
    said = _refused("query")
    assert "bucket" in said and "check AWS_ENDPOINT_URL" in said


def test_server_that_never_answers_ends_the_command(use: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(f"http://me:geheim@127.0.0.1:{silent.getsockname()[1]}")
        assert "timed out" in _refused("registry")


def test_rollback_resolves_the_version_that_a_tag_names(store: Path) -> None:
    _register("s3://graphs/models/1")
    client = MlflowClient()
    client.set_model_version_tag("ramen", "1", "alias.champion.before", "champion")  # an alias: anybody may set a tag
    done = CliRunner().invoke(cli, ["rollback"])
    assert done.exit_code == 0 and "champion is version 1, was 1" in done.output


@pytest.mark.parametrize("version", ["\u00b2", "x", "-1", "1" * 5000, None])
def test_versions_that_are_no_numbers_are_one_line(version: object) -> None:
    with pytest.raises(RamenError, match=r"names the version .*, expected a number"):
        registry.version_in_answer(version)
