"""Debian package metadata: Packages text, the machine's lists, and the snapshot file made of them.

A snapshot is gzipped JSON lines, one binary package a line, sorted by name, and the same bytes for the same packages:
`name, source, description` (the synopsis) and the lists `depends` (with Pre-Depends), `recommends`, `suggests` (names
of all alternatives, without versions) and `tags` (debtags).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ramen.artifacts import replacing
from ramen.data.sources.lines import Defects, numbered_lines
from ramen.errors import DataError
from ramen.errors import Problem as Defect

FEW = 5_000
"""With fewer packages than this the machine's lists are taken as empty (installed packages are always listed)."""

_PACKAGES_FILE = re.compile(r"(.*[_-])?Packages(\.gz|\.xz)?")
_FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")
_TAG = re.compile(r"([^,{}]+)(?:\{([^}]*)\})?")
_VERSION_PART = re.compile(r"(\D*)(\d*)")


@dataclass(frozen=True)
class Package:
    """One binary package; lists hold each name once, sorted."""

    name: str
    source: str
    description: str
    depends: list[str]
    recommends: list[str]
    suggests: list[str]
    tags: list[str]

    @property
    def text(self) -> str:
        """`name: synopsis`, or the name alone."""
        return f"{self.name}: {self.description}" if self.description else self.name


def fetch(path: Path, packages: Path | None = None) -> int:
    """Write a snapshot and return how many packages it holds.

    Args:
        path: the snapshot to write (replaced at once, or left alone on failure).
        packages: a Packages file (plain, .gz, .xz); None asks `apt-cache dumpavail`, and where the machine's lists
            are empty, lets `apt-get update` fill a private state directory first (no root, machine untouched).

    Raises:
        DataError: the Packages file is broken, or the machine cannot list its archive.
    """
    if packages is not None:
        if not packages.is_file():
            raise DataError(Defect(str(packages), "no such Packages file"))
        found = read_packages(packages)
    else:
        found = _from_machine()
    with replacing(path) as beside, beside.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as stream:
        for package in found:
            line = json.dumps(asdict(package), ensure_ascii=False, separators=(",", ":"))
            stream.write(line.encode() + b"\n")
    return len(found)


def read_packages(path: Path) -> list[Package]:
    """Read a snapshot or a Packages file, sorted by name.

    Raises:
        DataError: one problem per broken line.
    """
    defects = Defects()
    if _PACKAGES_FILE.fullmatch(path.name):
        found = parse_packages(_text_lines(path, defects), path, defects)
    else:
        found = list(_snapshot(path, defects))
    defects.raise_if_any()
    if not found:
        raise DataError(Defect(str(path), "expected packages, found none"))
    return found


def parse_packages(lines: Iterable[tuple[int, str]], file: Path, defects: Defects) -> list[Package]:
    """Parse the text of a Packages file; of several versions of a package the newest stays (the first, if equal).

    Args:
        lines: (one-based number, line).
        file: named in defects.
        defects: receives broken lines.
    """
    newest: dict[str, tuple[str, Package]] = {}
    for first, stanza in _stanzas(lines, file, defects):
        if not stanza.get("Package"):
            defects.add(file, "expected a field `Package` in this paragraph", line=first)
            continue
        package, version = _package(stanza), stanza.get("Version", "")
        if package.name not in newest or version_key(newest[package.name][0]) < version_key(version):
            newest[package.name] = version, package
    return [newest[name][1] for name in sorted(newest)]


def version_key(version: str) -> tuple[object, ...]:
    """Sorts like Debian versions: epoch, upstream version, revision; `~` before the end, letters before the rest."""
    epoch, _, rest = version.rpartition(":")
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "")
    return (int(epoch) if epoch.isdigit() else 0, _order(upstream), _order(revision))


def _order(part: str) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple(
        ((*(_weight(letter) for letter in letters), 0), int(digits or 0))
        for letters, digits in _VERSION_PART.findall(part)
    )


def _weight(letter: str) -> int:
    return -1 if letter == "~" else ord(letter) if letter.isalpha() else ord(letter) + 256


