"""`ramen submit` with the real kfp client, against a server that validates requests with KFP's API classes."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipelines import server_answers
from pipelines import submit as pipeline_submit
from ramen.cli import cli
from ramen.config import resolve
from ramen.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = str(ROOT / "pipelines" / "ramen.yaml")
DATE = "2026-01-01T00:00:00Z"


def check_type(value: Any, kind: str) -> None:
    """Check a JSON value against a type of KFP's API; the client's classes are generated from its definition."""
    import kfp_server_api.models as api

    if kind == "object":
        return
    if found := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), kind
        for item in value:
            check_type(item, found.group(1))
    elif found := re.fullmatch(r"dict\(str, (.+)\)", kind):
        assert isinstance(value, dict), kind
        for item in value.values():
            check_type(item, found.group(1))
    elif kind in ("str", "datetime"):
        # protobuf's JSON mapping writes an int64 as a string, and also accepts a number
        assert isinstance(value, str) or type(value) is int, (kind, value)
    elif kind in ("int", "float", "bool"):
        assert isinstance(value, {"int": int, "float": (int, float), "bool": bool}[kind]), (kind, value)
    else:
        model = getattr(api, kind)
        if not model.openapi_types:  # an enumeration
            assert value in model.allowable_values, (kind, value)
            return
        names = {model.attribute_map[key]: of for key, of in model.openapi_types.items()}
        assert isinstance(value, dict) and set(value) <= set(names), (kind, set(value) - set(names))
        for name, item in value.items():
            check_type(item, names[name])


class Kubeflow(BaseHTTPRequestHandler):
    """The part of the v2beta1 API that submitting, watching and scheduling call."""

    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.endswith("/healthz"):
            self.answer({"multi_user": False})
        elif path.endswith("/experiments"):
            self.answer({})
        elif path.endswith("/runs/run-1"):
            self.server.run_requests += 1
            states = self.server.states
            self.answer(states[min(self.server.run_requests, len(states)) - 1])
        else:
            self.answer({"error": f"no such path {path}"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.split("?")[0].rsplit("/", 1)[-1]
        model = {"experiments": "V2beta1Experiment", "runs": "V2beta1Run", "recurringruns": "V2beta1RecurringRun"}[kind]
        try:
            check_type(body, model)
        except AssertionError as error:
            self.answer({"message": f"body does not conform: {error}"}, 400)
            return
        self.server.posted[kind] = body
        self.server.token = self.headers.get("Authorization", "")
        if self.server.refusal and kind == "runs":
            self.answer({"error": "x", "code": 7, "message": self.server.refusal}, 403)
            return
        self.answer({
            "experiments": {"experiment_id": "exp-1", "display_name": "ramen"},
            "runs": {"run_id": "run-1", "state": "PENDING", "created_at": DATE},
            "recurringruns": {"recurring_run_id": "job-1", "created_at": DATE},
        }[kind])  # fmt: skip

    def answer(self, value: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        pass


class Server(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Kubeflow)
        self.posted: dict[str, Any] = {}
        self.states: list[dict[str, Any]] = []
        self.run_requests, self.refusal, self.token = 0, "", ""
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(pipeline_submit, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", running.url)
        yield running
        running.shutdown()


def _submit(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["submit", *arguments])


def _run_states(*steps: dict[str, str], end: str) -> list[dict[str, Any]]:
    """Return the responses for a run, one per request: step -> state, and the final state of the run."""
    return [
        {
            "run_id": "run-1", "created_at": DATE, "state": "RUNNING" if number < len(steps) - 1 else end,
            "run_details": {"task_details": [{"display_name": key, "state": state} for key, state in step.items()]},
        }
        for number, step in enumerate(steps)
    ]  # fmt: skip


def test_submitted_run_has_the_resolved_configuration_as_parameters(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "a-token")
    done = _submit(
        PIPELINE, "--preset", "debian", "--set", "training.epochs=7", "-r", "nightly",
        "--service-account", "ramen-pipeline", "--root", "s3://bucket/runs", "--no-cache",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert f"{server.url}/#/runs/details/run-1" in done.output
    body = server.posted["runs"]
    assert body["display_name"] == "nightly" and body["service_account"] == "ramen-pipeline"
    assert server.posted["experiments"]["display_name"] == "ramen" and body["experiment_id"] == "exp-1"
    wanted = resolve(preset="debian", sets=["training.epochs=7"]).sections()
    assert body["runtime_config"]["parameters"] == json.loads(json.dumps(wanted))
    assert body["runtime_config"]["pipeline_root"] == "s3://bucket/runs"
    spec = body["pipeline_spec"]["pipeline_spec"]
    assert set(spec["root"]["dag"]["tasks"]) == set(STAGES)
    assert not [t for t in spec["root"]["dag"]["tasks"].values() if t.get("cachingOptions", {}).get("enableCache")]
    assert server.token == "Bearer a-token"


def test_image_option_compiles_the_image_into_the_run(server: Server) -> None:
    done = _submit("--preset", "demo", "--image", "registry.example/ramen@sha256:1")
    assert done.exit_code == 0, done.output
    executors = server.posted["runs"]["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"]
    assert {one["container"]["image"] for one in executors.values()} == {"registry.example/ramen@sha256:1"}


def test_watch_prints_each_state_change_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.submit.time", SimpleNamespace(sleep=lambda seconds: None))
    server.states = _run_states(
        {"ingest": "RUNNING", "ingest-driver": "SUCCEEDED"},
        {"ingest": "RUNNING"},
        {"ingest": "SUCCEEDED", "build-graph": "RUNNING"},
        {"ingest": "SUCCEEDED", "build-graph": "SUCCEEDED"},
        end="SUCCEEDED",
    )
    done = _submit(PIPELINE, "--preset", "demo", "--watch")
    assert done.exit_code == 0 and "run run-1 succeeded" in done.output
    assert re.findall(r"^(\S+: \w+)$", done.output, re.MULTILINE) == [
        "ingest: running", "ingest: succeeded", "build-graph: running", "build-graph: succeeded",
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["FAILED", "CANCELED"])
def test_watched_run_that_fails_or_is_cancelled_exits_with_1(server: Server, end: str) -> None:
    server.states = _run_states({"ingest": "FAILED"}, end=end)
    done = _submit(PIPELINE, "--preset", "demo", "-w")
    assert done.exit_code == 1 and f"error: run run-1 ended as {end}; see {server.url}" in done.output


def test_cron_creates_an_uncached_recurring_run(server: Server) -> None:
    done = _submit(PIPELINE, "--preset", "demo", "--cron", "0 3 * * 1", "-r", "weekly", "--root", "s3://kept/here")
    assert done.exit_code == 0 and "schedule job-1" in done.output, done.output
    body = server.posted["recurringruns"]
    assert body["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1", "KFP expects the seconds first"
    assert str(body["max_concurrency"]) == "1" and body["no_catchup"] is True and body["mode"] == "ENABLE"
    assert body["runtime_config"]["parameters"]["training"]["epochs"] == resolve(preset="demo").training.epochs
    assert body["runtime_config"]["pipeline_root"] == "s3://kept/here"
    spec = body["pipeline_spec"]["pipeline_spec"]
    tasks = spec["root"]["dag"]["tasks"].values()
    assert not [task for task in tasks if task.get("cachingOptions", {}).get("enableCache")], (
        "a cached step would not notice changed data"
    )
    assert "runs" not in server.posted
    assert _submit(PIPELINE, "--preset", "demo", "--cron", "0 3 * * 1", "--watch").exit_code == 2
    done = _submit(PIPELINE, "--preset", "demo", "--cron", "daily")
    assert done.exit_code == 2 and "expected five fields" in done.output


def test_submission_errors_are_one_line(server: Server, tmp_path: Path) -> None:
    server.refusal = "namespace quota of GPUs is used up"
    done = _submit(PIPELINE, "--preset", "demo")
    assert done.exit_code == 1
    assert (
        done.output.strip()
        .splitlines()[-1]
        .startswith(f"error: Kubeflow Pipelines at {server.url}: namespace quota of GPUs is used up")
    )
    done = _submit(PIPELINE, "--preset", "demo", "--endpoint", "http://127.0.0.1:9")
    assert done.exit_code == 1 and len(done.output.strip().splitlines()) == 1 and "127.0.0.1:9" in done.output
    done = _submit("nowhere.yaml", "--preset", "demo")
    assert done.exit_code == 1 and "nowhere.yaml: no such file" in done.output
    (tmp_path / "other.yaml").write_text("a: 1")
    assert "not a compiled pipeline" in _submit("other.yaml", "--preset", "demo").output
    spec = list(yaml.safe_load_all(Path(PIPELINE).read_text()))
    del spec[0]["root"]["inputDefinitions"]["parameters"]["walk"]
    (tmp_path / "old.yaml").write_text(yaml.safe_dump_all(spec))
    assert "compiled by another version (parameter 'walk' differs)" in _submit("old.yaml", "--preset", "demo").output


class OtherServer(BaseHTTPRequestHandler):
    """A server that is not Kubeflow Pipelines: returns the entry of `RESPONSES` that its server's `kind` selects."""

    def do_GET(self) -> None:
        status, headers, body = RESPONSES[self.server.kind]  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *values: Any) -> None:
        pass


