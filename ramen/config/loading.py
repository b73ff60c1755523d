"""Reading and writing configurations: presets, parameter files, `--set`, and the errors in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ramen.config.knobs import SECTIONS, Config, Section, describe_range, extra, is_section, knobs
from ramen.errors import ConfigError, find_lone_surrogate, short_repr, suggest_name
from ramen.yamlfile import dump_yaml, parse_yaml, read_yaml

PRESETS = Path(__file__).parents[1] / "presets"
PARAMS_FILE = "params.yaml"
EXTENDS = "extends"
"""Key of a preset that names the preset whose values it starts from."""

RETIRED: dict[str, str] = {
    "walk.max_new": "removed: the walk adds at most 10 anchors to a row; set walk.hops=0 to add none",
    "walk.degree_cap": "removed: the walk leaves out rows and anchors of more than 500 edges; see walk.hub_cap",
    "walk.threads": "removed: the walk uses all cores; its result does not depend on them",
    "walk.seed": "removed: the walk always uses seed 0",
    "objective.temperature": "removed: the softmax temperature of the negatives is 0.1",
    "objective.lambda_task": "removed: the task loss has weight 1; scale lambda_document and lambda_label instead",
    "objective.anchor_pool": "removed: negatives are the anchors of both sides",
    "bandit.estimator": "replaced by bandit.form: safe (rademacher) or printed (paper)",
    "bandit.baseline": "replaced by bandit.form: safe (with a baseline) or printed (without)",
    "bandit.baseline_momentum": "removed: the momentum of the safe form is 0.8",
    "bandit.normalise": "replaced by bandit.form: safe (normalised) or printed (not)",
    "bandit.safeguards": "replaced by bandit.form: safe (bounded) or printed (not)",
    "bandit.max_step": "removed: the safe form moves a weight by at most 0.05 per window",
    "bandit.lambda_min": "removed: the safe form keeps weights at 0.01 or more",
    "bandit.lambda_max": "removed: the safe form keeps weights at 2 or less",
    "bandit.gauge": "replaced by bandit.form: safe (fixed_task) or printed (free)",
    "base.mined": "renamed; set base.mining.negatives",
    "base.shortlist": "removed: mined negatives are sampled from the 100 nearest labels",
    "base.cluster_size": "renamed; set base.clusters.size",
    "base.cluster_double_every": "renamed; set base.clusters.double_every",
    "base.temperature": "renamed; set base.dexml.temperature",
    "base.labels_per_offset": "renamed; set base.dexa.labels_per_offset",
    "base.offset_heads": "removed: in dexa the 1,000 most frequent labels have their own offset",
    "training.adam_eps": "removed: the epsilon of AdamW is 1e-6",
    "training.clip_norm": "removed: gradients are clipped to norm 1",
    "pruning.from_previous": "removed: every round prunes the original graphs",
    "pruning.converged_at": "removed: pruning stops when every graph's Jaccard similarity exceeds 0.995",
    "pruning.enabled": "replaced by pruning.rule; set pruning.rule=none to retrain on the unpruned graphs",
    "classifier.enabled": "replaced by classifier.epochs; set classifier.epochs=0 to train no classifiers",
    "classifier.batch_size": "removed: the classifiers' batch size is 2048",
    "classifier.lr": "removed: the classifiers' learning rate is 0.001",
    "classifier.shortlist": "removed: the classifiers' negatives are sampled from the 100 nearest labels",
    "classifier.margin": "removed: the classifiers' margin is 0.2",
    "classifier.dropout": "removed: the classifiers' dropout is 0.5",
    "scoring.retrieve": "removed: 200 labels are retrieved per document",
    "scoring.quantiles": "removed: the report has 5 equi-volume label bins",
    "scoring.quantile_rule": "removed: label bins are cut as in pyxclib",
    "scoring.chunk": "removed: 4,096 documents are scored at a time",
    "scoring.samples": "removed: the report shows 12 sample predictions",
    "index.hnsw_m": "removed: the HNSW graph has 32 links per node; set index.kind=HNSW16,Flat for another number",
    "index.ef_construction": "removed: the HNSW graph is built with 200 candidates",
    "index.build_threads": "removed: 1 thread builds an index of up to 100,000 labels, all cores a larger one",
    "index.recall_k": "removed: ANN recall is measured at depth 10",
}
"""Path of a knob of earlier versions -> what replaced it."""

_TYPE_NAMES = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
"""Python type of a YAML document -> its name in messages."""


def presets() -> list[str]:
    """Return the names of the presets that ship with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def resolve(
    *,
    preset: str | None = None,
    params: str | Path | None = None,
    sets: Iterable[str] = (),
) -> Config:
    """Resolve the configuration: defaults < preset < parameter file < `--set`.

    Args:
        preset: name of a shipped preset, or None.
        params: parameter file; None reads params.yaml of the working directory if it exists and no preset is given.
        sets: assignments `section.key=value`; the value is read as YAML. `section.key.entry=value` sets one entry of a
            knob that is a mapping.

    Raises:
        ConfigError: unknown preset, section or key (with the nearest valid name), retired key (with its replacement),
            or a value out of range.
    """
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if preset is not None:
        for name in _preset_chain(preset):
            values = _read(PRESETS / f"{name}.yaml")
            values.pop(EXTENDS, None)
            _check_keys(values, f"preset {name}")
            _merge(tree, values)
    if params is None and preset is None and Path(PARAMS_FILE).is_file():
        params = PARAMS_FILE
    if params is not None:
        values = _read(Path(params))
        _check_keys(values, str(params))
        _merge(tree, values)
        origin = dict.fromkeys(_assigned_paths(values), str(params))
    for assignment in sets:
        path = _assign(tree, assignment)
        for known in [known for known in origin if f"{known}.".startswith(f"{path}.")]:
            del origin[known]
        # If two values contradict each other, the file is not the only source of the error.
        origin[path.partition(".")[0]] = ""
    return parse(tree, origin)


