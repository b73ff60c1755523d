"""YAML files that users write: parameters and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ramen.errors import ConfigError, undecoded


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice in a mapping: YAML does, PyYAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} comes twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises ConfigError, with the line where one is to blame; FileNotFoundError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except UnicodeDecodeError as error:
        line, byte = undecoded(error)
        raise ConfigError(f"{path}:{line}: not UTF-8 (byte {byte}); save it as that") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML ({getattr(error, 'problem', error)})") from None