HTML, JSON = {"Content-Type": "text/html"}, {"Content-Type": "application/json"}
RESPONSES: dict[str, tuple[int, dict[str, str], bytes]] = {
    "login page": (200, HTML, b"<html><form>password</form></html>"),
    "redirect to a login page": (302, {"Location": "/login?token=abcdef"}, b""),
    "login page called JSON": (200, JSON, b"<html>"),
    "garbage": (200, JSON, b'{"run_id": "x"'),
    "nested": (200, JSON, b"[" * 100_000),
    "list": (200, JSON, b"[1]"),
    "empty object": (200, JSON, b"{}"),
    "ids of another type": (200, JSON, b'{"experiment_id": [1], "run_id": [1]}'),
    "no content type": (200, {}, b"{}"),
    "closes in the middle": (200, JSON | {"Content-Length": "1000"}, b'{"run_id":'),
    "unauthorised": (401, HTML, b"<html>"),
    "failing": (500, HTML, b"<html>"),
    "busy": (503, HTML | {"Retry-After": "3600"}, b"<html>"),
    "redirect to itself": (302, {"Location": "/apis/v2beta1/healthz"}, b""),
}


@pytest.fixture
def other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("HOME", str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("login page", "responds with text/html, expected JSON"),
        ("redirect to a login page", "redirects to /login?token=***"),
        ("login page called JSON", "not a JSON object"),
        ("garbage", "not a JSON object"),
        ("nested", "not a JSON object"),
        ("list", "not a JSON object"),
        ("empty object", "no experiment id"),
        ("ids of another type", "has no experiment id"),
        ("no content type", "no content type"),
        ("closes in the middle", "IncompleteRead"),
        ("unauthorised", "status 401"),
        ("failing", "status 500"),
        ("busy", "status 503"),
        ("redirect to itself", "redirects to /apis"),
    ],
)
def test_server_other_than_kubeflow_pipelines_is_reported_in_one_line(
    other_server: ThreadingHTTPServer, kind: str, error: str
) -> None:
    other_server.kind = kind  # type: ignore[attr-defined]
    done = _submit(
        PIPELINE, "--preset", "demo", "--endpoint", f"http://me:geheim@127.0.0.1:{other_server.server_port}", "--watch"
    )
    assert done.exit_code == 1 and error in done.output, done.output
    assert len(done.output.splitlines()) == 1 and "geheim" not in done.output and "run None" not in done.output


