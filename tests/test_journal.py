"""Tracking through an outage: a real MLflow server that goes away in the middle of a run and comes back."""

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
from ramen.tracking import journal, open_tracker, push_kept
from ramen.tracking.journal import Journal, kept


class Server:
    """`mlflow server` on a fixed port, over a folder that outlives it."""

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
    made = Server(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", made.uri)
    monkeypatch.setattr(journal, "PATIENCE", journal.OFFLINE_RETRIES)
    mlflow.set_tracking_uri(None)
    made.start()
    yield made
    made.stop()
    mlflow.set_tracking_uri(None)


def _client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def test_run_survives_an_outage_and_nothing_is_missing_afterwards(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    said = capsys.readouterr().err
    assert said.count("out of reach") == 2 and "ramen tracking push" in said
    (place,) = kept(tmp_path / ".ramen" / "tracking")

    with pytest.raises(RamenError, match="cannot be used"):
        push_kept()
    assert kept(tmp_path / ".ramen" / "tracking") == [place], "a failed push loses nothing"
    server.start()
    done = CliRunner().invoke(cli, ["tracking", "push"])
    assert done.exit_code == 0 and "sent 11 writes" in done.output, done.output
    assert not kept(tmp_path / ".ramen" / "tracking")

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
    assert CliRunner().invoke(cli, ["tracking", "push"]).output.strip() == "nothing is kept"


def test_store_that_comes_back_gets_what_was_kept_before_the_run_goes_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tracker("warmup") as track:
        server.stop()
        track.log({"loss": 3.0}, step=1)
        track.log({"loss": 2.0}, step=2)
        assert kept(tmp_path / ".ramen" / "tracking")
        server.start()
        monkeypatch.setattr(journal, "TRY_AGAIN", 0.0)
        track._store.journal._next_try = 0.0  # type: ignore[attr-defined]
        track.log({"loss": 1.0}, step=3)
        assert not kept(tmp_path / ".ramen" / "tracking")
        assert [m.step for m in _client().get_metric_history(track.run_id, "loss")] == [1, 2, 3]


class Flaky:
    """A client whose calls fail from the n-th on, and that counts what reached it."""

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


def test_push_that_is_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Journal(Flaky(0), tmp_path)
    for step in range(5):
        first.write("end", "run", status="FINISHED", time=step)
    first.close()
    (place,) = kept(tmp_path)
    with (place / "writes.jsonl").open("a") as stream:
        stream.write('{"write": "en')  # a kill in the middle of a line
    for answers, left in ((2, 3), (2, 1), (2, 0)):
        client = Flaky(answers)
        again = Journal.reopen(client, place)
        assert again is not None
        again.send()
        assert again.pending == left and len(client.seen) == min(2, left + 2 if left else 1)
        again.release()
    assert not kept(tmp_path)


def test_journal_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    busy = Journal(Flaky(0), tmp_path)
    busy.write("end", "run", status="FINISHED", time=0)
    (place,) = kept(tmp_path)
    script = "import sys, pathlib; from ramen.tracking.journal import Journal\n"
    script += "print(Journal.reopen(None, pathlib.Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", script, str(place)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_mistake_of_ours_is_no_outage(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    class Strict:
        def set_terminated(self, *args: Any) -> None:
            raise MlflowException.invalid_parameter_value("no such status")

    with pytest.raises(MlflowException):
        Journal(Strict(), tmp_path).write("end", "run", status="x", time=0)
    assert not list(tmp_path.iterdir())


def test_run_without_an_id_in_the_answer_is_kept(tmp_path: Path) -> None:
    from types import SimpleNamespace

    class Nameless:
        def create_run(self, *arguments: Any, **values: Any) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=""))

    found = Journal(Nameless(), tmp_path)
    assert found.create_run("0", "ramen", {}).startswith("kept-") and found.pending == 1


def test_rows_are_plain_json(tmp_path: Path) -> None:
    made = Journal(Flaky(0), tmp_path)
    made.write("metrics", "run", points=[["loss", 0.5, 1, 2]])
    (place,) = kept(tmp_path)
    row = json.loads((place / "writes.jsonl").read_text())
    assert row == {"write": "metrics", "run": "run", "values": {"points": [["loss", 0.5, 1, 2]]}}


class NoFiles(Flaky):
    """A store that takes everything but files."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1000)
        self.error: Exception | None = error

    def log_artifact(self, *args: Any) -> None:
        if self.error:
            raise self.error
        self.seen.append("log_artifact")


def _http(status: int) -> Exception:
    import requests

    answer = requests.Response()
    answer.status_code = status
    return requests.HTTPError(f"{status} error", response=answer)


def test_file_that_is_too_large_is_dropped_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, client = tmp_path / "report.html", NoFiles(_http(413))
    report.write_text("x")
    made = Journal(client, tmp_path / "spool")
    made.write("artifact", "run", file=report, folder="")
    made.write("end", "run", status="FINISHED", time=0)
    assert client.seen == ["set_terminated"] and not made.pending
    assert "warning: report.html was refused by the tracking store and is dropped: 413 error" in capsys.readouterr().err


def test_files_that_wait_hold_up_nothing_else_and_are_sent_later(tmp_path: Path) -> None:
    client = NoFiles(_http(403))
    made = Journal(client, tmp_path / "spool")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        made.write("artifact", "run", file=tmp_path / name, folder="")
    made.write("end", "run", status="FINISHED", time=0)
    made.close()
    assert client.seen == ["set_terminated"] and made.pending == 2
    (place,) = kept(tmp_path / "spool")
    client.error = None
    again = Journal.reopen(client, place)
    assert again is not None and again.pending == 2 and again.send()
    assert client.seen == ["set_terminated", "log_artifact", "log_artifact"] and not kept(tmp_path / "spool")
