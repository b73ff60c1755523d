"""Manual pages as a "see also" data set with hyperlinks, in the layout that the source `xc` reads.

    apt-file update
    apt-file search -x '^/usr/share/man/man[1-8]/' | python benchmarks/manpages.py --choose > names     # 420 MB
    mkdir debs; cd debs; xargs apt-get download < ../names; cd ..
    python benchmarks/manpages.py debs data/ManPagesSeeAlsoTitles
    ramen run --preset manpages

What LF-WikiSeeAlsoTitles is to Wikipedia: a document is a page, known by its NAME section alone; its labels are the
pages that its SEE ALSO section lists. Anchor set `mentions`: the pages that the rest of the page refers to, as an
article links to others. Anchor set `package`: the package that brings the page, as a category. A fifth of the documents
are for test; as anchors, they are left to `build-graph` to remove.
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

PLACE = re.compile(r"\./usr/share/man/man([1-8])/([^/]+?)\.\1[^./]*(?:\.gz)?$")
"""A page in English; its section and its name."""
HEADING = re.compile(r'^\.\s*S[Hh]\s+"?([^"\n]*)"?', re.MULTILINE)
ALIAS = re.compile(r"^\.so\s+(?:\S*/)?(\S+)\.([1-8])\w*\s*$", re.MULTILINE)
CROSS = re.compile(r"^\.\s*Xr\s+(\S+)\s+([1-8])", re.MULTILINE)
CALL = re.compile(r"([A-Za-z_][\w.+:-]*)\s*\(([1-8])\w{0,3}\)")
FONT = re.compile(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\[&|^/,%:]|\\s[+-]?\d")
MACRO = re.compile(r'^\.\s*(?:[BIR]{1,2}|SM|SB|Nm|Nd|Op|Fn|Ns|Xo|Xc)\b\s*|"', re.MULTILINE)

PAGES, BYTES = 12, 30_000
EXCLUDED = ("freebsd-manpages", "libstdc++")
"""Another system's pages under the same names; generated pages without SEE ALSO."""

Key = tuple[str, str]
"""Name and section."""


@dataclass
class Page:
    """A manual page: the text of its NAME section, and the pages it refers to there and elsewhere."""

    title: str
    package: str
    also: list[Key] = field(default_factory=list)
    mentions: list[Key] = field(default_factory=list)


def choose(found: Iterable[str]) -> list[str]:
    """Packages worth their download: `PAGES` or more pages, less than `BYTES` of archive per page, not `EXCLUDED`.

    Args:
        found: lines `package: path` of apt-file.
    """
    pages = Counter(line.partition(":")[0] for line in found)
    known = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    size = dict(re.findall(r"^Package: (\S+)$.*?^Size: (\d+)$", known, re.MULTILINE | re.DOTALL))
    return sorted(
        name
        for name, count in pages.items()
        if count >= PAGES and int(size.get(name, BYTES * count)) < BYTES * count and not name.startswith(EXCLUDED)
    )


def plain(roff: str) -> str:
    """Text without fonts and macros, good enough to find names in it."""
    text = re.sub(r'^[.\']\\".*$', "", roff, flags=re.MULTILINE)
    text = FONT.sub("", text.replace("\\-", "-").replace("\\(em", "-").replace("\\(hy", "-").replace("\\e", "\\"))
    return MACRO.sub("", text)


def references(roff: str) -> list[Key]:
    """Pages a piece of roff refers to: `name(3)`, `.BR name (3)` and `.Xr name 3`."""
    return list(dict.fromkeys([*CROSS.findall(roff), *CALL.findall(plain(roff))]))


def parse(roff: str, package: str) -> Page | None:
    """A page, None if it has no NAME section that says what it is about."""
    headings = list(HEADING.finditer(roff))
    title, also, mentions = "", [], []
    for here, after in zip(headings, [*headings[1:], None], strict=False):
        body = roff[here.end() : after.start() if after else len(roff)]
        heading = here[1].strip().upper()
        if heading == "NAME" and not title:
            lines = (line.strip() for line in plain(body).splitlines())
            title = " ".join(line for line in lines if line and not line.startswith((".", "'")))
        elif heading == "SEE ALSO":
            also += references(body)
        else:
            mentions += references(body)
    name, _, about = title.partition(" - ")
    if not about:
        return None
    names = ", ".join(name.split(",")[:3])
    return Page(f"{' '.join(names.split())}: {' '.join(about.split())[:200]}", package, also, mentions)


def members(package: Path) -> Iterator[tuple[Key, str | Key]]:
    """Pages of a package: the text, or the page that an alias stands for."""
    found = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        for member in archive:
            place = PLACE.match(member.name)
            if place is None:
                continue
            key = (place[2], place[1])
            if member.issym() or member.islnk():
                to = PLACE.match(f"./usr/share/man/man{place[1]}/{Path(member.linkname).name}")
                if to:
                    yield key, (to[2], to[1])
            elif content := archive.extractfile(member):
                data = content.read()
                if len(data) < 1 << 20:
                    text = (gzip.decompress(data) if member.name.endswith(".gz") else data).decode("utf-8", "replace")
                    alias = ALIAS.search(text[:500])
                    yield key, (alias[1], alias[2]) if alias else text


def read(folder: Path) -> tuple[dict[Key, Page], dict[Key, Key]]:
    """Pages by name and section, and aliases; of two packages with the same page the first counts."""
    pages: dict[Key, Page] = {}
    aliases: dict[Key, Key] = {}
    for package in sorted(folder.glob("*.deb")):
        for key, found in members(package):
            if isinstance(found, tuple):
                aliases.setdefault(key, found)
            elif key not in pages and (page := parse(found, package.name.split("_")[0])):
                pages[key] = page
    return pages, aliases


def resolved(keys: list[Key], own: Key, pages: Mapping[Key, Page], aliases: Mapping[Key, Key]) -> list[Key]:
    """The pages meant, each once, without the page itself."""
    out: dict[Key, None] = {}
    for key in keys:
        for _ in range(5):
            if key in pages or key not in aliases:
                break
            key = aliases[key]
        if key in pages and key != own:
            out[key] = None
    return list(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="?", help="folder with .deb files")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument(
        "--choose", action="store_true", help="print packages to download, of apt-file's lines on stdin"
    )
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.choose:
        print(*choose(sys.stdin), sep="\n")
        return
    if asked.out is None:
        parser.error("give the folder with .deb files and the one to write")
    pages, aliases = read(asked.packages)
    also = {key: resolved(page.also, key, pages, aliases) for key, page in pages.items()}
    uid = {key: f"{key[0]}.{key[1]}" for key in pages}
    labels_of = {uid[key]: [uid[other] for other in others] for key, others in also.items() if others}
    mentions = {
        uid[key]: [uid[other] for other in resolved(page.mentions, key, pages, aliases)] for key, page in pages.items()
    }
    package = {uid[key]: [page.package] for key, page in pages.items()}
    texts = {uid[key]: page.title for key, page in pages.items()}
    write_folder(
        asked.out, split(labels_of, asked.documents, asked.seed), labels_of, texts,
        {"mentions": mentions, "package": package},
    )  # fmt: skip


if __name__ == "__main__":
    main()
