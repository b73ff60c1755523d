"""Manual pages as a "see also" data set with hyperlinks, in the layout that the source `xc` reads.

    apt-file update
    apt-file search -x '^/usr/share/man/man[1-8]/' | python benchmarks/manpages.py --choose > names     # 420 MB
    mkdir debs; cd debs; xargs apt-get download < ../names; cd ..
    python benchmarks/manpages.py debs data/ManPagesSeeAlsoTitles
    ramen run --preset manpages

The data set corresponds to LF-WikiSeeAlsoTitles. A document is a page, represented by its NAME section only; its labels
are the pages in its SEE ALSO section. Anchor set `mentions` has the pages that the rest of the page refers to (like
hyperlinks), anchor set `package` the package of the page (like a category). A fifth of the documents are for test;
stage `build-graph` removes them from the anchors.
"""

from __future__ import annotations

import argparse
import gzip
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xc_layout import split, write_folder

PAGE_PATH = re.compile(r"\./usr/share/man/man([1-8])/([^/]+?)\.\1[^./]*(?:\.gz)?$")
"""Path of a page in English; groups: section, name."""
HEADING = re.compile(r'^\.\s*S[Hh]\s+"?([^"\n]*)"?', re.MULTILINE)
ALIAS = re.compile(r"^\.so\s+(?:\S*/)?(\S+)\.([1-8])\w*\s*$", re.MULTILINE)
XR_MACRO = re.compile(r"^\.\s*Xr\s+(\S+)\s+([1-8])", re.MULTILINE)
NAME_AND_SECTION = re.compile(r"([A-Za-z_][\w.+:-]*)\s*\(([1-8])\w{0,3}\)")
FONT = re.compile(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\[&|^/,%:]|\\s[+-]?\d")
MACRO = re.compile(r'^\.\s*(?:[BIR]{1,2}|SM|SB|Nm|Nd|Op|Fn|Ns|Xo|Xc)\b\s*|"', re.MULTILINE)

MIN_PAGES, MAX_BYTES_PER_PAGE = 12, 30_000
EXCLUDED = ("freebsd-manpages", "libstdc++")
"""Excluded packages: pages of another system under the same names; generated pages without SEE ALSO."""

Key = tuple[str, str]
"""Name and section."""


@dataclass
class Page:
    """A manual page: title (text of NAME), package, and the pages that SEE ALSO and the other sections refer to."""

    title: str
    package: str
    also: list[Key] = field(default_factory=list)
    mentions: list[Key] = field(default_factory=list)


def choose_packages(lines: Iterable[str]) -> list[str]:
    """Choose packages with `MIN_PAGES` or more pages and less than `MAX_BYTES_PER_PAGE` per page, without `EXCLUDED`.

    Args:
        lines: lines `package: path` of apt-file.
    """
    pages = Counter(line.partition(":")[0] for line in lines)
    known = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    size = dict(re.findall(r"^Package: (\S+)$.*?^Size: (\d+)$", known, re.MULTILINE | re.DOTALL))
    return sorted(
        name
        for name, count in pages.items()
        if count >= MIN_PAGES
        and int(size.get(name, MAX_BYTES_PER_PAGE * count)) < MAX_BYTES_PER_PAGE * count
        and not name.startswith(EXCLUDED)
    )


def strip_markup(roff: str) -> str:
    """Remove fonts and macros, well enough to find names in the text."""
    text = re.sub(r'^[.\']\\".*$', "", roff, flags=re.MULTILINE)
    text = FONT.sub("", text.replace("\\-", "-").replace("\\(em", "-").replace("\\(hy", "-").replace("\\e", "\\"))
    return MACRO.sub("", text)


def find_references(roff: str) -> list[Key]:
    """Find the pages that roff source refers to: `name(3)`, `.BR name (3)` and `.Xr name 3`."""
    return list(dict.fromkeys([*XR_MACRO.findall(roff), *NAME_AND_SECTION.findall(strip_markup(roff))]))


def parse_page(roff: str, package: str) -> Page | None:
    """Parse a page; None if it has no NAME section with a description."""
    headings = list(HEADING.finditer(roff))
    title, also, mentions = "", [], []
    for match, following in zip(headings, [*headings[1:], None], strict=False):
        body = roff[match.end() : following.start() if following else len(roff)]
        heading = match[1].strip().upper()
        if heading == "NAME" and not title:
            lines = (line.strip() for line in strip_markup(body).splitlines())
            title = " ".join(line for line in lines if line and not line.startswith((".", "'")))
        elif heading == "SEE ALSO":
            also += find_references(body)
        else:
            mentions += find_references(body)
    name, _, about = title.partition(" - ")
    if not about:
        return None
    names = ", ".join(name.split(",")[:3])
    return Page(f"{' '.join(names.split())}: {' '.join(about.split())[:200]}", package, also, mentions)


def read_package(package: Path) -> Iterator[tuple[Key, str | Key]]:
    """Yield the pages of a package with their source, or, for an alias, the key of the page it stands for."""
    content = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            path = PAGE_PATH.match(member.name)
            if path is None:
                continue
            key = (path[2], path[1])
            if member.issym() or member.islnk():
                target = PAGE_PATH.match(f"./usr/share/man/man{path[1]}/{Path(member.linkname).name}")
                if target:
                    yield key, (target[2], target[1])
            elif file := archive.extractfile(member):
                data = file.read()
                if len(data) < 1 << 20:
                    text = (gzip.decompress(data) if member.name.endswith(".gz") else data).decode("utf-8", "replace")
                    alias = ALIAS.search(text[:500])
                    yield key, (alias[1], alias[2]) if alias else text


def read_pages(folder: Path) -> tuple[dict[Key, Page], dict[Key, Key]]:
    """Read pages and aliases by name and section; if two packages have the same page, the first one is used."""
    pages: dict[Key, Page] = {}
    aliases: dict[Key, Key] = {}
    for package in sorted(folder.glob("*.deb")):
        for key, found in read_package(package):
            if isinstance(found, tuple):
                aliases.setdefault(key, found)
            elif key not in pages and (page := parse_page(found, package.name.split("_")[0])):
                pages[key] = page
    return pages, aliases


def resolve(keys: list[Key], page_key: Key, pages: Mapping[Key, Page], aliases: Mapping[Key, Key]) -> list[Key]:
    """Replace aliases by pages; return each page once, without the page itself and unknown pages."""
    out: dict[Key, None] = {}
    for key in keys:
        for _ in range(5):
            if key in pages or key not in aliases:
                break
            key = aliases[key]
        if key in pages and key != page_key:
            out[key] = None
    return list(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="?", help="folder with .deb files")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument(
        "--choose", action="store_true", help="print the packages to download; reads lines of apt-file from stdin"
    )
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.choose:
        print(*choose_packages(sys.stdin), sep="\n")
        return
    if args.out is None:
        parser.error("arguments missing: give the folder with .deb files and the output folder")
    pages, aliases = read_pages(args.packages)
    also = {key: resolve(page.also, key, pages, aliases) for key, page in pages.items()}
    uid = {key: f"{key[0]}.{key[1]}" for key in pages}
    labels_of = {uid[key]: [uid[other] for other in others] for key, others in also.items() if others}
    mentions = {
        uid[key]: [uid[other] for other in resolve(page.mentions, key, pages, aliases)] for key, page in pages.items()
    }
    package = {uid[key]: [page.package] for key, page in pages.items()}
    texts = {uid[key]: page.title for key, page in pages.items()}
    write_folder(
        args.out, split(labels_of, args.documents, args.seed), labels_of, texts,
        {"mentions": mentions, "package": package},
    )  # fmt: skip


if __name__ == "__main__":
    main()
