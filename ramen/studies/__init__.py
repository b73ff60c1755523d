"""Studies for `ramen ablate`: data only, one YAML file each, and what reads them.

A study has a `title`, and `rows`: a `name`, assignments `set` over the configuration asked for, and optionally
`against`, the row it is compared with. A row with `peer` evaluates one of `ramen.peers` instead of training; `time_of`
names the row whose training time the peer gets. `rows_per_anchor_set` is a row for each anchor set of the data, with
`{set}` in its texts. `published` names tables of presets/published.csv that ask the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramen.errors import ConfigError, nearest
from ramen.yamlfile import read_yaml

if TYPE_CHECKING:
    from ramen.config import Config

FOLDER = Path(__file__).parent
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
        published: tables of the papers that ask the same, as `ramen.published` names them.
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
    if not path.is_file():
        raise ConfigError(f"study {name!r}: unknown; there are {', '.join(studies())}, or give a YAML file")
    tree = read_yaml(path)
    try:
        if unknown := set(tree) - FIELDS:
            raise ConfigError(f"{sorted(unknown)[0]}: unknown; {nearest(sorted(unknown)[0], FIELDS)}")
        rows = [_row(row) for row in tree.get("rows", [])]
        for template in tree.get("rows_per_anchor_set", []):
            rows += [_row(template, anchor_set) for anchor_set in anchor_sets]
        title = str(tree["title"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no study ({error}); see ramen/studies for the form") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = [row.name for row in rows]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: two rows are called {twice[0]!r}; names of rows must differ")
    per_set = bool(tree.get("rows_per_anchor_set"))
    if not rows and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: has no rows; see ramen/studies for the form")
    lost = {row.against for row in rows if row.against} - set(names)
    if lost and (anchor_sets or not per_set):
        raise ConfigError(f"{path}: `against: {sorted(lost)[0]}` names no row; there are {', '.join(names)}")
    for number, row in enumerate(rows):
        if row.time_of and row.time_of not in names[:number]:
            raise ConfigError(f"{path}: row {row.name!r}: `time_of: {row.time_of}` names no row above it")
    return Study(path.stem, title, tuple(rows), per_set, tuple(tree.get("published") or ()))


def _row(tree: dict[str, Any], anchor_set: str = "") -> Row:
    if unknown := set(tree) - ROW_FIELDS:
        name = sorted(unknown)[0]
        raise ConfigError(f"row {tree.get('name', '?')!r}: {name}: unknown; {nearest(name, ROW_FIELDS)}")
    if isinstance(tree.get("set"), str):
        raise ConfigError(f"row {tree.get('name', '?')!r}: set: expected a list, as in [{tree['set']}]")
    sets = tuple(str(text).replace("{set}", anchor_set) for text in tree.get("set") or [])
    others = {key: str(tree.get(key, "")) for key in ("against", "peer", "time_of")}
    return Row(str(tree["name"]).replace("{set}", anchor_set), sets, **others)
