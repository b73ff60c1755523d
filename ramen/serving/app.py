"""The application behind `ramen serve`: queries over HTTP, and a page that shows two versions side by side.

    GET  /healthz                               {"status": "ok"}
    GET  /api/versions                          versions, newest first, with aliases and metrics
    POST /api/query  {"text", "k", "version", "explain", "exclude"}   labels from one version
    GET  /                                      the page (with --ui)

An alias is resolved again every `ALIAS_REFRESH_SECONDS`. If it has moved, the new version is loaded in the background
while the old one keeps answering. All texts for a version, including those of explanations, are encoded in the thread
of its `RequestBatcher`. `limits` validates requests.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from ramen.console import warn
from ramen.errors import RamenError
from ramen.index.request_batching import RequestBatcher
from ramen.index.retriever import DEFAULT_K, MAX_LABELS
from ramen.publishing.registry import UnknownVersion, list_versions, load_version, parse_version_number, resolve_version
from ramen.serving.explain import TrainingGraph
from ramen.serving.limits import BodyLimit, JsonRoute, refuse_invalid

ALIAS_REFRESH_SECONDS = 30.0
LOAD_SECONDS = 60.0
"""How long a request waits for other versions to load."""
MAX_TEXT_CHARACTERS, MAX_UID_CHARACTERS = 10_000, 1_000
MAX_VERSIONS = 4
"""Versions in memory."""
MAX_EXPLAINED = 100
"""Labels of an answer that are explained; each costs the encoding of its anchors."""
PAGE = Path(__file__).with_name("page.html")
SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts and cannot be framed."""
UNAVAILABLE = "the model registry is unavailable; see the server's log"


class ErrorResponse(BaseModel):
    """Why a request was refused."""

    detail: str


class QueryRequest(BaseModel):
    """A text to find labels for, and the version that answers."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        description="Query text with at least one character that is not white space.",
        json_schema_extra={"pattern": r"\S"},
    )
    k: StrictInt = Field(DEFAULT_K, ge=1, le=MAX_LABELS, description="Number of labels to return.")
    version: str = Field(
        "", max_length=200, description="Version number or alias; empty: the version that the server was started with."
    )
    explain: StrictBool = Field(
        False, description=f"Return anchors of the training graph for the first {MAX_EXPLAINED} labels."
    )
    exclude: list[Annotated[str, Field(max_length=MAX_UID_CHARACTERS)]] = Field(
        default_factory=list, max_length=MAX_LABELS, description="Uids of labels to leave out."
    )

    @field_validator("text")
    @classmethod
    def _not_blank(cls, text: str) -> str:
        if not text.strip():
            raise PydanticCustomError("empty", "is empty")
        return text


@dataclass
class LoadedVersion:
    """A version in memory; `last_used` is in seconds of `time.monotonic`."""

    number: int
    batcher: RequestBatcher
    dataset: str
    last_used: float


class VersionCache:
    """Up to `MAX_VERSIONS` versions in memory; the least recently used one is evicted.

    Thread-safe. One version is loaded at a time; loaded versions keep answering meanwhile.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._loaded: dict[int, LoadedVersion] = {}
        self._aliases: dict[str, tuple[int, float]] = {}
        """Alias -> version number, and when it was resolved."""
        self._lock, self._load_lock = threading.Lock(), threading.Lock()

    def get(self, version: str) -> LoadedVersion:
        """Return a version by number or alias, loading it if necessary.

        Raises:
            UnknownVersion: there is no such version.
            RamenError: the registry is unavailable, the version does not load, or other versions took longer than
                `LOAD_SECONDS` to load.
        """
        number = self._resolve(version)
        with self._lock:
            loaded = self._loaded.get(number)
        if loaded is None:
            if not self._load_lock.acquire(timeout=LOAD_SECONDS):
                raise RamenError(f"version {number}: other versions were loading for {LOAD_SECONDS:g} s; try again")
            try:
                loaded = self._load(number)
            finally:
                self._load_lock.release()
        loaded.last_used = time.monotonic()
        return loaded

    def _resolve(self, version: str) -> int:
        """Return the number of a version; a known alias is answered from memory and refreshed in the background."""
        number = parse_version_number(version)
        with self._lock:
            if number in self._loaded:
                return self._loaded[number].number
            known = self._aliases.get(version)
            stale = known is not None and time.monotonic() - known[1] >= ALIAS_REFRESH_SECONDS
            if known is not None and stale:
                self._aliases[version] = (known[0], time.monotonic())  # only this request starts a refresh
        if known is None:
            resolved = resolve_version(self.model, version)
            if number is None:
                with self._lock:
                    self._aliases[version] = (resolved, time.monotonic())
            return resolved
        if stale:
            threading.Thread(target=self._refresh_alias, args=(version, known[0]), daemon=True).start()
        return known[0]

    def _refresh_alias(self, alias: str, known: int) -> None:
        """Load the version that an alias points to now; if that fails, the alias stays at the known version."""
        try:
            number = resolve_version(self.model, alias)
            if number != known:
                with self._load_lock:
                    self._load(number)
        except RamenError as error:
            warn(f"alias {alias!r} stays at version {known}: {error}")
            return
        with self._lock:
            self._aliases[alias] = (number, time.monotonic())

    def _load(self, number: int) -> LoadedVersion:
        """Load a version unless it is in memory; the caller holds `_load_lock`."""
        with self._lock:
            loaded = self._loaded.get(number)
        if loaded is not None:
            return loaded
        tags = next((version.tags for version in list_versions(self.model) if version.number == number), {})
        batcher = RequestBatcher(load_version(self.model, str(number)))
        loaded = LoadedVersion(number, batcher, tags.get("dataset", ""), time.monotonic())
        with self._lock:
            self._loaded[number] = loaded
            while len(self._loaded) > MAX_VERSIONS:
                del self._loaded[min(self._loaded, key=lambda number: self._loaded[number].last_used)]
        return loaded


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (404, 408, 413, 415, 503)
}
"""Error statuses of a query, for the OpenAPI page."""


