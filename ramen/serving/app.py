"""The server behind `ramen serve`: queries over HTTP, and a page that sets two versions side by side.

    GET  /healthz                               {"status": "ok"}
    GET  /api/versions                          versions, newest first, with aliases and figures
    POST /api/query  {"text", "k", "version", "exclude"}   labels of one version, without those whose uids are excluded
    GET  /                                      the page (with --ui)

A version given by alias is looked up again every `LOOK_AGAIN` seconds; when the alias has moved, the new version is
loaded while the old one still answers.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field

from ramen.errors import RamenError
from ramen.index.combining import Combiner
from ramen.index.registry import load_version, resolve_version, versions
from ramen.index.retriever import DEFAULT_K, MOST_LABELS
from ramen.serving.graph import TrainingGraph

LOOK_AGAIN = 30.0
MOST_TEXT, MOST_VERSIONS = 10_000, 4
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere is loaded, and the page is framed by nobody."""


class Query(BaseModel):
    """What is asked."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=MOST_TEXT)
    k: int = Field(DEFAULT_K, ge=1, le=MOST_LABELS)
    version: str = Field("", max_length=200)
    explain: bool = False
    exclude: list[str] = Field(default_factory=list, max_length=MOST_LABELS)


@dataclass
class Loaded:
    """A version in memory."""

    number: int
    combiner: Combiner
    dataset: str
    used: float


class Versions:
    """The versions in memory, at most `MOST_VERSIONS`; the one unused for longest goes."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._loaded: dict[int, Loaded] = {}
        self._aliases: dict[str, tuple[int, float]] = {}
        self._lock = threading.RLock()

    def get(self, version: str) -> Loaded:
        """A version by number or alias. Raises RamenError when there is none."""
        number = self._number(version)
        with self._lock:
            if number not in self._loaded:
                self._load(number)
            found = self._loaded[number]
            found.used = time.monotonic()
            return found

    def _number(self, version: str) -> int:
        if version.isdigit() and int(version) in self._loaded:
            return int(version)
        known = self._aliases.get(version)
        if known is not None and time.monotonic() - known[1] < LOOK_AGAIN:
            return known[0]
        try:
            number = resolve_version(self.model, version)
        except RamenError:
            if known is None:
                raise
            number = known[0]  # the registry is out of reach: what is in memory goes on answering
        if known is not None and number != known[0] and number not in self._loaded:
            # the old version answers while the new one is loaded
            self._aliases[version] = (known[0], time.monotonic())
            threading.Thread(target=self._take_over, args=(version, number), daemon=True).start()
            return known[0]
        self._aliases[version] = (number, time.monotonic())
        return number

    def _take_over(self, alias: str, number: int) -> None:
        try:
            made = self._open(number)
        except RamenError:
            return  # looked at again in a while
        with self._lock:
            self._keep(made)
            self._aliases[alias] = (number, time.monotonic())

    def _load(self, number: int) -> None:
        self._keep(self._open(number))

    def _open(self, number: int) -> Loaded:
        tags = next((one.tags for one in versions(self.model) if one.number == number), {})
        retriever = load_version(self.model, str(number))
        return Loaded(number, Combiner(retriever), tags.get("dataset", ""), time.monotonic())

    def _keep(self, made: Loaded) -> None:
        self._loaded[made.number] = made
        while len(self._loaded) > MOST_VERSIONS:
            del self._loaded[min(self._loaded, key=lambda number: self._loaded[number].used)]


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
    app = FastAPI(title="ramen", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json")

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/versions")
    def listed() -> list[dict[str, Any]]:
        try:
            found = versions(model)
        except RamenError as error:
            raise HTTPException(503, str(error)) from None
        return [
            {"version": one.number, "aliases": one.aliases, "created": one.created, "metrics": one.metrics,
             "index": one.tags.get("index", ""), "labels": one.tags.get("labels", ""),
             "answers": one.tags.get("smoke") == "passed"}
            for one in found
        ]  # fmt: skip

    @app.post("/api/query")
    def query(asked: Query) -> dict[str, Any]:
        start = time.perf_counter()
        if not asked.text.strip():
            raise HTTPException(422, "text: is empty")
        try:
            found = known.get(asked.version or version)
        except RamenError as error:
            raise HTTPException(404, str(error)) from None
        hits = found.combiner.query([asked.text], asked.k, asked.exclude)[0]
        took = 1000 * (time.perf_counter() - start)
        labels: list[dict[str, Any]] = [{"uid": hit.uid, "text": hit.text, "score": hit.score} for hit in hits]
        if graph is not None:
            for label in labels:
                label |= graph.describe(label["uid"])
            if asked.explain:
                encode = found.combiner.retriever.encoder.encode
                anchors = graph.explain(encode([asked.text])[0], [label["uid"] for label in labels], encode)
                for label, why in zip(labels, anchors, strict=True):
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
            return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": POLICY})

    return app