def parse(tree: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> Config:
    """Validate a nested mapping into a Config.

    Args:
        tree: section -> key -> value.
        origin: path of a knob -> the file that its value was read from, for messages.

    Raises:
        ConfigError: one line per wrong value.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*_explain(error, origin or {})) from None


def parse_section(name: str, values: Mapping[str, Any]) -> Section:
    """Validate one section. Raises ConfigError."""
    _check_keys({name: values}, name)
    return getattr(parse({name: values}), name)  # type: ignore[no-any-return]


def to_yaml(config: Config, *, all_knobs: bool = True) -> str:
    """Return the configuration as a commented parameter file.

    Args:
        config: values to write.
        all_knobs: write every knob; False = only the common ones and those that differ from their default, which gives
            the same configuration when it is read.
    """
    command = "ramen config --all" if all_knobs else "ramen config"
    lines = [f"# Written by `{command}`. docs/config.md explains every knob."]
    for name, section in SECTIONS.items():
        if body := list(_section_lines(getattr(config, name), all_knobs, "  ")):
            lines += ["", f"# {_summary(section)}", f"{name}:", *body]
    return "\n".join(lines) + "\n"


def _section_lines(section: Section, all_knobs: bool, indent: str) -> Iterator[str]:
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            if body := list(_section_lines(value, all_knobs, indent + "  ")):
                yield f"{indent}{key}:  # {_summary(type(value))}"
                yield from body
        elif all_knobs or extra(field, "common") or value != field.default:
            extent = describe_range(field)
            yield f"{indent}{key}: {dump_yaml(value)}  # {field.description}" + (f" [{extent}]" if extent else "")


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or "").splitlines()[0]


def _preset_chain(preset: str) -> list[str]:
    """Return a preset and those it extends, the most general first."""
    chain: list[str] = []
    name: str | None = preset
    while name is not None:
        if name not in presets():
            raise ConfigError(f"preset {name!r}: unknown; {suggest_name(name, presets())}")
        chain.insert(0, name)
        name = _read(PRESETS / f"{name}.yaml").get(EXTENDS)
    return chain


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `ramen config > {path}` writes one") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {_TYPE_NAMES[type(tree)]}")
    return tree


def _assign(tree: dict[str, Any], text: str) -> str:
    """Carry out one `section.key=value` and return the path of the knob or section that it sets.

    `section.key.entry=value` changes one entry of a knob that is a mapping.
    """
    where = f"--set {_shorten(text)}"
    left, equals, value = text.partition("=")
    parts = left.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"{where}: expected section.key=value, e.g. training.epochs=5")
    known, path = _split_path(parts)
    # Only the part of the path that names sections and a knob is checked: an entry may have any name.
    _check_keys(_nest(known, None), "--set")
    annotation, default = _field(known)
    entry = ".".join(parts[len(known) :])
    parsed: Any
    if find_lone_surrogate(value):  # not YAML; the knob's own check explains it
        parsed = value
    elif annotation is str and not value.strip().startswith(("'", '"')):
        parsed = _strip_comment(value)  # a folder may be named 2024, or [x
    else:
        parsed = parse_yaml(value, where) if value.strip() else ""
    if entry:  # objective.lambdas.depends.label=0.3
        before = _value_at(tree, known, default)
        if not isinstance(before, Mapping):
            raise ConfigError(f"{where}: {path} has no entries; expected {path}=value")
        parsed = {**before, entry: parsed}
    if is_section(annotation):
        _check_keys(_nest(known, parsed), where)
    _merge(tree, _nest(known, parsed))
    return path


def _split_path(parts: list[str]) -> tuple[list[str], str]:
    """Return the leading parts that name sections and a knob (or an unknown key), and their path."""
    fields: Any = SECTIONS.get(parts[0])
    end = 1
    while is_section(fields) and end < len(parts):
        field = fields.model_fields.get(parts[end])
        fields = field.annotation if field else None
        end += 1
    known = parts[: max(end, 2)]
    return known, ".".join(known)


def _field(parts: list[str]) -> tuple[Any, Any]:
    """Return type and default of a knob or nested section."""
    section: Any = SECTIONS[parts[0]]
    for key in parts[1:-1]:
        section = section.model_fields[key].annotation
    field = section.model_fields[parts[-1]]
    return field.annotation, field.default


def _nest(parts: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(parts):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _value_at(tree: Mapping[str, Any], parts: list[str], default: Any) -> Any:
    value: Any = tree
    for key in parts:
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _strip_comment(value: str) -> str:
    """Return plain text without surrounding blanks and without a YAML comment."""
    return re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()


def _merge(tree: dict[str, Any], update: Mapping[str, Any], sections: Mapping[str, Any] | None = None) -> None:
    """Put checked values over existing ones, section by section; a knob that is a mapping is replaced as a whole."""
    types = sections or SECTIONS
    for key, value in update.items():
        if is_section(types[key]):
            nested = {name: field.annotation for name, field in types[key].model_fields.items()}
            _merge(tree.setdefault(key, {}), value or {}, nested)
        else:
            tree[key] = value


def _check_keys(tree: Mapping[str, Any], where: str) -> None:
    """Refuse unknown sections and keys, and retired ones. Raises ConfigError with one line for each."""
    if problems := [f"{where}: {problem}" for problem in _key_problems(tree)]:
        raise ConfigError(*problems)


def _key_problems(tree: Mapping[str, Any]) -> Iterator[str]:
    for name, values in tree.items():
        if name in SECTIONS:
            yield from _section_problems(SECTIONS[name], values, name)
        else:
            yield f"{_shorten(name)}: unknown section; {suggest_name(str(name), SECTIONS)}"


def _section_problems(section: type[Section], values: Any, path: str) -> Iterator[str]:
    if values is not None and not isinstance(values, Mapping):
        yield f"{path}: expected a mapping, found {short_repr(values)}"
        return
    fields = section.model_fields
    for key, value in (values or {}).items():
        here = f"{path}.{_shorten(key)}"
        if here in RETIRED:
            yield f"{here}: {RETIRED[here]}"
        elif key not in fields:
            yield f"{here}: unknown; {suggest_name(str(key), fields)}"
        elif is_section(annotation := fields[key].annotation):
            yield from _section_problems(annotation, value, here)


def _assigned_paths(tree: Mapping[str, Any]) -> list[str]:
    """Return the paths of the knobs to which a checked tree gives a value."""
    return [
        f"{name}.{path}"
        for name, values in tree.items()
        for path, _ in knobs(SECTIONS[name])
        if _value_at(values or {}, path.split("."), _ABSENT) is not _ABSENT
    ]


_ABSENT = object()


def _shorten(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _explain(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """Return one line per wrong value, with the file that it was read from."""
    lines = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        prefixes = {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
        if prefixes & origin.keys():
            files = {origin[prefix] for prefix in prefixes & origin.keys()}
        else:  # values of a section contradict each other
            inside = ".".join(parts) + "."
            files = {origin[path] for path in origin if f"{path}.".startswith(inside)}
        where = "".join(f"{file}: " for file in files if file and len(files) == 1)
        path = ".".join(map(_shorten, parts))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(f"{where}{path}: {message}")
        elif item["type"] == "list_type" and isinstance(item["input"], str):
            lines.append(
                f"{where}{path} = {short_repr(item['input'])}: expected a list, as in [{_shorten(item['input'])}]"
            )
        else:
            lines.append(f"{where}{path} = {short_repr(item['input'])}: {message[0].lower()}{message[1:]}")
    return lines
