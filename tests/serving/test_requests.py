"""Hostile requests to the serving API: no status 500, no echo, no unbounded body; and many requests at once."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from ramen.config import EncoderConfig, IndexConfig
from ramen.encoder.loading import load_encoder
from ramen.errors import RamenError
from ramen.index.build import build_index
from ramen.index.retriever import Retriever
from ramen.publishing.registry import UnknownVersion, Version
from ramen.serving import app as serving
from ramen.serving import limits

TEXTS = [f"label {name} {number}" for number in range(5) for name in ("pepper", "rook", "harbour", "comet")]
EXAMPLES = int(os.environ.get("RAMEN_FUZZ_EXAMPLES", "25"))
"""Requests of each property; `make fuzz-serving` sends many more."""


class Graph:
    """As much of a TrainingGraph as the application calls."""

    digest = "d"

    def describe(self, uid: str) -> dict[str, object]:
        return {"bin": "tail", "documents": 1}

    def explain(self, query: Any, uids: list[str], encode: Any) -> list[list[dict[str, object]]]:
        vectors = encode([f"anchor of {uid}" for uid in uids])
        return [
            [{"set": "links", "text": uid, "cosine": float(v @ query)}] for uid, v in zip(uids, vectors, strict=True)
        ]


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """The application on a registry of two versions, in the arithmetic of processors with bf16."""
    encoder = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16"))
    index = build_index(encoder.encode(TEXTS), IndexConfig(kind="flat"))

    def resolve(model: str, version: str) -> int:
        if version not in ("champion", "1", "2"):
            raise UnknownVersion(f"model {model!r} has no version {version[:100]!r}")
        return 2 if version == "2" else 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "resolve_version", resolve)
        patch.setattr(serving, "load_version", lambda *_: Retriever(encoder, index, TEXTS, TEXTS))
        patch.setattr(serving, "versions", lambda model: [Version(1, ["champion"], 0, "r", {"p_at_1": "nan"})])
        yield serving.make_app("ramen", graph=Graph(), ui=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def _post(client: TestClient, body: bytes, kind: str = "application/json") -> tuple[int, str]:
    answer = client.post("/api/query", content=body, headers={"Content-Type": kind})
    assert len(answer.content) < 5_000, "the input is not repeated"
    return answer.status_code, answer.text


HUGE = b"9" * 5000
BODIES: dict[str, tuple[bytes, int, str]] = {
    "NaN": (b'{"text": "x", "k": NaN}', 422, "not valid JSON"),
    "-Infinity": (b'{"text": -Infinity}', 422, "not valid JSON"),
    "1e400": (b'{"text": "x", "k": 1e400}', 422, "valid integer"),
    "5000 digits": (b'{"text": "x", "k": ' + HUGE + b"}", 422, "out of range"),
    "lone surrogate": (b'{"text": "\\ud800"}', 422, "not valid JSON"),
    "lone surrogate to exclude": (b'{"text": "x", "exclude": ["\\udc00"]}', 422, "surrogate"),
    "key with a surrogate": (b'{"\\ud800": 1}', 422, "not valid JSON"),
    "superscript version": ('{"text": "x", "version": "²"}'.encode(), 404, "no version"),
    "arabic version": ('{"text": "x", "version": "٣"}'.encode(), 404, "no version"),
    "version of 200 digits": (b'{"text": "x", "version": "' + b"9" * 200 + b'"}', 404, "no version"),
    "boolean k": (b'{"text": "x", "k": true}', 422, "valid integer"),
    "text of 10 MB": (b'{"text": "' + b"x" * 10_000_000 + b'"}', 413, "larger than 1,048,576 bytes"),
    "text of 900 kB": (b'{"text": "' + b"x" * 900_000 + b'"}', 422, "at most 10000 characters"),
    "key of 900 kB": (b'{"' + b"x" * 900_000 + b'": 1}', 422, "xxx..."),
    "50,000 keys": (json.dumps(dict.fromkeys(map(str, range(50_000)), 1)).encode(), 422, "50,000 keys"),
    "100,000 uids": (json.dumps({"text": "x", "exclude": [1] * 100_000}).encode(), 422, "at most 1000 items"),
    "long uid": (json.dumps({"text": "x", "exclude": ["u" * 1001]}).encode(), 422, "at most 1000 characters"),
    "100,000 brackets": (b"[" * 100_000, 422, "recursion limit"),
    "nested text": (b'{"text": ' + b"[" * 150 + b"]" * 150 + b"}", 422, "valid string"),
    "latin-1": (b'{"text": "caf\xe9"}', 422, "not valid JSON"),
    "UTF-16": ('{"text": "x"}'.encode("utf-16"), 422, "not valid JSON"),
    "blank": (b'{"text": " \\u3000\\n"}', 422, "is empty"),
    "nothing": (b"", 422, "required"),
    "list": (b"[]", 422, "dictionary"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_hostile_body_is_refused_in_few_words(client: TestClient, name: str) -> None:
    body, status, said = BODIES[name]
    found, text = _post(client, body)
    assert found == status and said in text, text


def test_other_content_types_are_refused(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "x" * 900, ""):
        status, text = _post(client, b'{"text": "x"}', kind)
        assert status == 415 and "expected 'application/json'" in text


def test_longest_valid_body_is_answered(client: TestClient) -> None:
    body = {"text": "\U0001f600" * 10_000, "k": 1000, "explain": True, "exclude": ["u" * 50] * 1000}
    assert client.post("/api/query", json=body).status_code == 200


def test_body_that_never_ends_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_DISCARDED", 4 << 20)
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 16
            yield b"x" * (1 << 16)

    answer = client.post("/api/query", content=chunks(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "larger" in answer.text


def test_registry_out_of_reach_is_503_and_names_no_host(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RamenError("MLflow at postgresql://u:geheim@db.internal/mlflow: refused")

    monkeypatch.setattr(serving, "versions", fail)
    monkeypatch.setattr(serving, "resolve_version", fail)
    for answer in (
        client.get("/api/versions"), client.post("/api/query", json={"text": "x", "version": "other"}),
    ):  # fmt: skip
        assert answer.status_code == 503 and "db.internal" not in answer.text and "log" in answer.json()["detail"]
    assert client.post("/api/query", json={"text": "x"}).status_code == 200, "what is in memory keeps answering"


def test_explanations_and_queries_at_once_are_answered_as_alone(client: TestClient) -> None:
    bodies = [{"text": f"rook {i}", "k": 5, "explain": i % 2 == 0, "version": "12"[i % 2]} for i in range(40)]

    def scores(body: dict[str, Any]) -> list[float]:
        answer = client.post("/api/query", json=body)
        assert answer.status_code == 200, answer.text
        labels = answer.json()["labels"]
        return [label["score"] for label in labels] + [
            one["cosine"] for label in labels for one in label.get("anchors", ())
        ]

    alone = [scores(body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(scores, bodies * 2))
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(alone * 2), atol=2e-2)


def test_encoder_may_be_called_from_several_threads() -> None:
    encoder = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16"))
    alone = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16")).encode(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: encoder.encode(TEXTS), range(60)):
            np.testing.assert_allclose(found, alone, atol=1e-6)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)
bodies = st.binary() | json_values.map(lambda value: json.dumps(value).encode()) | st.fixed_dictionaries(
    {"text": st.text() | json_values},
    optional={"k": json_values, "version": st.text() | json_values, "explain": json_values, "exclude": json_values},
).map(lambda value: json.dumps(value).encode())  # fmt: skip


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES == 25)
@given(body=bodies)
def test_any_body_is_answered_or_refused(client: TestClient, body: bytes) -> None:
    status, text = _post(client, body)
    assert status in (200, 404, 413, 422), text


CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


def test_api_keeps_to_its_openapi_page(app: FastAPI) -> None:
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    for operation in schema.get_all_operations():

        @settings(
            max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate], derandomize=EXAMPLES == 25,
        )  # fmt: skip
        @given(case=operation.ok().as_strategy())
        def conforms(case: Any) -> None:
            answer = case.call()
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        conforms()
    assert statuses[200] > 3, statuses
