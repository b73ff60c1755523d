"""Hostile and concurrent requests to the serving API: no status 500, no echo of the input, no unbounded body."""

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
from ramen.publishing.registry import RegisteredVersion, UnknownVersion
from ramen.serving import app as serving
from ramen.serving import limits

TEXTS = [f"label {name} {number}" for number in range(5) for name in ("pepper", "rook", "harbour", "comet")]
EXAMPLES = int(os.environ.get("RAMEN_FUZZ_EXAMPLES", "25"))
"""Generated requests per test; `make fuzz-serving` sends many more."""


class FakeTrainingGraph:
    """The part of TrainingGraph that the application uses."""

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
    """The application with a registry of two versions and an encoder in bf16."""
    encoder = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16"))
    index = build_index(encoder.encode(TEXTS), IndexConfig(kind="flat"))

    def resolve(model: str, version: str) -> int:
        if version not in ("champion", "1", "2"):
            raise UnknownVersion(f"model {model!r} has no version {version[:100]!r}")
        return 2 if version == "2" else 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "resolve_version", resolve)
        patch.setattr(serving, "load_version", lambda *_: Retriever(encoder, index, TEXTS, TEXTS))
        patch.setattr(
            serving, "versions", lambda model: [RegisteredVersion(1, ["champion"], 0, "r", {"p_at_1": "nan"})]
        )
        yield serving.make_app("ramen", graph=FakeTrainingGraph(), ui=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, body: bytes, content_type: str = "application/json") -> tuple[int, str]:
    response = client.post("/api/query", content=body, headers={"Content-Type": content_type})
    assert len(response.content) < 5_000, "the response must not repeat the input"
    return response.status_code, response.text


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
def test_hostile_body_gets_short_error(client: TestClient, name: str) -> None:
    body, expected_status, expected_text = BODIES[name]
    status, text = post(client, body)
    assert status == expected_status and expected_text in text, text


def test_other_content_types_are_refused(client: TestClient) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "x" * 900, ""):
        status, text = post(client, b'{"text": "x"}', content_type)
        assert status == 415 and "expected 'application/json'" in text


def test_longest_valid_body_is_answered(client: TestClient) -> None:
    body = {"text": "\U0001f600" * 10_000, "k": 1000, "explain": True, "exclude": ["u" * 50] * 1000}
    assert client.post("/api/query", json=body).status_code == 200


def test_endless_body_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_DISCARDED_BYTES", 4 << 20)

    def chunks() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * (1 << 16)

    response = client.post("/api/query", content=chunks(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413 and "larger" in response.text


def test_unavailable_registry_is_503_without_host_names(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RamenError("MLflow at postgresql://u:geheim@db.internal/mlflow: refused")

    monkeypatch.setattr(serving, "versions", fail)
    monkeypatch.setattr(serving, "resolve_version", fail)
    for response in (
        client.get("/api/versions"), client.post("/api/query", json={"text": "x", "version": "other"}),
    ):  # fmt: skip
        assert response.status_code == 503 and "db.internal" not in response.text and "log" in response.json()["detail"]
    assert client.post("/api/query", json={"text": "x"}).status_code == 200, "loaded versions keep answering"


def test_concurrent_requests_get_same_answers_as_sequential_ones(client: TestClient) -> None:
    bodies = [{"text": f"rook {i}", "k": 5, "explain": i % 2 == 0, "version": "12"[i % 2]} for i in range(40)]

    def scores(body: dict[str, Any]) -> list[float]:
        response = client.post("/api/query", json=body)
        assert response.status_code == 200, response.text
        labels = response.json()["labels"]
        return [label["score"] for label in labels] + [
            anchor["cosine"] for label in labels for anchor in label.get("anchors", ())
        ]

    sequential = [scores(body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        concurrent = list(pool.map(scores, bodies * 2))
    np.testing.assert_allclose(np.concatenate(concurrent), np.concatenate(sequential * 2), atol=2e-2)


def test_encoder_is_thread_safe() -> None:
    encoder = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16"))
    expected = load_encoder("tiny", EncoderConfig(name="tiny", precision="bf16")).encode(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(lambda _: encoder.encode(TEXTS), range(60)):
            np.testing.assert_allclose(vectors, expected, atol=1e-6)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)
bodies = st.binary() | json_values.map(lambda value: json.dumps(value).encode()) | st.fixed_dictionaries(
    {"text": st.text() | json_values},
    optional={"k": json_values, "version": st.text() | json_values, "explain": json_values, "exclude": json_values},
).map(lambda value: json.dumps(value).encode())  # fmt: skip


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES == 25)
@given(body=bodies)
def test_any_body_is_answered_or_refused(client: TestClient, body: bytes) -> None:
    status, text = post(client, body)
    assert status in (200, 404, 413, 422), text


CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


def test_responses_conform_to_openapi_schema(app: FastAPI) -> None:
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)
    for operation in schema.get_all_operations():

        @settings(
            max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate], derandomize=EXAMPLES == 25,
        )  # fmt: skip
        @given(case=operation.ok().as_strategy())
        def conforms(case: Any) -> None:
            response = case.call()
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        conforms()
    assert statuses[200] > 3, statuses
