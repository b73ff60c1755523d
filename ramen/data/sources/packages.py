"""Debian package metadata: Packages files, the machine's package lists, and snapshots of them.

A snapshot is a gzip file of JSON lines, one binary package per line, sorted by name; equal packages give equal bytes.
Fields: `name`, `source`, `description` (the synopsis) and the lists `depends` (with Pre-Depends), `recommends`,
`suggests` (names of all alternatives, without versions) and `tags` (debtags).
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
from ramen.errors import DataError, Defect, describe_non_file, find_lone_surrogate, short_repr
from ramen.files import atomic_write

MIN_PACKAGES = 5_000
"""With fewer packages the machine's package lists count as missing (installed packages are always listed)."""

_PACKAGES_FILE = re.compile(r"(.*[_-])?Packages(\.gz|\.xz)?")
_FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")
_TAG = re.compile(r"([^,{}]+)(?:\{([^{}]*)\})?")
_VERSION_PART = re.compile(r"([^0-9]*)([0-9]*)")


@dataclass(frozen=True)
class Package:
    """A binary package; the lists are sorted and have no duplicates."""

    name: str
    source: str
    description: str
    depends: list[str]
    recommends: list[str]
    suggests: list[str]
    tags: list[str]

    @property
    def text(self) -> str:
        """`name: synopsis`, or the name if there is no synopsis."""
        return f"{self.name}: {self.description}" if self.description else self.name


def fetch(path: Path, packages: Path | None = None) -> int:
    """Write a snapshot and return its number of packages.

    Args:
        path: the snapshot to write; replaced atomically, unchanged on failure.
        packages: a Packages file (plain, .gz, .xz); None = `apt-cache dumpavail`. If the machine has no package lists,
            `apt-get update` first downloads them to a temporary directory, without root and without other changes.

    Raises:
        DataError: the Packages file is broken, or the machine cannot provide its package lists.
    """
    if not _is_replaceable(path):
        raise DataError(Defect(str(path), "refusing to overwrite: not a package snapshot", "set another data.path"))
    if packages is not None:
        if kind := describe_non_file(packages):
            raise DataError(Defect(str(packages), f"expected a Packages file, found {kind}", "give another file"))
        records = read_packages(packages)
    else:
        records = _read_from_apt()
    with atomic_write(path) as draft, draft.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as stream:
        for package in records:
            line = json.dumps(asdict(package), ensure_ascii=False, separators=(",", ":"))
            stream.write(line.encode() + b"\n")
    return len(records)


def _is_replaceable(path: Path) -> bool:
    """Return whether a path is missing, an empty file, or a file that begins like a snapshot."""
    if not os.path.lexists(path):
        return True
    if describe_non_file(path):
        return False
    number, line = next(numbered_lines(path, Defects()), (0, b""))
    try:
        return path.stat().st_size == 0 or (number > 0 and bool(_parse_record(json.loads(line))))
    except (ValueError, RecursionError):
        return False


def read_packages(path: Path) -> list[Package]:
    """Read a snapshot or a Packages file, sorted by name.

    Raises:
        DataError: one `Defect` per broken line.
    """
    defects = Defects()
    if _PACKAGES_FILE.fullmatch(path.name):
        lines = ((number, line.decode("utf-8", "replace")) for number, line in numbered_lines(path, defects))
        packages = parse_packages(lines, path, defects)
    else:
        packages = list(_read_snapshot(path, defects))
    defects.raise_if_any()
    if not packages:
        raise DataError(Defect(str(path), "expected packages, found none"))
    return packages


def parse_packages(lines: Iterable[tuple[int, str]], file: Path, defects: Defects) -> list[Package]:
    """Parse a Packages file; keeps the newest version of each package, the first of equal versions.

    Args:
        lines: (one-based number, line).
        file: its name, for messages.
        defects: receives the broken lines.
    """
    newest: dict[str, tuple[str, Package]] = {}
    for start, stanza in _parse_stanzas(lines, file, defects):
        if not stanza.get("Package"):
            defects.add(file, "expected a field `Package` in this paragraph", line=start)
            continue
        package, version = _parse_package(stanza), stanza.get("Version", "")
        if package.name not in newest or version_key(newest[package.name][0]) < version_key(version):
            newest[package.name] = version, package
    return [newest[name][1] for name in sorted(newest)]


def version_key(version: str) -> tuple[object, ...]:
    """Return a sort key in dpkg's order: epoch, upstream version, revision; `~` sorts before the end of a part."""
    epoch, _, rest = version.rpartition(":")
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "")
    return (_number_key(epoch) if epoch.isdecimal() else (0, ""), _part_key(upstream), _part_key(revision))


def _number_key(digits: str) -> tuple[int, str]:
    """Return a sort key of a number with any number of digits, which `int` would refuse."""
    digits = digits.lstrip("0")
    return len(digits), digits


def _part_key(part: str) -> tuple[tuple[tuple[int, ...], tuple[int, str]], ...]:
    return tuple(
        ((*(_character_key(letter) for letter in letters), 0), _number_key(digits))
        for letters, digits in _VERSION_PART.findall(part)
    )


def _character_key(letter: str) -> int:
    """Return the sort key of a non-digit: `~` first, then letters, then the rest; the end of a part is 0."""
    return -1 if letter == "~" else ord(letter) if letter.isalpha() else ord(letter) + 256


