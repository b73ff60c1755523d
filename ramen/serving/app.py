"""The server behind `ramen serve`: queries over HTTP, and a page that sets two versions side by side.

    GET  /healthz                               {"status": "ok"}
    GET  /api/versions                          versions, newest first, with aliases and figures
    POST /api/query  {"text", "k", "version", "explain", "exclude"}   labels of one version, without excluded uids
    GET  /                                      the page (with --ui)

A version given by alias is looked up again every `LOOK_AGAIN` seconds; when the alias has moved, the new version is
loaded while the old one still answers. All texts of a version, those of explanations included, are encoded in the
thread of its `RequestBatcher`. What is accepted of a request is in `limits`.
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
from ramen.index.retriever import DEFAULT_K, MOST_LABELS
from ramen.publishing.registry import UnknownVersion, load_version, resolve_version, version_number, versions
from ramen.serving.explain import TrainingGraph
from ramen.serving.limits import BodyLimit, JsonRoute, refuse_invalid

LOOK_AGAIN = 30.0
LOAD_SECONDS = 60.0
"""For which a request waits while other versions are loaded."""
MOST_TEXT, MOST_UID, MOST_VERSIONS = 10_000, 1_000, 4
MOST_EXPLAINED = 100
"""Labels of an answer that are explained: the anchors of each are encoded."""
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere is loaded, and the page is framed by nobody."""
OUT_OF_REACH = "the model registry cannot be used at the moment; the server's log says why"


class Refusal(BaseModel):
    """Why a request is refused."""

    detail: str


class Query(BaseModel):
    """A query: a text, how many labels to return, and which version answers.

    Attributes:
        text: at least one character that is not white space.
        k: labels.
        version: number or alias; "" = the version that the server was started with.
        explain: add the anchors of the first `MOST_EXPLAINED` labels.
        exclude: uids of labels that are left out.
    """

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=MOST_TEXT, json_schema_extra={"pattern": r"\S"})
    k: StrictInt = Field(DEFAULT_K, ge=1, le=MOST_LABELS)
    version: str = Field("", max_length=200)
    explain: StrictBool = False
    exclude: list[Annotated[str, Field(max_length=MOST_UID)]] = Field(default_factory=list, max_length=MOST_LABELS)

    @field_validator("text")
    @classmethod
    def _not_blank(cls, text: str) -> str:
        if not text.strip():
            raise PydanticCustomError("empty", "is empty")
        return text


@dataclass
class Loaded:
    """A version in memory."""

    number: int
    combiner: RequestBatcher
    dataset: str
    used: float


