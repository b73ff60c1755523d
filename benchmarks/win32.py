"""Microsoft's Windows API pages as a "see also" data set with hyperlinks, in the layout that the source `xc` reads.

    git clone --depth 1 https://github.com/MicrosoftDocs/win32
    python benchmarks/win32.py win32 data/Win32SeeAlsoTitles
    ramen run --preset xc --set data.path=data/Win32SeeAlsoTitles

What LF-WikiSeeAlsoTitles is to Wikipedia: a document is a page, known by its title alone; its labels are the pages that
it lists under "See also" or "Related topics". Anchor set `links`: the pages that the rest of the page links to. Anchor
set `book`: the folder of the page, as a category. A fifth of the documents are for test; as anchors, they are left to
`build-graph` to remove.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from xc_layout import split, write_folder

ROOT = "desktop-src"
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
HEADING = re.compile(r"^#+[^\S\n]+(.*?)\s*$", re.MULTILINE)
TITLE = re.compile(r"^title:[ \t]*(.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ESCAPE = re.compile(r"\\(.)")
ALSO = ("see also", "related topics")


@dataclass
class Page:
    """A page: its title, the pages listed as related, and those that the rest links to."""

    title: str
    also: list[str]
    links: list[str]


def targets(text: str, name: str) -> list[str]:
    """Pages that Markdown links to by a relative address, each once, without the page itself."""
    found: dict[str, None] = {}
    for address in LINK.findall(text):
        file = re.split("[#?]", address)[0]
        if file.endswith(".md") and "://" not in file and not file.startswith("/"):
            found[posixpath.normpath(posixpath.join(posixpath.dirname(name), file))] = None
    found.pop(name, None)
    return list(found)


def parse(text: str, name: str) -> Page | None:
    """A page of Markdown; None if it has no title.

    Args:
        text: the file.
        name: its path in the repository, against which links are resolved.
    """
    head = FRONT_MATTER.match(text)
    body = text[head.end() :] if head else text
    headings = list(HEADING.finditer(body))
    first = next((found[1] for found in headings if found[0].startswith("# ")), "")
    stated = TITLE.search(head[1]) if head else None
    title = ESCAPE.sub(r"\1", first or (stated[1].strip(" \"'") if stated else "")).strip()
    if not title:
        return None
    also, rest = [], [body[: headings[0].start()] if headings else body]
    for here, after in zip(headings, [*headings[1:], None], strict=True):
        part = body[here.end() : after.start() if after else len(body)]
        (also if here[1].lower() in ALSO else rest).append(part)
    related = targets("\n".join(also), name)
    return Page(title, related, [link for link in targets("\n".join(rest), name) if link not in related])


def read(checkout: Path) -> dict[str, Page]:
    """Pages by their path in the repository."""
    files = sorted(file for file in (checkout / ROOT).rglob("*.md") if file.name != "TOC.md")
    names = {file.relative_to(checkout).as_posix(): file for file in files}
    pages = {name: parse(file.read_text(encoding="utf-8", errors="replace"), name) for name, file in names.items()}
    return {name: page for name, page in pages.items() if page is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="clone of the repository")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    pages = read(given.checkout)
    labels_of = {name: kept for name, page in pages.items() if (kept := [each for each in page.also if each in pages])}
    links = {name: [each for each in page.links if each in pages] for name, page in pages.items()}
    book = {name: [name.split("/")[1]] for name in pages}
    write_folder(
        given.out, split(labels_of, given.documents, given.seed), labels_of,
        {name: page.title for name, page in pages.items()}, {"links": links, "book": book},
    )  # fmt: skip


if __name__ == "__main__":
    main()
