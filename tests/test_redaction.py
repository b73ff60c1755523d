"""Credentials are removed from messages, logs and tracked values."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramen.console import warn
from ramen.dvc_pointers import Pointer
from ramen.errors import DataError, Defect, RamenError, error_lines, first_line
from ramen.redaction import RedactingFilter, redact, strip_credentials
from ramen.tracking import open_tracker


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:geheim@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("mysql+pymysql://u:ge@heim@db/x", "mysql+pymysql://***@db/x"),
        ("postgresql://u:ge/he?im@db/x", "postgresql://***@db/x"),
        ("https://geheim@git.example/a.git", "https://***@git.example/a.git"),
        ("'http://u:geheim@h/a', see http://h/b", "'http://***@h/a', see http://h/b"),
        ("http://h/a?password=geheim&b=1", "http://h/a?password=***&b=1"),
        ("http://h/?x=1&access_token=geheim", "http://h/?x=1&access_token=***"),
        ("s3://b/k?X-Amz-Signature=geheim&X-Amz-Date=2", "s3://b/k?X-Amz-Signature=***&X-Amz-Date=2"),
        ("https://a.example/c?sv=1&sig=geheim", "https://a.example/c?sv=1&sig=***"),
        ("http://h/?api_key=geheim#x", "http://h/?api_key=***#x"),
        ("connection failed: host=db password=geheim dbname=x", "connection failed: host=db password=*** dbname=x"),
        ("Authorization: Bearer geheimgeheim", "Authorization: Bearer ***"),
        ("http://u:123/ge?heim@h/x", "http://***@h/x"),
        ("Kubeflow Pipelines at u:geheim@h:1: refused", "Kubeflow Pipelines at ***@h:1: refused"),
        ("http://h/?accessToken=geheim&a=1", "http://h/?accessToken=***&a=1"),
        ("http://h/#access_token=geheim", "http://h/#access_token=***"),
        ("https://h:1/?token=geheim: refused", "https://h:1/?token=***: refused"),
        ('{"password": "geheim", "a": 1}', '{"password": ***, "a": 1}'),
        ("PGPASSWORD=geheim psql", "PGPASSWORD=*** psql"),
        ("api_key: geheim", "api_key: ***"),
        ("Authorization: token geheim", "Authorization: token ***"),
        # no credentials
        ("http://localhost:8000/a", "http://localhost:8000/a"),
        ("training.epochs: 5; tokens: 7", "training.epochs: 5; tokens: 7"),
        ("models:/ramen@champion", "models:/ramen@champion"),
        ("registry.example/ramen@sha256:1", "registry.example/ramen@sha256:1"),
        ("encoder.tokens_per_chunk=512 base.keys=3", "encoder.tokens_per_chunk=512 base.keys=3"),
        ("sqlite:////home/me/mlflow.db?timeout=5", "sqlite:////home/me/mlflow.db?timeout=5"),
    ],
)  # fmt: skip
def test_only_credentials_are_removed(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_secret_of_the_environment_is_removed_anywhere_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:ge%40 h/eim@db/x")
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "a-long-token")
    assert redact("no ge%40 h/eim, no ge@ h/eim, no a-long-token") == "no ***, no ***, no ***"
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "a\nlong-token")
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "u:pass/word@h")
    assert redact("Invalid header value b'Bearer a\\nlong-token', u:pass/word@h") == (
        "Invalid header value b'Bearer ***', ***@h"
    )


@settings(max_examples=200, deadline=None)
@given(st.text("abcXYZ019!$%&'()*+,;=:@-._~/?#", min_size=6, max_size=20))
def test_any_password_of_a_url_is_removed(password: str) -> None:
    secret = f"{password}Geheim"
    assert "Geheim" not in redact(f"cannot reach postgresql://me:{secret}@db.example/mlflow (refused)")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_redaction_accepts_any_text_and_is_idempotent(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_errors_warnings_and_log_lines_are_redacted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    url = "https://u:geheim@h/x"
    shown = [
        str(RamenError(f"{url}: no")),
        str(DataError(Defect(url, "no"))),
        *error_lines(url),
        first_line(ValueError(url)),
    ]
    warn(url)
    record = logging.LogRecord("ramen", logging.INFO, "", 0, "see %s", (url,), None)
    RedactingFilter().filter(record)
    for text in [*shown, capsys.readouterr().err, record.getMessage()]:
        assert "geheim" not in text and "***@h/x" in text


def test_tracked_values_are_redacted(store: Path) -> None:
    import mlflow

    with pytest.raises(ValueError), open_tracker("stage", {"remote": "https://u:geheim@h/x"}) as track:
        track.params({"data.path": "s3://key:geheim@bucket/x", "list": ["http://u:geheim@h"]})
        track.tags({"origin": "https://geheim@git.example/a.git"})
        track.dataset("dataset", "1", "https://u:geheim@h/d")
        raise ValueError("postgresql://u:geheim@db refused")
    run = mlflow.MlflowClient().get_run(track.run_id)
    assert "geheim" not in repr(run.to_dictionary())
    assert run.data.params["data.path"] == "s3://***@bucket/x"
    assert run.data.tags["ramen.error"] == "postgresql://***@db refused"


def test_dvc_pointer_contains_no_credentials() -> None:
    pointer = Pointer("graph", "0" * 32 + ".dir", 1, 1, "https://u:geheim@h/dvc", "http://u:geheim@minio:9000")
    assert "geheim" not in pointer.to_yaml() and "https://h/dvc" in pointer.to_yaml()
    assert strip_credentials("s3://bucket/a") == "s3://bucket/a"


@pytest.mark.slow
def test_command_does_not_print_a_password(tmp_path: Path) -> None:
    uri = "postgresql+nodriver://me:geheim@127.0.0.1:9/mlflow?password=geheim"
    env = os.environ | {"MLFLOW_TRACKING_URI": uri, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "ramen", "compare"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and "geheim" not in done.stdout + done.stderr
    assert "postgresql+nodriver://***@127.0.0.1:9/mlflow?password=***" in done.stderr