def make_app(model: str, version: str = "champion", *, ui: bool = False, graph: TrainingGraph | None = None) -> FastAPI:
    """Return the application.

    Args:
        model: registered model.
        version: default version of a request, by number or alias; it is loaded at once.
        ui: whether to serve the page.
        graph: training graph of the run that trained the version; with it, labels are described and explained.

    Raises:
        RamenError: there is no such version, or it does not load.
    """
    cache = VersionCache(model)
    cache.get(version)
    app = FastAPI(
        title="ramen",
        description="Labels of texts from the registered versions of a retriever.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        exception_handlers={RequestValidationError: refuse_invalid},
    )
    app.router.route_class = JsonRoute
    app.add_middleware(BodyLimit)

    @app.get("/healthz", summary="Health check")
    async def check_health() -> dict[str, str]:
        """Return status ok; the default version has been loaded by then."""
        return {"status": "ok"}

    @app.get("/api/versions", summary="List versions", responses={503: {"model": ErrorResponse}})
    def get_versions() -> list[dict[str, Any]]:
        """Return the registered versions, newest first, with aliases and metrics.

        `answers` is true if the version passed its smoke query.
        """
        try:
            registered = list_versions(model)
        except RamenError as error:
            raise _unavailable(error) from None
        return [
            {"version": one.number, "aliases": one.aliases, "created": one.created, "metrics": one.metrics,
             "index": one.tags.get("index", ""), "labels": one.tags.get("labels", ""),
             "answers": one.tags.get("smoke") == "passed"}
            for one in registered
        ]  # fmt: skip

    @app.post("/api/query", summary="Find labels", responses=ERROR_RESPONSES)
    def query(request: QueryRequest) -> dict[str, Any]:
        """Return the k best labels of a text, best first, with their cosine as `score`.

        If the server has the artifacts of a run, each label has its number of training documents and its frequency
        bin (head, torso, tail). `same_dataset` tells whether the version was trained on the dataset of these artifacts.
        """
        start = time.perf_counter()
        try:
            loaded = cache.get(request.version or version)
        except UnknownVersion as error:
            raise HTTPException(404, str(error)) from None
        except RamenError as error:
            raise _unavailable(error) from None
        hits = loaded.batcher.query([request.text], request.k, request.exclude)[0]
        milliseconds = 1000 * (time.perf_counter() - start)
        labels: list[dict[str, Any]] = [{"uid": hit.uid, "text": hit.text, "score": hit.score} for hit in hits]
        if graph is not None:
            _add_training_facts(labels, graph, request, loaded.batcher)
        return {
            "version": loaded.number,
            "labels": labels,
            "ms": round(milliseconds, 2),
            "explained": graph is not None,
            "same_dataset": graph is not None and loaded.dataset == graph.digest,
        }

    if ui:
        app.get("/", summary="Comparison page", response_class=HTMLResponse)(page)
    return app


def page() -> HTMLResponse:
    """Return the page that shows two versions side by side."""
    headers = {"Content-Security-Policy": SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)


def _add_training_facts(
    labels: list[dict[str, Any]], graph: TrainingGraph, request: QueryRequest, batcher: RequestBatcher
) -> None:
    """Add frequency and bin to each label, and the anchors that explain it if the request asks for explanations."""
    for label in labels:
        label |= graph.describe(label["uid"])
    if request.explain:
        explained = labels[:MAX_EXPLAINED]
        uids = [label["uid"] for label in explained]
        anchors_of_labels = graph.explain(batcher.encode([request.text])[0], uids, batcher.encode)
        for label, anchors in zip(explained, anchors_of_labels, strict=True):
            label["anchors"] = anchors


def _unavailable(error: RamenError) -> HTTPException:
    """Return status 503; the reason is only logged, because it names hosts and paths."""
    warn(error)
    return HTTPException(503, UNAVAILABLE)
