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
from typing import Any

from ramen.data.sources.lines import Defects, numbered_lines
from ramen.errors import DataError, Defect, lone_surrogate, not_a_file, shown
from ramen.files import replacing

FEW = 5_000
"""With fewer packages than this the machine's lists are taken as empty (installed packages are always listed)."""

_PACKAGES_FILE = re.compile(r"(.*[_-])?Packages(\.gz|\.xz)?")
_FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")
_TAG = re.compile(r"([^,{}]+)(?:\{([^{}]*)\})?")
_VERSION_PART = re.compile(r"([^0-9]*)([0-9]*)")


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
    if not _is_snapshot(path):
        raise DataError(Defect(str(path), "is no snapshot of packages, and would be replaced", "set another data.path"))
    if packages is not None:
        if obstacle := not_a_file(packages):
            raise DataError(Defect(str(packages), f"expected a Packages file, found {obstacle}", "give another file"))
        found = read_packages(packages)
    else:
        found = _from_machine()
    with replacing(path) as beside, beside.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as stream:
        for package in found:
            line = json.dumps(asdict(package), ensure_ascii=False, separators=(",", ":"))
            stream.write(line.encode() + b"\n")
    return len(found)


def _is_snapshot(path: Path) -> bool:
    """Whether a file may be replaced by a snapshot: it is one, be it damaged further on, or is empty or missing."""
    if not os.path.lexists(path):
        return True
    if not_a_file(path):
        return False
    number, line = next(numbered_lines(path, Defects()), (0, b""))
    try:
        return path.stat().st_size == 0 or (number > 0 and bool(_package_of(json.loads(line))))
    except (ValueError, RecursionError):
        return False


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
    return (_number(epoch) if epoch.isdecimal() else (0, ""), _order(upstream), _order(revision))


def _number(digits: str) -> tuple[int, str]:
    """Sorts like the number; unlike `int`, of any length."""
    digits = digits.lstrip("0")
    return len(digits), digits


def _order(part: str) -> tuple[tuple[tuple[int, ...], tuple[int, str]], ...]:
    return tuple(
        ((*(_weight(letter) for letter in letters), 0), _number(digits))
        for letters, digits in _VERSION_PART.findall(part)
    )


def _weight(letter: str) -> int:
    return -1 if letter == "~" else ord(letter) if letter.isalpha() else ord(letter) + 256


def _stanzas(lines: Iterable[tuple[int, str]], file: Path, defects: Defects) -> Iterator[tuple[int, dict[str, str]]]:
    """(first line, field -> value) of each paragraph; continuation lines are joined by line feeds."""
    first, stanza, last = 0, dict[str, list[str]](), ""
    for number, line in lines:
        if not line.strip():
            if stanza:
                yield first, _joined(stanza)
            stanza, last = {}, ""
        elif line[0] in " \t":
            if last:
                stanza[last].append(line.strip())
            else:
                defects.add(file, "a continuation line without a field before it", line=number)
        elif match := _FIELD.fullmatch(line):
            first = first if stanza else number
            last, stanza[match[1]] = match[1], [match[2].strip()]
        else:
            defects.add(file, f"expected `Field: value`, found {line[:40]!r}", line=number)
    if stanza:
        yield first, _joined(stanza)


def _joined(stanza: dict[str, list[str]]) -> dict[str, str]:
    return {field: "\n".join(parts) for field, parts in stanza.items()}


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
    mend = "remove the file and run `ramen fetch`"
    seen: set[str] = set()
    for number, line in numbered_lines(path, defects):
        try:
            package = _package_of(json.loads(line))
            if package.name in seen:
                raise ValueError(f"name: {shown(package.name)} comes twice")
            seen.add(package.name)
            yield package
        except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
            cause = "nested too deeply" if isinstance(error, RecursionError) else error
            if number == 1:
                defects.add_unreadable(path, f"not a package in JSON ({cause})", mend, line=number)
            defects.add(path, f"not a package in JSON ({cause})", mend, line=number)


def _package_of(item: Any) -> Package:
    """The package that a line of a snapshot stands for. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"expected an object, found {shown(item)}")
    for field in fields(Package):
        value = item.get(field.name)
        texts = value if isinstance(value, list) else [value]
        if isinstance(value, list) == (field.type == "str") or not all(isinstance(text, str) for text in texts):
            kind = "a text" if field.type == "str" else "a list of texts"
            raise ValueError(f"{field.name}: expected {kind}, found {shown(value)}")
        if lone := "".join(map(lone_surrogate, texts)):
            raise ValueError(f"{field.name}: {lone} is half of a character")
    if not item["name"]:
        raise ValueError("name: expected a text, found none")
    return Package(**{field.name: item[field.name] for field in fields(Package)})


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
