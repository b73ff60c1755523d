"""Ask a published retriever, and print its answer for people or for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ramen.index.retriever import DEFAULT_K, Hit


def answer(text: str, *, k: int = DEFAULT_K, model: str = "ramen", version: str = "champion") -> list[Hit]:
    """The k best labels of a text, from a registered version (number or alias). Raises RamenError."""
    from ramen.index.registry import load_version

    return load_version(model, version).query([text], k)[0]


def as_table(hits: Sequence[Hit]) -> str:
    """A plain table: rank, cosine, uid, text."""
    if not hits:
        return "no labels"
    width = max(3, *(len(hit.uid) for hit in hits))
    rows = [f"{rank:>4}  {hit.score:>6.3f}  {hit.uid:<{width}}  {hit.text}" for rank, hit in enumerate(hits, start=1)]
    return "\n".join([f"{'rank':>4}  {'cosine':>6}  {'uid':<{width}}  text", *rows])


def as_json(hits: Sequence[Hit]) -> str:
    """A JSON list of {uid, text, score}, best first."""
    return json.dumps([asdict(hit) for hit in hits], ensure_ascii=False)
