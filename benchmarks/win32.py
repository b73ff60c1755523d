"""Microsoft's Windows API pages as a "see also" data set with hyperlinks, in the layout that the source `xc` reads.

    git clone --depth 1 https://github.com/MicrosoftDocs/win32
    python benchmarks/win32.py win32 data/Win32SeeAlsoTitles
    ramen run --preset xc --set data.path=data/Win32SeeAlsoTitles

The data set corresponds to LF-WikiSeeAlsoTitles. A document is a page, represented by its title only; its labels are
the pages under "See also" or "Related topics". Anchor set `links` has the pages that the rest of the page links to,
anchor set `book` the folder of the page (like a category). A fifth of the documents are for test; stage `build-graph`
removes them from the anchors.
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
    """A page: title, related pages, and pages that the rest of the page links to."""

    title: str
    also: list[str]
    links: list[str]


def find_links(text: str, name: str) -> list[str]:
    """Find the pages that Markdown links to with relative addresses, each once, without the page itself."""
    names: dict[str, None] = {}
    for address in LINK.findall(text):
        file = re.split("[#?]", address)[0]
        if file.endswith(".md") and "://" not in file and not file.startswith("/"):
            names[posixpath.normpath(posixpath.join(posixpath.dirname(name), file))] = None
    names.pop(name, None)
    return list(names)


def parse_page(text: str, name: str) -> Page | None:
    """Parse a page of Markdown; None if it has no title.

    Args:
        text: content of the file.
        name: path of the file in the repository, against which links are resolved.
    """
    head = FRONT_MATTER.match(text)
    body = text[head.end() :] if head else text
    headings = list(HEADING.finditer(body))
    first = next((match[1] for match in headings if match[0].startswith("# ")), "")
    stated = TITLE.search(head[1]) if head else None
    title = ESCAPE.sub(r"\1", first or (stated[1].strip(" \"'") if stated else "")).strip()
    if not title:
        return None
    also, rest = [], [body[: headings[0].start()] if headings else body]
    for match, following in zip(headings, [*headings[1:], None], strict=True):
        part = body[match.end() : following.start() if following else len(body)]
        (also if match[1].lower() in ALSO else rest).append(part)
    related = find_links("\n".join(also), name)
    return Page(title, related, [link for link in find_links("\n".join(rest), name) if link not in related])


def read_pages(checkout: Path) -> dict[str, Page]:
    """Read all pages; path in the repository -> page."""
    files = sorted(file for file in (checkout / ROOT).rglob("*.md") if file.name != "TOC.md")
    names = {file.relative_to(checkout).as_posix(): file for file in files}
    pages = {name: parse_page(file.read_text(encoding="utf-8", errors="replace"), name) for name, file in names.items()}
    return {name: page for name, page in pages.items() if page is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="clone of the repository")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pages = read_pages(args.checkout)
    labels_of = {
        name: kept for name, page in pages.items() if (kept := [other for other in page.also if other in pages])
    }
    links = {name: [other for other in page.links if other in pages] for name, page in pages.items()}
    book = {name: [name.split("/")[1]] for name in pages}
    write_folder(
        args.out, split(labels_of, args.documents, args.seed), labels_of,
        {name: page.title for name, page in pages.items()}, {"links": links, "book": book},
    )  # fmt: skip


if __name__ == "__main__":
    main()
