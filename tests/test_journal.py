"""Tracking during an outage: an MLflow server stops in the middle of a run and starts later."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ramen.cli import cli
from ramen.errors import RamenError
from ramen.tracking import journal, open_tracker, push_pending_writes
from ramen.tracking.journal import Journal, find_journals


class Server:
    """`mlflow server` on a fixed port; its folder persists between starts."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.folder, self.process = folder, None  # type: Path, Any

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "files")]
        self.process = subprocess.Popen(
            command, cwd=self.folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server did not start"
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path, tracking_template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    import shutil

    import mlflow

    shutil.copy(tracking_template, tmp_path / "server.db")
    server = Server(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setattr(journal, "ONLINE_RETRIES", journal.OFFLINE_RETRIES)
    mlflow.set_tracking_uri(None)
    server.start()
    yield server
    server.stop()
    mlflow.set_tracking_uri(None)


def _client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


@pytest.mark.slow
def test_push_sends_all_writes_of_an_outage(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").write_text("the report")
    with open_tracker("warmup") as track:
        track.params({"training.lr": 1e-4})
        track.log({"loss": 1.0}, step=1)
        server.stop()
        track.log({"loss": 0.5}, step=2)
        track.params({"training.lr": 1e-4, "training.epochs": 3})
        track.tags({"ramen.gate": "passed"})
        track.artifact(tmp_path / "report.html", "report")
        (tmp_path / "report.html").unlink()
        with track.child("round-1", {"ramen.round": "1"}) as child, child.child("inner") as inner:
            child.log({"edges_kept": 90.0})
            inner.log({"x": 2.0})
    messages = capsys.readouterr().err
    assert messages.count("unreachable") == 2 and "ramen tracking push" in messages
    (folder,) = find_journals(tmp_path / ".ramen" / "tracking")

    with pytest.raises(RamenError, match="cannot be used"):
        push_pending_writes()
    assert find_journals(tmp_path / ".ramen" / "tracking") == [folder], "a failed push keeps the journal"
    server.start()
    done = CliRunner().invoke(cli, ["tracking", "push"])
    assert done.exit_code == 0 and "sent 11 writes" in done.output, done.output
    assert not find_journals(tmp_path / ".ramen" / "tracking")

    client = _client()
    run = client.get_run(track.run_id)
    assert run.info.status == "FINISHED" and run.data.tags["ramen.gate"] == "passed"
    assert run.data.params == {"training.lr": "0.0001", "training.epochs": "3"}
    assert [(m.step, m.value) for m in client.get_metric_history(track.run_id, "loss")] == [(1, 1.0), (2, 0.5)]
    assert (
        Path(client.download_artifacts(track.run_id, "report/report.html", str(tmp_path))).read_text() == "the report"
    )
    runs = {run.info.run_name: run for run in client.search_runs([run.info.experiment_id])}
    assert runs["round-1"].data.tags["mlflow.parentRunId"] == track.run_id
    assert runs["inner"].data.tags["mlflow.parentRunId"] == runs["round-1"].info.run_id
    assert runs["round-1"].data.metrics == {"edges_kept": 90.0} and runs["inner"].info.status == "FINISHED"
    assert CliRunner().invoke(cli, ["tracking", "push"]).output.strip() == "no writes are kept"


@pytest.mark.slow
def test_pending_writes_are_flushed_before_later_writes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tracker("warmup") as track:
        server.stop()
        track.log({"loss": 3.0}, step=1)
        track.log({"loss": 2.0}, step=2)
        assert find_journals(tmp_path / ".ramen" / "tracking")
        server.start()
        monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
        track._store.journal._next_flush = 0.0  # type: ignore[attr-defined]
        track.log({"loss": 1.0}, step=3)
        assert not find_journals(tmp_path / ".ramen" / "tracking")
        assert [m.step for m in _client().get_metric_history(track.run_id, "loss")] == [1, 2, 3]


class Flaky:
    """A client that answers a number of calls, records them, and fails afterwards."""

    def __init__(self, answers: int) -> None:
        self.answers, self.seen = answers, []  # type: int, list[str]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.answers <= 0:
                raise ConnectionError("no route to host")
            self.answers -= 1
            self.seen.append(name)
            return None

        return call


def test_interrupted_flush_resumes_at_the_next_write(tmp_path: Path) -> None:
    original = Journal(Flaky(0), tmp_path)
    for step in range(5):
        original.write("end", "run", status="FINISHED", time=step)
    original.close()
    (folder,) = find_journals(tmp_path)
    with (folder / "writes.jsonl").open("a") as stream:
        stream.write('{"write": "en')  # the process was killed while it wrote this line
    for answers, left in ((2, 3), (2, 1), (2, 0)):
        client = Flaky(answers)
        reopened = Journal.reopen(client, folder)
        assert reopened is not None
        reopened.flush()
        assert reopened.pending == left and len(client.seen) == min(2, left + 2 if left else 1)
        reopened.unlock()
    assert not find_journals(tmp_path)


def test_journal_of_a_running_process_is_not_reopened(tmp_path: Path) -> None:
    in_use = Journal(Flaky(0), tmp_path)
    in_use.write("end", "run", status="FINISHED", time=0)
    (folder,) = find_journals(tmp_path)
    script = "import sys, pathlib; from ramen.tracking.journal import Journal\n"
    script += "print(Journal.reopen(None, pathlib.Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_permanent_error_is_raised(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    class Strict:
        def set_terminated(self, *args: Any) -> None:
            raise MlflowException.invalid_parameter_value("no such status")

    with pytest.raises(MlflowException):
        Journal(Strict(), tmp_path).write("end", "run", status="x", time=0)
    assert not list(tmp_path.iterdir())


def test_run_creation_is_pending_after_a_response_without_an_id(tmp_path: Path) -> None:
    from types import SimpleNamespace

    class Nameless:
        def create_run(self, *arguments: Any, **values: Any) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=""))

    writer = Journal(Nameless(), tmp_path)
    assert writer.create_run("0", "ramen", {}).startswith("kept-") and writer.pending == 1


def test_writes_are_stored_as_json_lines(tmp_path: Path) -> None:
    writer = Journal(Flaky(0), tmp_path)
    writer.write("metrics", "run", points=[["loss", 0.5, 1, 2]])
    (folder,) = find_journals(tmp_path)
    row = json.loads((folder / "writes.jsonl").read_text())
    assert row == {"write": "metrics", "run": "run", "values": {"points": [["loss", 0.5, 1, 2]]}}


class NoFiles(Flaky):
    """A store that accepts everything except files."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1000)
        self.error: Exception | None = error

    def log_artifact(self, *args: Any) -> None:
        if self.error:
            raise self.error
        self.seen.append("log_artifact")


def _http_error(status: int) -> Exception:
    import requests

    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status} error", response=response)


def test_file_that_is_too_large_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, client = tmp_path / "report.html", NoFiles(_http_error(413))
    report.write_text("x")
    writer = Journal(client, tmp_path / "spool")
    writer.write("artifact", "run", file=report, folder="")
    writer.write("end", "run", status="FINISHED", time=0)
    assert client.seen == ["set_terminated"] and not writer.pending
    assert "warning: report.html: dropped, because the tracking store refused it: 413 error" in capsys.readouterr().err


def test_pending_files_do_not_delay_other_writes(tmp_path: Path) -> None:
    client = NoFiles(_http_error(403))
    writer = Journal(client, tmp_path / "spool")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        writer.write("artifact", "run", file=tmp_path / name, folder="")
    writer.write("end", "run", status="FINISHED", time=0)
    writer.close()
    assert client.seen == ["set_terminated"] and writer.pending == 2
    (folder,) = find_journals(tmp_path / "spool")
    client.error = None
    reopened = Journal.reopen(client, folder)
    assert reopened is not None and reopened.pending == 2 and reopened.flush()
    assert client.seen == ["set_terminated", "log_artifact", "log_artifact"] and not find_journals(tmp_path / "spool")
