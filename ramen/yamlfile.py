"""A strict reader for YAML that users write: parameter files, studies, and the values of `--set`.

Only mappings, lists, text, numbers, booleans and null are read. Numbers and constants follow YAML 1.2, as in DVC's
reader of params.yaml: `yes` is text, 010 is ten, 2024-02-30 is text, 1e-4 is a number. Size, depth and the size with
expanded aliases are bounded, so reading ends in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ramen.errors import ConfigError, find_lone_surrogate, locate_decoding_error, os_error_text, short_repr

MAX_BYTES = 256 * 1024
"""Largest file; a complete parameter file has a tenth of it."""
MAX_DEPTH = 20
MAX_NODES = 20_000
"""Largest number of values and keys of a document, aliases expanded."""

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""Type -> pattern of its plain scalars, and their possible first characters [YAML 1.2, 10.3.2]."""


class _Loader(yaml.SafeLoader):
    """Reads plain data within the bounds and refuses duplicate keys, of which PyYAML would keep the last."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # without those of YAML 1.1
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if self._depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH}", event.start_mark)
        if self._nodes > MAX_NODES:
            raise _too_many_values(event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _invalid_value(node)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
            if key.value in seen:
                problem = f"{short_repr(key.value)} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Do nothing: in YAML 1.2, `<<` is an ordinary key."""


def _check_size(root: yaml.Node) -> None:
    """Raise an error for a document that is too large with aliases expanded, or whose alias contains itself."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise yaml.composer.ComposerError(None, None, "an alias contains itself", node.start_mark)
        if known is None:
            sizes[id(node)] = 0
            value = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for pair in value for part in pair] if isinstance(node, yaml.MappingNode) else value
            known = sizes[id(node)] = 1 + sum(map(size, parts))
        if known > MAX_NODES:
            raise _too_many_values(node)
        return known

    size(root)


def _too_many_values(found: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, f"more than {MAX_NODES:,} values", found.start_mark)


def _invalid_value(node: yaml.Node) -> yaml.YAMLError:
    """Return the error for a value that does not fit its tag, or whose type is not supported."""
    tag = node.tag.replace(_PREFIX, "!!")
    what = (
        f"{short_repr(node.value)} cannot be read as {tag}"
        if isinstance(node, yaml.ScalarNode)
        else f"tag {short_repr(tag)}"
    )
    return yaml.constructor.ConstructorError(None, None, f"{what}; write plain values without tags", node.start_mark)


def _construct(name: str) -> Any:
    """Return the constructor of a type: PyYAML's own, restricted to values that fit the tag."""
    inherited = getattr(yaml.SafeLoader, f"construct_yaml_{name}")

    def construct(loader: _Loader, node: yaml.Node) -> Any:
        expected = {"seq": yaml.SequenceNode, "map": yaml.MappingNode}.get(name, yaml.ScalarNode)
        if not isinstance(node, expected):
            raise _invalid_value(node)
        if name == "int":
            return _decimal_integer(node)
        if name == "str" and find_lone_surrogate(node.value):
            raise _invalid_value(node)
        try:
            return inherited(loader, node)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _invalid_value(node) from None

    return construct


def _decimal_integer(node: yaml.Node) -> int:
    """Read a decimal integer; PyYAML itself would read 010 as eight and 1:30 as ninety."""
    try:
        return int(node.value) if re.fullmatch(_PLAIN["int"][0], node.value) else int("")
    except ValueError:
        raise _invalid_value(node) from None


def _refuse_tag(loader: _Loader, node: yaml.Node) -> Any:
    raise _invalid_value(node)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""


for _type, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _characters = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(_PREFIX + _type, re.compile(rf"(?:{_pattern})\Z"), _characters)
for _name in ("null", "bool", "int", "float", "str", "seq", "map"):
    _Loader.add_constructor(_PREFIX + _name, _construct(_name))
_Loader.add_constructor(None, _refuse_tag)


def parse_yaml(text: str, where: str, *, numbered: bool = False) -> Any:
    """Parse a YAML document.

    Args:
        text: one document.
        where: start of error messages: file or option.
        numbered: whether error messages contain the line number.

    Raises:
        ConfigError: not YAML, beyond a bound, or a type that is not supported.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: expected at most {MAX_BYTES:,} characters of YAML, found {len(text):,}")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.reader.ReaderError as error:
        line = f"{where}:{text.count(chr(10), 0, error.position) + 1}" if numbered else where
        found = chr(error.character) if isinstance(error.character, int) else error.character
        raise ConfigError(f"{line}: not valid YAML (the character {short_repr(found)})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if numbered and mark else where
        raise ConfigError(f"{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    except (ValueError, OverflowError) as error:  # PyYAML's scanner on an escape or a version number out of range
        raise ConfigError(f"{where}: not valid YAML ({error})") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: it cannot be read or parsed; with the line number if one line is at fault.
        FileNotFoundError: it does not exist.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: expected at most {MAX_BYTES:,} bytes of YAML, found more; check the path")
        return parse_yaml(content.decode("utf-8"), str(path), numbered=True)
    except UnicodeDecodeError as error:
        line, byte = locate_decoding_error(error)
        raise ConfigError(f"{path}:{line}: not UTF-8 (byte {byte}); save it as UTF-8") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({os_error_text(error)})") from None


def dump_yaml(value: Any) -> str:
    """Return a value as one line of YAML that `parse_yaml` and YAML 1.1 readers read back unchanged."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10_000_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()