def _stanzas(lines: Iterable[tuple[int, str]], file: Path, defects: Defects) -> Iterator[tuple[int, dict[str, str]]]:
    """(first line, field -> value) of each paragraph; continuation lines are joined by line feeds."""
    first, stanza, last = 0, dict[str, str](), ""
    for number, line in lines:
        if not line.strip():
            if stanza:
                yield first, stanza
            stanza, last = {}, ""
        elif line[0] in " \t":
            if last:
                stanza[last] += "\n" + line.strip()
            else:
                defects.add(file, "a continuation line without a field before it", line=number)
        elif match := _FIELD.fullmatch(line):
            first = first if stanza else number
            last, stanza[match[1]] = match[1], match[2].strip()
        else:
            defects.add(file, f"expected `Field: value`, found {line[:40]!r}", line=number)
    if stanza:
        yield first, stanza


def _package(stanza: dict[str, str]) -> Package:
    name = stanza["Package"]
    description = stanza.get("Description") or stanza.get("Description-en") or ""
    return Package(
        name,
        (stanza.get("Source") or name).split()[0],
        description.partition("\n")[0],
        relations(stanza.get("Depends", ""), stanza.get("Pre-Depends", "")),
        relations(stanza.get("Recommends", "")),
        relations(stanza.get("Suggests", "")),
        tags(stanza.get("Tag", "")),
    )


def relations(*values: str) -> list[str]:
    """Package names in relation fields: every alternative, without version, `:any`, architectures and profiles."""
    parts = (part for value in values for part in re.split(r"[,|]", value))
    return sorted({re.split(r"[\s(:\[<]", part.strip(), maxsplit=1)[0] for part in parts} - {""})


def tags(value: str) -> list[str]:
    """Debtags of a `Tag` field; `a::{b,c}` stands for `a::b` and `a::c`."""
    found = set()
    for head, options in _TAG.findall(value.replace("\n", " ")):
        found |= {head.strip() + option.strip() for option in (options or "").split(",")}
    return sorted(found - {""})


def _text_lines(path: Path, defects: Defects) -> Iterator[tuple[int, str]]:
    for number, line in numbered_lines(path, defects):
        yield number, line.decode("utf-8", "replace")


def _snapshot(path: Path, defects: Defects) -> Iterator[Package]:
    names = [field.name for field in fields(Package)]
    for number, line in numbered_lines(path, defects):
        try:
            item = json.loads(line)
            yield Package(**{name: item[name] for name in names})
        except (ValueError, KeyError, TypeError) as error:
            mend = "remove the file and run `ramen fetch`"
            defects.add(path, f"not a package in JSON ({type(error).__name__}: {error})", mend, line=number)


# --- the machine's package lists -----------------------------------------------------------------------------


def _from_machine() -> list[Package]:
    if shutil.which("apt-cache") is None:
        mend = "fetch from a Packages file: `ramen fetch --packages FILE`"
        raise DataError(Defect("apt-cache", "not on this machine (not Debian or Ubuntu?)", mend))
    found = _dump([])
    if len(found) >= FEW:
        return found
    with tempfile.TemporaryDirectory(prefix="ramen-apt-") as folder:
        os.chmod(folder, 0o755)  # apt downloads as its own user when it is run as root
        private = ["-o", f"Dir::State={folder}", "-o", f"Dir::Cache={folder}/cache"]
        for part in ("lists/partial", "cache/archives/partial"):
            (Path(folder) / part).mkdir(parents=True)
        update = subprocess.run(["apt-get", *private, "update"], capture_output=True, text=True, check=False)
        found = _dump(private)
    if len(found) < FEW:
        reason = (update.stderr.strip().splitlines() or [f"it knows {len(found)} packages"])[-1]
        mend = "connect to a mirror, or fetch from a Packages file: `ramen fetch --packages FILE`"
        raise DataError(Defect("apt-get update", f"expected the lists of an archive: {reason}", mend))
    return found


def _dump(options: list[str]) -> list[Package]:
    run = subprocess.run(["apt-cache", *options, "dumpavail"], capture_output=True, check=False)
    lines = enumerate(run.stdout.decode("utf-8", "replace").split("\n"), 1)
    defects = Defects()
    found = parse_packages(lines, Path("apt-cache dumpavail"), defects)
    defects.raise_if_any()
    return found