class Versions:
    """The versions in memory, at most `MOST_VERSIONS`; the one unused for longest goes.

    Several threads may call `get`. One version is loaded at a time, while those in memory answer.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._loaded: dict[int, Loaded] = {}
        self._aliases: dict[str, tuple[int, float]] = {}
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def get(self, version: str) -> Loaded:
        """A version by number or alias.

        Raises:
            UnknownVersion: there is none.
            RamenError: the registry cannot be used, the version does not load, or others have been loading for
                `LOAD_SECONDS`.
        """
        number = self._number(version)
        with self._lock:
            found = self._loaded.get(number)
        if found is None:
            if not self._loading.acquire(timeout=LOAD_SECONDS):
                raise RamenError(f"version {number}: waited {LOAD_SECONDS:g} s for other versions to load; try again")
            try:
                found = self._load(number)
            finally:
                self._loading.release()
        found.used = time.monotonic()
        return found

    def _number(self, version: str) -> int:
        number = version_number(version)
        with self._lock:
            if number in self._loaded:
                return self._loaded[number].number
            known = self._aliases.get(version)
            stale = known is not None and time.monotonic() - known[1] >= LOOK_AGAIN
            if known is not None and stale:
                self._aliases[version] = (known[0], time.monotonic())  # no other request looks again now
        if known is None:
            found = resolve_version(self.model, version)
            if number is None:
                with self._lock:
                    self._aliases[version] = (found, time.monotonic())
            return found
        if stale:
            # the old version answers while the registry answers and a new version is loaded
            threading.Thread(target=self._follow, args=(version, known[0]), daemon=True).start()
        return known[0]

    def _follow(self, alias: str, known: int) -> None:
        """Load the version that an alias points to now; while the registry is out of reach, the old one answers."""
        try:
            number = resolve_version(self.model, alias)
            if number != known:
                with self._loading:
                    self._load(number)
        except RamenError as error:
            warn(f"alias {alias!r} stays at version {known}: {error}")
            return
        with self._lock:
            self._aliases[alias] = (number, time.monotonic())

    def _load(self, number: int) -> Loaded:
        """Load a version unless it is in memory; the caller holds `_loading`."""
        with self._lock:
            found = self._loaded.get(number)
        if found is not None:
            return found
        tags = next((one.tags for one in versions(self.model) if one.number == number), {})
        found = Loaded(
            number, RequestBatcher(load_version(self.model, str(number))), tags.get("dataset", ""), time.monotonic()
        )
        with self._lock:
            self._loaded[number] = found
            while len(self._loaded) > MOST_VERSIONS:
                del self._loaded[min(self._loaded, key=lambda number: self._loaded[number].used)]
        return found


def make_app(model: str, version: str = "champion", *, ui: bool = False, graph: TrainingGraph | None = None) -> FastAPI:
    """The application.

    Args:
        model: registered model.
        version: that answers when a request names none; it is loaded at once.
        ui: with the page.
        graph: of the run that trained it; labels are then described and explained.

    Raises:
        RamenError: there is no such version, or it does not load.
    """
    known = Versions(model)
    known.get(version)
    app = FastAPI(
        title="ramen",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        exception_handlers={RequestValidationError: refuse_invalid},
    )
    app.router.route_class = JsonRoute
    app.add_middleware(BodyLimit)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/versions", responses={503: {"model": Refusal}})
    def listed() -> list[dict[str, Any]]:
        try:
            found = versions(model)
        except RamenError as error:
            raise _unavailable(error) from None
        return [
            {"version": one.number, "aliases": one.aliases, "created": one.created, "metrics": one.metrics,
             "index": one.tags.get("index", ""), "labels": one.tags.get("labels", ""),
             "answers": one.tags.get("smoke") == "passed"}
            for one in found
        ]  # fmt: skip

    @app.post("/api/query", responses={code: {"model": Refusal} for code in (404, 408, 413, 415, 503)})
    def query(asked: Query) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            found = known.get(asked.version or version)
        except UnknownVersion as error:
            raise HTTPException(404, str(error)) from None
        except RamenError as error:
            raise _unavailable(error) from None
        hits = found.combiner.query([asked.text], asked.k, asked.exclude)[0]
        took = 1000 * (time.perf_counter() - start)
        labels: list[dict[str, Any]] = [{"uid": hit.uid, "text": hit.text, "score": hit.score} for hit in hits]
        if graph is not None:
            for label in labels:
                label |= graph.describe(label["uid"])
            if asked.explain:
                explained, encode = labels[:MOST_EXPLAINED], found.combiner.encode
                anchors = graph.explain(encode([asked.text])[0], [label["uid"] for label in explained], encode)
                for label, why in zip(explained, anchors, strict=True):
                    label["anchors"] = why
        return {
            "version": found.number,
            "labels": labels,
            "ms": round(took, 2),
            "explained": graph is not None,
            "same_dataset": graph is not None and found.dataset == graph.digest,
        }

    if ui:

        @app.get("/", response_class=HTMLResponse)
        def page() -> HTMLResponse:
            headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
            return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    return app


def _unavailable(error: RamenError) -> HTTPException:
    """Status 503; the reason goes to the log alone, since it names hosts and paths."""
    warn(error)
    return HTTPException(503, OUT_OF_REACH)