def _parse_stanzas(
    lines: Iterable[tuple[int, str]], file: Path, defects: Defects
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (first line, field -> value) of each paragraph; continuation lines are joined by line feeds."""
    start, stanza, field = 0, dict[str, list[str]](), ""
    for number, line in lines:
        if not line.strip():
            if stanza:
                yield start, _join_values(stanza)
            stanza, field = {}, ""
        elif line[0] in " \t":
            if field:
                stanza[field].append(line.strip())
            else:
                defects.add(file, "a continuation line without a field before it", line=number)
        elif match := _FIELD.fullmatch(line):
            start = start if stanza else number
            field, stanza[match[1]] = match[1], [match[2].strip()]
        else:
            defects.add(file, f"expected `Field: value`, found {line[:40]!r}", line=number)
    if stanza:
        yield start, _join_values(stanza)


def _join_values(stanza: dict[str, list[str]]) -> dict[str, str]:
    return {field: "\n".join(parts) for field, parts in stanza.items()}


def _parse_package(stanza: dict[str, str]) -> Package:
    name = stanza["Package"]
    description = stanza.get("Description") or stanza.get("Description-en") or ""
    return Package(
        name,
        (stanza.get("Source") or name).split()[0],
        description.partition("\n")[0],
        parse_relations(stanza.get("Depends", ""), stanza.get("Pre-Depends", "")),
        parse_relations(stanza.get("Recommends", "")),
        parse_relations(stanza.get("Suggests", "")),
        parse_tags(stanza.get("Tag", "")),
    )


def parse_relations(*values: str) -> list[str]:
    """Return the package names of relation fields: all alternatives, without version, architecture and profile."""
    parts = (part for value in values for part in re.split(r"[,|]", value))
    return sorted({re.split(r"[\s(:\[<]", part.strip(), maxsplit=1)[0] for part in parts} - {""})


def parse_tags(value: str) -> list[str]:
    """Return the debtags of a `Tag` field; `a::{b,c}` stands for `a::b` and `a::c`."""
    names = set()
    for head, options in _TAG.findall(value.replace("\n", " ")):
        names |= {head.strip() + option.strip() for option in (options or "").split(",")}
    return sorted(names - {""})


def _read_snapshot(path: Path, defects: Defects) -> Iterator[Package]:
    fix = "remove the file and run `ramen fetch`"
    seen: set[str] = set()
    for number, line in numbered_lines(path, defects):
        try:
            package = _parse_record(json.loads(line))
            if package.name in seen:
                raise ValueError(f"name: duplicate {short_repr(package.name)}")
            seen.add(package.name)
            yield package
        except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
            cause = "nested too deeply" if isinstance(error, RecursionError) else error
            message = f"not a package record in JSON ({cause})"
            if number == 1:
                defects.add_unreadable(path, message, fix, line=number)
            defects.add(path, message, fix, line=number)


def _parse_record(item: Any) -> Package:
    """Return the package of a decoded line of a snapshot. Raises ValueError."""
    if not isinstance(item, dict):
        raise ValueError(f"expected an object, found {short_repr(item)}")
    for field in fields(Package):
        value = item.get(field.name)
        strings = value if isinstance(value, list) else [value]
        if isinstance(value, list) == (field.type == "str") or not all(isinstance(text, str) for text in strings):
            kind = "a string" if field.type == "str" else "a list of strings"
            raise ValueError(f"{field.name}: expected {kind}, found {short_repr(value)}")
        if surrogates := "".join(map(find_lone_surrogate, strings)):
            raise ValueError(f"{field.name}: unpaired surrogate {surrogates}")
    if not item["name"]:
        raise ValueError("name: expected a name, found an empty string")
    return Package(**{field.name: item[field.name] for field in fields(Package)})


# --- the machine's package lists -----------------------------------------------------------------------------


def _read_from_apt() -> list[Package]:
    if shutil.which("apt-cache") is None:
        fix = "on a machine without apt run `ramen fetch --packages FILE` with a Packages file"
        raise DataError(Defect("apt-cache", "command not found", fix))
    packages = _dump_available([])
    if len(packages) >= MIN_PACKAGES:
        return packages
    with tempfile.TemporaryDirectory(prefix="ramen-apt-") as folder:
        os.chmod(folder, 0o755)  # run as root, apt downloads as another user
        options = ["-o", f"Dir::State={folder}", "-o", f"Dir::Cache={folder}/cache"]
        for part in ("lists/partial", "cache/archives/partial"):
            (Path(folder) / part).mkdir(parents=True)
        update = subprocess.run(["apt-get", *options, "update"], capture_output=True, text=True, check=False)
        packages = _dump_available(options)
    if len(packages) < MIN_PACKAGES:
        reason = (update.stderr.strip().splitlines() or [f"only {len(packages)} packages are listed"])[-1]
        fix = "connect to a mirror, or fetch from a Packages file: `ramen fetch --packages FILE`"
        raise DataError(Defect("apt-get update", f"cannot get the package lists: {reason}", fix))
    return packages


def _dump_available(options: list[str]) -> list[Package]:
    run = subprocess.run(["apt-cache", *options, "dumpavail"], capture_output=True, check=False)
    lines = enumerate(run.stdout.decode("utf-8", "replace").split("\n"), 1)
    defects = Defects()
    packages = parse_packages(lines, Path("apt-cache dumpavail"), defects)
    defects.raise_if_any()
    return packages
