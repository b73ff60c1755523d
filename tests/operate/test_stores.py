"""Commands on a tracking store that cannot be used: one line without the password, and an end in time."""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ramen.cli import cli
from ramen.errors import RamenError
from ramen.publishing import registry

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
}


class Stranger(BaseHTTPRequestHandler):
    """A server that is no MLflow; the first part of the path says what it answers."""

    def do_GET(self) -> None:
        status, kind, body = ANSWERS["/" + self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status == 302:
            self.send_header("Location", "/login/page")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://me:geheim@127.0.0.1:{server.server_port}"
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
        assert "database" in _refused(name)


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
    for name in COMMANDS:
        assert "127.0.0.1" in _refused(name)
        if name == "push":
            break


def test_server_that_never_answers_ends_the_command(use: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(f"http://me:geheim@127.0.0.1:{silent.getsockname()[1]}")
        assert "timed out" in _refused("registry")


@pytest.mark.parametrize("version", ["\u00b2", "x", "-1", "1" * 5000, None])
def test_versions_that_are_no_numbers_are_one_line(version: object) -> None:
    with pytest.raises(RamenError, match=r"names the version .*, expected a number"):
        registry._number_in_answer(version)
