"""Studies of `ramen ablate`: one YAML file each.

A study has a `title` and `rows`. A row has a `name`, assignments `set` that are added to the user's configuration, and
optionally `against`, the row it is compared with. A row with `peer` evaluates one of `ramen.peers` instead of training;
`time_of` names the row whose training time is the peer's time limit. `rows_per_anchor_set` are templates of rows for
each anchor set of the dataset, with `{set}` for its name. `published` names tables of ablation/published.csv that
report the same comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramen.console import warn
from ramen.errors import ConfigError, describe_non_file, short_repr, suggest_name
from ramen.yamlfile import read_yaml

if TYPE_CHECKING:
    from ramen.config import Config

FOLDER = Path(__file__).with_name("studies")
FIELDS = {"title", "rows", "rows_per_anchor_set", "published"}
ROW_FIELDS = {"name", "set", "against", "peer", "time_of"}


@dataclass(frozen=True)
class Row:
    """One row of a study.

    Attributes:
        sets: assignments `section.key=value`.
        against: name of the row it is compared with; "" = none.
        peer: name in `ramen.peers.PEERS`; "" = a training run.
        time_of: name of the row above whose training time is the peer's time limit; "" = no limit.
    """

    name: str
    sets: tuple[str, ...]
    against: str = ""
    peer: str = ""
    time_of: str = ""


@dataclass(frozen=True)
class Study:
    """Rows to be run under the same seeds.

    Attributes:
        per_set: the study has rows for each anchor set of the dataset.
        published: names of the papers' tables with the same comparison, see `ramen.ablation.published`.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    per_set: bool = False
    published: tuple[str, ...] = ()

    def select(self, names: str | None) -> Study:
        """Keep only some rows and the rows they need, for a comparison or for their training time.

        Args:
            names: comma-separated; None = all rows.

        Raises:
            ConfigError: there is no row of a name.
        """
        if names is None:
            return self
        wanted = {name.strip() for name in names.split(",")}
        if unknown := wanted - {row.name for row in self.rows}:
            known = ", ".join(row.name for row in self.rows)
            raise ConfigError(f"--rows: study {self.name} has no row {sorted(unknown)[0]!r}; there are {known}")
        needs = {row.name: {row.against, row.time_of} - {""} for row in self.rows}
        while more := {need for name in wanted for need in needs[name]} - wanted:
            wanted |= more
        return replace(self, rows=tuple(row for row in self.rows if row.name in wanted))

    def without_repeats(self, config_of: Callable[[Row], Config]) -> tuple[Study, dict[str, str]]:
        """Leave out rows with the same configuration as the row they are compared with, whose gain would be 0.

        This happens if the preset already sets what a row sets (`paper` has no label context, for example). Rows that
        refer to a row that is left out refer to the row it repeats instead.

        Args:
            config_of: returns the configuration of a row.

        Returns:
            The study, and each row left out -> the row it repeats.
        """
        configs = {row.name: (row.peer, config_of(row)) for row in self.rows}
        repeats: dict[str, str] = {}
        for row in self.rows:
            if configs[row.name] == configs.get(row.against):
                repeats[row.name] = repeats.get(row.against, row.against)
        kept = [
            replace(
                row,
                against=repeats.get(row.against, row.against),
                time_of=repeats.get(row.time_of, row.time_of),
            )
            for row in self.rows
            if row.name not in repeats
        ]
        return replace(self, rows=tuple(kept)), repeats

    def without_unavailable_peers(self) -> Study:
        """Leave out, with a warning, peers that cannot run on this machine and rows that need their training time.

        Raises:
            ConfigError: no row is left.
        """
        from ramen.peers import PEERS

        rows: list[Row] = []
        for row in self.rows:
            obstacle = PEERS[row.peer].obstacle() if row.peer in PEERS else ""
            if not obstacle and row.time_of and row.time_of not in {kept.name for kept in rows}:
                obstacle = f"row {row.time_of!r}, which determines its time limit, is skipped"
            if obstacle:
                warn(f"{self.name}: row {row.name!r} is skipped: {obstacle}")
            else:
                rows.append(row)
        if not rows:
            raise ConfigError(f"study {self.name}: no row can run on this machine; see the warnings above")
        return replace(self, rows=tuple(rows))


