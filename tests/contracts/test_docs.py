"""README and docs refer only to existing pages, headings, commands, options, knobs, presets, studies and revisions."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ramen.ablation.study import list_studies
from ramen.cli import cli
from ramen.config import SECTIONS, knobs, presets

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("infra/*.md")])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_point_to_existing_pages_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if heading:
            assert heading in {_anchor(line) for line in linked.read_text(encoding="utf-8").splitlines()}, target


def _anchor(line: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") if line.startswith("#") else ""


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the `ramen` commands in code blocks as words; skips rows of tables such as "ramen 58.27"."""
    for block in re.findall(r"^ *```(?:\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            for words in re.split(r";|&&|\|", line.split("#")[0]):
                if re.match(r"\s*ramen [a-z]", words):
                    yield shlex.split(words)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=_name)
def test_commands_use_existing_options_presets_studies_and_knobs(page: Path) -> None:
    for name, *words in _commands(page):
        command = cli.commands[name]
        context = click.Context(command, info_name=name, parent=click.Context(cli, **cli.context_settings))
        given, _, _ = command.make_parser(context).parse_args(list(words))
        if given.get("preset"):
            assert given["preset"] in presets(), words
        if str(given.get("study") or "").removesuffix(".yaml") == given.get("study"):
            assert given["study"] in list_studies(), words
        for assignment in given.get("sets") or ():
            section, _, path = assignment.partition("=")[0].partition(".")
            assert any(f"{path}.".startswith(f"{knob}.") for knob, _ in knobs(SECTIONS[section])), words


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_revisions_exist_in_the_git_history(page: Path) -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("shallow clone without the history")
    for revision in set(
        re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", page.read_text(encoding="utf-8"))
    ):
        assert git("cat-file", "-e", f"{revision}^{{commit}}").returncode == 0, revision