def test_server_without_response_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(server_answers, "READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        done = _submit(PIPELINE, "--preset", "demo", "--endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert done.exit_code == 1 and "Read timed out" in done.output and time.monotonic() - start < 10


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"])
def test_slow_response_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(server_answers, "ANSWER_SECONDS", 0.5)
    stopped = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(start)
            while not stopped.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server,), daemon=True)
        thread.start()
        done = _submit(PIPELINE, "--preset", "demo", "--endpoint", f"http://127.0.0.1:{server.getsockname()[1]}")
        stopped.set()
        thread.join(10)
    assert done.exit_code == 1 and "no complete answer after 0.5 s" in done.output


@pytest.mark.parametrize("endpoint", ["ftp://host", "http://", "http://host:99999", "http://ho st", "http://[::1"])
def test_invalid_endpoint_is_refused(endpoint: str) -> None:
    done = _submit(PIPELINE, "--preset", "demo", "--endpoint", endpoint)
    assert done.exit_code == 2 and "is not an address" in done.output and len(done.output.splitlines()) == 1


def test_password_in_the_endpoint_is_not_printed(server: Server) -> None:
    done = _submit(PIPELINE, "--preset", "demo", "--endpoint", server.url.replace("//", "//me:geheim@"))
    assert done.exit_code == 0 and f"run run-1: {server.url}/#/runs/details/run-1" in done.output
    assert "geheim" not in done.output
