"""The code blocks of docs/library.md run in order without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "library.md"


@pytest.mark.slow
def test_code_blocks_run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Path.cwd() == tmp_path
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", page, re.S | re.M):
        line = page[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert names["ours"].keys() == names["tfidf"].keys()
    assert len(names["retriever"]) == len(names["dataset"].labels)
    printed = [line.partition("# ")[2] for line in page.splitlines() if line.strip().startswith("print(error)")]
    assert printed == [str(raise_error_of_page(names))]


def raise_error_of_page(names: dict[str, Any]) -> Exception:
    """Return the error whose message the page shows in a comment."""
    ramen = names["ramen"]
    with pytest.raises(ramen.RamenError) as error:
        ramen.load_dataset(["text mode mail client"], ["mail client"])
    return error.value
