"""Studies for `ramen ablate`: data only, one YAML file each, and what reads them.

A study has a `title`, and `rows`: a `name`, assignments `set` over the configuration asked for, and optionally
`against`, the row it is compared with. A row with `peer` evaluates one of `ramen.peers` instead of training; `time_of`
names the row whose training time the peer gets. `rows_per_anchor_set` is a row for each anchor set of the data, with
`{set}` in its texts. `published` names tables of ablation/published.csv that ask the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramen.errors import ConfigError, nearest, not_a_file, shown
from ramen.yamlfile import read_yaml

if TYPE_CHECKING:
    from ramen.config import Config

FOLDER = Path(__file__).with_name("studies")
FIELDS = {"title", "rows", "rows_per_anchor_set", "published"}
ROW_FIELDS = {"name", "set", "against", "peer", "time_of"}


@dataclass(frozen=True)
class Row:
    """One line of a study.

    Attributes:
        sets: assignments `section.key=value`.
        against: the row it is compared with; "" = none.
        peer: name in `ramen.peers.PEERS`; "" = a training run.
        time_of: the row above whose training time the peer gets; "" = no time limit.
    """

    name: str
    sets: tuple[str, ...]
    against: str = ""
    peer: str = ""
    time_of: str = ""


@dataclass(frozen=True)
class Study:
    """A list of rows to be run over the same seeds.

    Attributes:
        per_set: some rows stand for an anchor set each.
        published: tables of the papers that ask the same, as `ramen.ablation.published` names them.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    per_set: bool = False
    published: tuple[str, ...] = ()

    def without_repeats(self, config_of: Callable[[Row], Config]) -> tuple[Study, dict[str, str]]:
        """Leave out rows whose configuration is that of the row they are compared with: they would gain 0 of nothing.

        Under a preset that already is what a row asks for (`paper` has no label context), such a row says nothing.
        Rows that were compared with one that is left out are compared with the row it repeats.

        Args:
            config_of: the configuration of a row.

        Returns:
            The study, and the rows left out -> the row that each repeats.
        """
        of = {row.name: (row.peer, config_of(row)) for row in self.rows}
        repeats: dict[str, str] = {}
        for row in self.rows:
            if of[row.name] == of.get(row.against):
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


def studies() -> list[str]:
    """Names of the studies that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_study(name: str, anchor_sets: Sequence[str] = ()) -> Study:
    """A shipped study, or a YAML file of the same form.

    Args:
        name: of a study, or a path.
        anchor_sets: of the data, for rows that stand for each of them; none = not known yet, such rows are left out.

    Raises:
        ConfigError: there is no such study, or it is not of that form.
    """
    path = FOLDER / f"{name}.yaml" if name in studies() else Path(name)
    if found := not_a_file(path):
        if os.path.lexists(path):
            raise ConfigError(f"study {name!r}: expected a YAML file, found {found}; write the study to a file")
        raise ConfigError(f"study {name!r}: unknown; there are {', '.join(studies())}, or give a YAML file")
    tree = read_yaml(path)
    try:
        _check_form(tree)
        rows = [_row(row) for row in tree.get("rows") or []]
        for template in tree.get("rows_per_anchor_set") or []:
            rows += [_row(template, anchor_set) for anchor_set in anchor_sets]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [row.name for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two rows are called {twice[0]!r}; names of rows must differ")
    per_set = bool(tree.get("rows_per_anchor_set"))
    if not rows and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: has no rows; see ramen/ablation/studies for the form")
    lost = {row.against for row in rows if row.against} - set(names)
    if lost and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: `against: {sorted(lost)[0]}` names no row; there are {', '.join(names)}")
    for number, row in enumerate(rows):
        if row.time_of and row.time_of not in names[:number]:
            raise ConfigError(f"{path}: row {row.name!r}: `time_of: {row.time_of}` names no row above it")
    return Study(path.stem, tree["title"], tuple(rows), per_set, tuple(tree.get("published") or ()))


def _check_form(tree: Any) -> None:
    """Refuse what is not a mapping of a study's fields. Raises ConfigError, without the name of the file."""
    if not isinstance(tree, dict) or not isinstance(tree.get("title"), str):
        raise ConfigError(
            "is no study: expected a mapping with a text `title`; see ramen/ablation/studies for the form"
        )
    _check_fields(tree, FIELDS, "")
    for field in ("rows", "rows_per_anchor_set"):
        rows = tree.get(field) or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"{field}: expected a list of mappings; see ramen/ablation/studies for the form")
    if not _is_texts(tree.get("published") or []):
        raise ConfigError("published: expected a list of names of tables")


def _check_fields(tree: dict[Any, Any], fields: set[str], where: str) -> None:
    if unknown := [str(key) for key in tree if key not in fields]:
        raise ConfigError(f"{where}{unknown[0]}: unknown; {nearest(unknown[0], fields)}")


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _row(tree: dict[str, Any], anchor_set: str = "") -> Row:
    name = tree.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"row {shown(name)}: name: expected a text; quote a number")
    where = f"row {shown(name)}: "
    if not name.isprintable() or name != name.strip() or "," in name:
        raise ConfigError(f"{where}name: expected a line without commas and outer spaces; --rows could not choose it")
    if tree.get("against") == name:
        raise ConfigError(f"{where}against: names the row itself; name another row, or remove it")
    _check_fields(tree, ROW_FIELDS, where)
    sets = tree.get("set") or []
    if isinstance(sets, str):
        raise ConfigError(f"{where}set: expected a list, as in [{sets}]")
    if not _is_texts(sets):
        raise ConfigError(f"{where}set: expected a list of assignments section.key=value")
    others = {key: tree.get(key) or "" for key in ("against", "peer", "time_of")}
    for key, value in others.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}{key}: expected a text, found {shown(value)}; quote a number")
    return Row(name.replace("{set}", anchor_set), tuple(text.replace("{set}", anchor_set) for text in sets), **others)
