"""Commands with an unusable tracking store: they end in time, with one line that does not show the password."""

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
from ramen.tracking import store as tracking_store

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
MESSAGES = {
    "/login": "the server's answer is not JSON (a login page or a proxy?); check MLFLOW_TRACKING_URI",
    "/failing": "the server answers with status 500; check MLFLOW_TRACKING_URI",
    "/busy": "the server answers with status 503; check MLFLOW_TRACKING_URI",
    "/empty": "the response has the model '', expected 'ramen'",
    "/itself": "the server redirects more than 30 times",
    "/trickle": "no complete answer after 2 s",
    "/versions": "the response has the version 'x",
}
"""Path -> message of `ramen query` about the response."""


class OtherServer(BaseHTTPRequestHandler):
    """A server that is not MLflow; the first part of the path selects the response."""

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
def other_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://me:geheim@127.0.0.1:{server.server_port}"
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def use_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the tracking URI of commands that run in an empty folder."""
    import mlflow

    mlflow.set_tracking_uri(None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("uid,text\na,b\n")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    return lambda uri: monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


def _write_journal(folder: Path) -> None:
    journal = folder / ".ramen" / "tracking" / "one"
    journal.mkdir(parents=True)
    (journal / "writes.jsonl").write_text('{"write": "tags", "run": "r", "values": {"values": {"a": "b"}}}\n')


def _run_failing(name: str) -> str:
    """Run a command that must fail with one line; return the line."""
    if name == "push":
        _write_journal(Path.cwd())
    result = CliRunner().invoke(cli, COMMANDS[name])
    assert isinstance(result.exception, SystemExit), (name, result.output, repr(result.exception))
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1, (name, result.output)
    assert result.output.startswith("error: ") and "geheim" not in result.output, (name, result.output)
    assert len(result.output) < 700, (name, result.output)
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_database_driver_is_reported(use_store: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    use_store("mysql+pymysql://me:geheim@127.0.0.1:9/mlflow?password=geheim")
    assert "'pymysql' is not installed: pip install pymysql" in _run_failing(name)


@pytest.mark.parametrize("name", ["registry", "query", "promote", "rollback", "serve", "push"])
def test_unknown_store_and_folder_of_files_are_refused(use_store: Any, tmp_path: Path, name: str) -> None:
    use_store("ftp://me:geheim@127.0.0.1/runs")
    assert "ftp://***@127.0.0.1/runs" in _run_failing(name)
    os.environ["MLFLOW_TRACKING_URI"] = f"file://{tmp_path}/mlruns"
    if name != "push":
        assert "MLflow no longer supports a folder of files; use sqlite:///mlflow.db or a server" in _run_failing(name)


@pytest.mark.parametrize("name", ["registry", "serve", "compare", "index-update"])
def test_damaged_database_is_reported(use_store: Any, tmp_path: Path, tracking_template: Path, name: str) -> None:
    (tmp_path / "noise.db").write_bytes(b"noise" * 5000)
    use_store(f"sqlite:///{tmp_path}/noise.db")
    assert "file is not a database" in _run_failing(name)
    (tmp_path / "tables.db").write_bytes(tracking_template.read_bytes())
    with sqlite3.connect(tmp_path / "tables.db") as database:
        for table in ("registered_models", "experiments", "runs"):
            database.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/tables.db"
    assert "tables.db" in _run_failing(name)


@pytest.mark.slow
@pytest.mark.parametrize("path", ANSWERS)
def test_http_server_that_is_not_mlflow_is_reported(use_store: Any, other_server: str, path: str) -> None:
    use_store(other_server + path)
    slow = path == "/trickle"
    assert MESSAGES.get(path, "127.0.0.1") in _run_failing("query")
    if path == "/versions":  # other commands accept the response as an experiment without runs
        assert "the response has the version 'x', expected a number" in _run_failing("promote")
        return
    for name in ("registry", "promote") if slow else COMMANDS:
        assert "127.0.0.1" in _run_failing(name)
        if name == "push":
            break


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/busy", "/empty", "/trickle", "/itself"])
def test_run_does_not_start_when_the_server_is_not_mlflow(use_store: Any, other_server: str, path: str) -> None:
    use_store(other_server + path)
    result = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1, result.output
    assert "cannot be used" in result.output and "geheim" not in result.output and not Path("out").exists()


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
def test_invalid_mlflow_setting_is_reported(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, ["compare"])
    assert result.exit_code == 2 and result.output.startswith(f"error: {name} = "), result.output
    assert f"expected {expected}; correct the variable or unset it" in result.output


def test_unknown_experiment_id_is_reported(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    assert "77 exists); check MLFLOW_EXPERIMENT_ID" in _run_failing("compare")


@pytest.mark.parametrize("name", ["registry", "query", "promote"])
def test_error_names_the_registry_if_it_differs_from_the_tracking_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://me:geheim@127.0.0.1:9")
    message = _run_failing(name)
    assert "in http://***@127.0.0.1:9: " in message and "check MLFLOW_REGISTRY_URI" in message
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{store.parent}/other.db")
    assert "other.db; run `ramen run` here or set MLFLOW_REGISTRY_URI" in _run_failing(name)
    assert not (store.parent / "other.db").exists()


@pytest.mark.parametrize("name", ["registry", "query", "compare"])
def test_reading_commands_do_not_create_tables(use_store: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.db").touch()
    use_store(f"sqlite:///{tmp_path}/empty.db")
    assert "empty.db: the database is empty; run `ramen run` here" in _run_failing(name)
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_database_that_is_a_directory_is_reported(use_store: Any, tmp_path: Path) -> None:
    use_store(f"sqlite:///{tmp_path}")
    for name in ("registry", "compare", "promote"):
        assert f"{tmp_path}: is a directory, expected a database file" in _run_failing(name)
    result = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert result.exit_code == 1 and "is a directory, expected a database file" in result.output


def test_database_in_a_folder_that_cannot_be_created_is_reported(use_store: Any, tmp_path: Path) -> None:
    use_store(f"sqlite:///{tmp_path}/labels.csv/mlflow.db")
    result = CliRunner().invoke(cli, ["run", "--preset", "demo", "--out", "out"])
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1 and "labels.csv" in result.output


@pytest.mark.parametrize("name", ["registry", "query", "promote", "compare"])
def test_locked_database_is_reported(store: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tracking_store, "LOCK_SECONDS", 0.1)
    with closing(sqlite3.connect(store)) as database:
        database.execute("BEGIN EXCLUSIVE")
        assert "mlflow.db: database is locked; end the process that locks it" in _run_failing(name)


def _register(source: str) -> None:
    client = MlflowClient()
    client.create_registered_model("ramen")
    client.create_model_version("ramen", source)
    client.set_registered_model_alias("ramen", "champion", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_unreachable_artifact_store_is_reported(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register("s3://graphs/models/1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    message = _run_failing("query")
    assert (
        "Could not connect to the endpoint URL" in message
        and "check AWS_ENDPOINT_URL, MLFLOW_S3_ENDPOINT_URL" in message
    )


@pytest.mark.usefixtures("s3")
def test_unknown_bucket_is_reported(store: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3_server)  # MLflow caches one client per value
    _register("s3://no-such-bucket/models/1")
    message = _run_failing("query")
    assert "bucket" in message and "check AWS_ENDPOINT_URL" in message


def test_command_times_out_when_the_server_never_answers(use_store: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_store(f"http://me:geheim@127.0.0.1:{silent.getsockname()[1]}")
        assert "timed out" in _run_failing("registry")


def test_rollback_accepts_an_alias_in_the_tag(store: Path) -> None:
    _register("s3://graphs/models/1")
    client = MlflowClient()
    client.set_model_version_tag(
        "ramen", "1", "alias.champion.before", "champion"
    )  # an alias: every user can set a tag
    result = CliRunner().invoke(cli, ["rollback"])
    assert result.exit_code == 0 and "champion is version 1, was 1" in result.output


@pytest.mark.parametrize("version", ["\u00b2", "x", "-1", "1" * 5000, None])
def test_parse_version_refuses_what_is_not_a_number(version: object) -> None:
    with pytest.raises(RamenError, match=r"the response has the version .*, expected a number"):
        registry.parse_version(version)