def list_studies() -> list[str]:
    """Return the names of the studies in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_study(name: str, anchor_sets: Sequence[str] = ()) -> Study:
    """Read a study of the package or a YAML file.

    Args:
        name: name of a study, or path of a file.
        anchor_sets: names of the dataset's anchor sets, for `rows_per_anchor_set`; empty = not known yet, so that those
            rows are left out.

    Raises:
        ConfigError: there is no such study, or the file is invalid.
    """
    path = FOLDER / f"{name}.yaml" if name in list_studies() else Path(name)
    if file_type := describe_non_file(path):
        if os.path.lexists(path):
            raise ConfigError(f"study {name!r}: expected a YAML file, found {file_type}; write the study to a file")
        raise ConfigError(f"study {name!r}: unknown; there are {', '.join(list_studies())}, or give a YAML file")
    tree = read_yaml(path)
    try:
        _check_study(tree)
        rows = [_parse_row(row) for row in tree.get("rows") or []]
        for template in tree.get("rows_per_anchor_set") or []:
            rows += [_parse_row(template, anchor_set) for anchor_set in anchor_sets]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [row.name for row in rows]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two rows are named {duplicates[0]!r}; rename one of them")
    per_set = bool(tree.get("rows_per_anchor_set"))
    if not rows and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: has no rows; see ramen/ablation/studies for examples")
    unknown = {row.against for row in rows if row.against} - set(names)
    if unknown and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: `against: {sorted(unknown)[0]}` is not a row; there are {', '.join(names)}")
    for number, row in enumerate(rows):
        if row.time_of and row.time_of not in names[:number]:
            raise ConfigError(f"{path}: row {row.name!r}: `time_of: {row.time_of}` is not a row above it")
    return Study(path.stem, tree["title"], tuple(rows), per_set, tuple(tree.get("published") or ()))


def _check_study(tree: Any) -> None:
    """Check the fields of a study and their types. Raises ConfigError, without the name of the file."""
    if not isinstance(tree, dict) or not isinstance(tree.get("title"), str):
        raise ConfigError(
            "not a study: expected a mapping with a text `title`; see ramen/ablation/studies for examples"
        )
    _check_fields(tree, FIELDS, "")
    for field in ("rows", "rows_per_anchor_set"):
        rows = tree.get(field) or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"{field}: expected a list of mappings; see ramen/ablation/studies for examples")
    if not _is_list_of_texts(tree.get("published") or []):
        raise ConfigError("published: expected a list of table names")


def _check_fields(tree: dict[Any, Any], fields: set[str], where: str) -> None:
    if unknown := [str(key) for key in tree if key not in fields]:
        raise ConfigError(f"{where}{unknown[0]}: unknown; {suggest_name(unknown[0], fields)}")


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _parse_row(tree: dict[str, Any], anchor_set: str = "") -> Row:
    name = tree.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"row {short_repr(name)}: name: expected a text; quote a number")
    where = f"row {short_repr(name)}: "
    if not name.isprintable() or name != name.strip() or "," in name:
        raise ConfigError(
            f"{where}name: expected one line without commas and surrounding spaces, so that --rows can select the row"
        )
    if tree.get("against") == name:
        raise ConfigError(f"{where}against: is the row itself; name another row or remove it")
    _check_fields(tree, ROW_FIELDS, where)
    sets = tree.get("set") or []
    if isinstance(sets, str):
        raise ConfigError(f"{where}set: expected a list, as in [{sets}]")
    if not _is_list_of_texts(sets):
        raise ConfigError(f"{where}set: expected a list of assignments section.key=value")
    references = {key: tree.get(key) or "" for key in ("against", "peer", "time_of")}
    for key, value in references.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}{key}: expected a text, found {short_repr(value)}; quote a number")
    assignments = tuple(text.replace("{set}", anchor_set) for text in sets)
    return Row(name.replace("{set}", anchor_set), assignments, **references)
