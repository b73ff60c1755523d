"""Resolution order, nested sections, retired keys, refusals with the nearest name, and the forms of values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ramen.config import RETIRED, SECTIONS, describe_range, extra, knobs, parse_section, presets, resolve, to_yaml
from ramen.errors import ConfigError
from ramen.tracking import flat_params


@pytest.fixture(autouse=True)
def _work_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid(name: str) -> None:
    resolve(preset=name)


@pytest.mark.parametrize("name", ["debian", "manpages", "wordnet", "xc"])
def test_presets_of_the_results_train_with_the_defaults(name: str) -> None:
    """Users' own data are trained as docs/results.md measures, not with a paper's budget of GPU days."""
    default, preset = resolve().sections(), resolve(preset=name).sections()
    different = {
        f"{section}.{key}" for section in preset for key in preset[section]
        if preset[section][key] != default[section][key]
    }  # fmt: skip
    assert different <= {"data.source", "data.path", "objective.anchor_sets"}
    assert preset["data"]["max_documents"] == 0


def test_later_sources_override_single_knobs() -> None:
    Path("mine.yaml").write_text("training: {epochs: 7, lr: 0.001}\nwalk: {hops: 5}\n")
    by_preset = resolve(preset="demo")
    merged = resolve(preset="demo", params="mine.yaml", sets=["training.lr=0.5"])
    assert merged.walk.hops == 5 != resolve().walk.hops
    assert merged.training.epochs == 7 != by_preset.training.epochs
    assert merged.training.lr == 0.5
    assert merged.training.warmup_epochs == by_preset.training.warmup_epochs != resolve().training.warmup_epochs


def test_params_yaml_is_read_unless_a_preset_is_named() -> None:
    Path("params.yaml").write_text("walk: {hops: 3}\n")
    assert resolve().walk.hops == 3
    assert resolve(preset="demo").walk.hops != 3
    assert resolve(preset="demo", params="params.yaml").walk.hops == 3


@pytest.mark.parametrize("all_knobs", [False, True])
def test_the_written_file_gives_the_same_configuration(all_knobs: bool) -> None:
    config = resolve(
        preset="demo", sets=["objective.lambdas={a.label: 0.3}", "index.alias=", "base.dexa.labels_per_offset=7"]
    )
    Path("params.yaml").write_text(to_yaml(config, all_knobs=all_knobs))
    assert resolve() == config


def test_the_complete_file_has_every_knob_and_the_short_one_the_common_and_changed_ones() -> None:
    config = resolve(sets=["base.clusters.size=8"])
    every = {f"{name}.{path}" for name, section in SECTIONS.items() for path, _ in knobs(section)}
    assert set(flat_params(yaml.safe_load(to_yaml(config)))) == every
    common = {
        f"{name}.{path}"
        for name, section in SECTIONS.items()
        for path, field in knobs(section)
        if extra(field, "common")
    }
    assert 10 <= len(common) <= 16
    assert set(flat_params(yaml.safe_load(to_yaml(config, all_knobs=False)))) == common | {"base.clusters.size"}


def test_there_are_at_most_97_knobs() -> None:
    assert sum(1 for section in SECTIONS.values() for _ in knobs(section)) <= 97


def test_tracked_parameters_are_the_knobs() -> None:
    every = [f"{name}.{path}" for name, section in SECTIONS.items() for path, _ in knobs(section)]
    config = resolve(sets=["objective.lambdas={a.label: 0.3}"])
    tracked = flat_params(config.sections())
    assert list(tracked) == every
    assert tracked["base.dexa.labels_per_offset"] == 3 and tracked["objective.lambdas"] == {"a.label": 0.3}


def test_a_nested_knob_is_set_by_presets_files_and_assignments() -> None:
    Path("mine.yaml").write_text("base: {name: dexa, clusters: {size: 8}}\n")
    base = resolve(preset="paper", params="mine.yaml", sets=["base.dexa.labels_per_offset=5"]).base
    assert (base.name, base.refresh_from) == ("dexa", 10)
    assert (base.clusters.size, base.clusters.double_every) == (8, 25), "the file leaves the preset's other key"
    assert (base.dexa.labels_per_offset, base.dexml.temperature) == (5, 0.05)
    again = resolve(params="mine.yaml", sets=["base.clusters={double_every: 3}"]).base
    assert (again.clusters.size, again.clusters.double_every) == (8, 3), "a nested section is merged"


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("base.dexa.labels_per_ofset=3", "--set: base.dexa.labels_per_ofset: unknown; did you mean labels_per_offset?"),
        ("base.dexaa.labels_per_offset=3", "--set: base.dexaa: unknown; did you mean dexa?"),
        ("base.dexa=3", "--set base.dexa=3: base.dexa: expected a mapping, found 3"),
        ("base.dexa={labels: 3}", "--set base.dexa={labels: 3}: base.dexa.labels: unknown; "),
        (
            "base.dexa.labels_per_offset=0",
            "base.dexa.labels_per_offset = 0: input should be greater than or equal to 1",
        ),
        (
            "base.dexa.labels_per_offset.x=1",
            "--set base.dexa.labels_per_offset.x=1: base.dexa.labels_per_offset has no",
        ),
        ("base.mining.negatives=true", "base.mining.negatives: True: expected a whole number, found true"),
    ],
)
def test_a_wrong_nested_key_or_value_is_refused(assignment: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(sets=[assignment])
    assert str(error.value).startswith(line)


def test_a_wrong_nested_value_names_its_file() -> None:
    Path("my.yaml").write_text("base: {dexa: {labels_per_offset: 0}, clusters: {sizes: 3}}\n")
    with pytest.raises(ConfigError, match=r"^my.yaml: base.clusters.sizes: unknown; did you mean size\?$"):
        resolve(params="my.yaml")
    Path("my.yaml").write_text("base: {dexa: {labels_per_offset: 0}}\n")
    with pytest.raises(ConfigError, match=r"^my.yaml: base.dexa.labels_per_offset = 0: input should be greater"):
        resolve(params="my.yaml")


@pytest.mark.parametrize("path", RETIRED)
def test_a_retired_key_is_answered_with_its_replacement(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section, key = path.split(".")
    answer = f"{path}: {RETIRED[path]}"
    assert key not in SECTIONS[section].model_fields
    Path("old.yaml").write_text(f"{section}: {{{key}: 1}}\n")
    monkeypatch.setattr("ramen.config.loading.PRESETS", Path.cwd())
    calls = {
        "--set": lambda: resolve(sets=[f"{path}=1"]),
        "old.yaml": lambda: resolve(params="old.yaml"),
        "preset old": lambda: resolve(preset="old"),
        section: lambda: parse_section(section, {key: 1}),
    }
    for where, call in calls.items():
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == f"{where}: {answer}" and error.value.exit_code == 2


def test_all_unknown_and_retired_keys_of_a_file_are_listed() -> None:
    Path("old.yaml").write_text("walk: {seed: 0, threads: 0}\nbase: {mined: 1}\nwlak: {}\n")
    with pytest.raises(ConfigError) as error:
        resolve(params="old.yaml")
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "walk.seed", "walk.threads", "base.mined", "wlak"
    ]  # fmt: skip


@pytest.mark.parametrize("path", RETIRED)
def test_a_replacement_is_a_knob(path: str) -> None:
    every = {f"{name}.{path}" for name, section in SECTIONS.items() for path, _ in knobs(section)}
    named = re.findall(r"(?:set|by|see) ([a-z_.]+\.[a-z_]+)", RETIRED[path])
    assert set(named) <= every
    for assignment in re.findall(r"set ([a-z_.]+=\S+)", RETIRED[path]):
        resolve(sets=[assignment])


@pytest.mark.parametrize(
    ("assignment", "section", "knob", "expected"),
    [
        ("training.lr=1e-4", "training", "lr", 1e-4),
        ("training.epochs=4", "training", "epochs", 4),
        ("training.epochs=4.0", "training", "epochs", 4),
        ("objective.graphs=false", "objective", "graphs", False),
        ("data.path=2024", "data", "path", "2024"),
        ("data.path=a=b", "data", "path", "a=b"),
        ("encoder.name=1e5", "encoder", "name", "1e5"),
        ("index.alias=", "index", "alias", ""),
        ("objective.lambdas={a.label: 0.3}", "objective", "lambdas", {"a.label": 0.3}),
        ("objective.lambdas.depends.label=0.3", "objective", "lambdas", {"depends.label": 0.3}),
    ],
)
def test_set_reads_values_as_yaml(assignment: str, section: str, knob: str, expected: object) -> None:
    sets = [assignment] if section != "training" else ["training.warmup_epochs=1", assignment]
    found = getattr(getattr(resolve(sets=sets), section), knob)
    assert found == expected and type(found) is type(expected)


def test_entries_of_a_mapping_knob_add_up() -> None:
    sets = ["objective.lambdas.depends.label=0.3", "objective.lambdas.debtags.document=0"]
    assert resolve(sets=sets).objective.lambdas == {"depends.label": 0.3, "debtags.document": 0.0}


def test_a_whole_value_of_a_mapping_knob_replaces_the_previous_one(tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text("index: {gate: {psp_at_5: 0.5}}\n")
    assert resolve(params=params, sets=["index.gate={}"]).index.gate == {}
    assert resolve(params=params, sets=["index.gate={p_at_1: 0}"]).index.gate == {"p_at_1": 0}
    assert resolve(params=params, sets=["index.gate.p_at_1=1"]).index.gate == {"psp_at_5": 0.5, "p_at_1": 1}
    assert resolve(preset="debian", sets=["index.gate.p_at_1=1"]).index.gate == {"psp_at_5": 0, "p_at_1": 1}


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("training.lr.a=1", "--set training.lr.a=1: training.lr has no entries; expected training.lr=value"),
        ("walk.hop=4", "--set: walk.hop: unknown; did you mean hops?"),
        ("trainin.lr=4", "--set: trainin: unknown section; did you mean training?"),
        ("walk.hops=-1", "walk.hops = -1: input should be greater than or equal to 0"),
        ("walk.hops=1.5", "walk.hops = 1.5: input should be a valid integer, got a number with a fractional part"),
        ("walk.hops=many", "walk.hops = 'many': input should be a valid integer, unable to parse string as an integer"),
        ("training.lr=.nan", "training.lr = nan: input should be a finite number"),
        ("encoder.pooling=max", "encoder.pooling = 'max': input should be 'auto', 'mean' or 'cls'"),
        ("training.epochs=2", "training: warmup_epochs = 4 exceeds epochs = 2; set both"),
        ("objective.lambdas.a.label=-1", "objective: lambdas.a.label = -1.0: a regularisation weight is at least 0"),
        ("walk.hops", "--set walk.hops: expected section.key=value, e.g. training.epochs=5"),
        ("hops=3", "--set hops=3: expected section.key=value, e.g. training.epochs=5"),
    ],
)
def test_errors_name_the_knob(assignment: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(sets=[assignment])
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("walk.hops=2024-02-30", "walk.hops = '2024-02-30': input should be a valid integer, unable to parse"),
        (
            "walk.hops=!!int abc",
            "--set walk.hops=!!int abc: not valid YAML ('abc' cannot be read as !!int; write plain",
        ),
        ("walk.hops=!!map [a]", "--set walk.hops=!!map [a]: not valid YAML (tag '!!map'; write plain values without"),
        ("walk.hops=!!timestamp x", "--set walk.hops=!!timestamp x: not valid YAML ('x' cannot be read as !!timestamp"),
        (f"walk.hops={'9' * 5000}", f"--set walk.hops={'9' * 70}...: not valid YAML ('999"),
        (f"walk.hops={'9' * 4000}", f"walk.hops = {'9' * 80}...: input should be less than or equal to 100000"),
        (f"walk.hops={'[' * 3000}", f"--set walk.hops={'[' * 70}...: not valid YAML (nested deeper than 20)"),
        ("walk.hops=&a [*a]", "--set walk.hops=&a [*a]: not valid YAML (an alias contains itself)"),
        ("walk.hops={[1]: 2}", "--set walk.hops={[1]: 2}: not valid YAML (a key is a list or a mapping)"),
        ("walk.hops=yes", "walk.hops = 'yes': input should be a valid integer, unable to parse string as an integer"),
        ("walk.hops=true", "walk.hops: True: expected a whole number, found true"),
        ("index.memory_gb=true", "index.memory_gb: True: expected a number, found true"),
        ("objective.lambdas={a: true}", "objective.lambdas: {'a': True}: expected a number, found true"),
        ("objective.lambdas={a: 1, a: 2}", "--set objective.lambdas={a: 1, a: 2}: not valid YAML ('a' appears twice)"),
        ("objective.lambdas.a=1e30", "objective: lambdas.a = 1e+30: a regularisation weight is at most 1000"),
        ("training.epochs=1e400", "training.epochs: inf: expected a whole number from 1 to 100000, or auto"),
        ("training.threads=100000000", "training.threads = 100000000: input should be less than or equal to 1024"),
        ("training.seed=1e30", "training.seed = 1e+30: unable to parse input string as an integer, exceeded maximum"),
        ("index.ef_search=100000000", "index.ef_search = 100000000: input should be less than or equal to 100000"),
        ("base.dexml.temperature=1e-300", "base.dexml.temperature = 1e-300: input should be greater than or equal"),
        (
            "data.encoding=hex",
            "data.encoding: 'hex': expected a text encoding that keeps ASCII, such as utf-8 or latin",
        ),
        ("data.path=a\nb", r"data.path: 'a\nb': expected text without control characters"),
        (
            "data.path=\udce9",
            r"data.path: '\udce9': expected UTF-8 text; rename the file or folder if this is its name",
        ),
        ("data.path=" + "a" * 5000, "data.path: expected at most 4096 characters, found 5,000"),
        ("index.kind=HNSW100000", "index.kind: 'HNSW100000': expected a number from 1 to 256 in HNSW100000"),
        ("index.kind=IVF0,Flat", "index.kind: 'IVF0,Flat': expected a number from 1 to 1048576 in IVF0"),
        (
            "index.kind=IVF9999999999,Flat",
            "index.kind: 'IVF9999999999,Flat': expected a number from 1 to 1048576 in IVF",
        ),
        ("index.kind=PQ64x24", "index.kind: 'PQ64x24': expected a number from 1 to 16 in x24"),
        ("index.kind=IMI2x16,Flat", "index.kind: 'IMI2x16,Flat': expected a number from 1 to 10 in IMI2x16"),
        ("index.alias=5", "index.alias: '5': expected a name of letters, digits, - and _, not latest, a number or v1"),
        ("index.alias=v5", "index.alias: 'v5': expected a name"),
        ("encoder.name=", "encoder.name: '': expected a name, found empty text"),
        ("data.path=' '", "data.path: ' ': expected a name, found empty text"),
        ("objective.lambdas={'': 1}", "objective.lambdas: {'': 1}: expected a name, found empty text"),
        ("objective.anchor_sets=['']", "objective.anchor_sets: ['']: expected a name, found empty text"),
        ("index.model=a/b", "index.model: 'a/b': expected a name without / : @ % ? #, or nothing"),
    ],
)
def test_malformed_values_are_refused_in_one_line(assignment: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(sets=[assignment])
    assert str(error.value).startswith(line) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "encoding", ["punycode", "idna", "utf-16", "utf-7", "unicode_escape", "undefined", "rot13", "cp037"]
)
def test_an_encoding_that_does_not_keep_ascii_is_refused(encoding: str) -> None:
    with pytest.raises(ConfigError, match="expected a text encoding that keeps ASCII"):
        resolve(sets=[f"data.encoding={encoding}"])


@pytest.mark.parametrize(
    "value", ["utf-8", "utf-8-sig", "ascii", "latin-1", "cp1252", "shift_jis", "gb18030", "euc-jp"]
)
def test_encodings_of_text_files_are_accepted(value: str) -> None:
    assert resolve(sets=[f"data.encoding={value}"]).data.encoding == value


@pytest.mark.parametrize(
    "kind", ["IVF4096,PQ48", "IVF65536_HNSW32,PQ32x4fs", "OPQ16_64,IVF256,PQ16", "SQ8", "HNSW32", "LSH"]
)
def test_factory_strings_of_faiss_are_accepted(kind: str) -> None:
    assert resolve(sets=[f"index.kind={kind}"]).index.kind == kind


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    for name, section in SECTIONS.items():
        for path, field in knobs(section):
            if field.annotation in (int, float):
                extent = describe_range(field)
                assert ">" in extent and "<" in extent, f"{name}.{path}: {extent or 'no bounds'}"


def test_a_yaml_alias_bomb_is_refused() -> None:
    levels = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    Path("bomb.yaml").write_text("\n".join(["a0: &a0 [x, x, x]", *levels, "objective: {anchor_sets: *a11}"]) + "\n")
    with pytest.raises(ConfigError, match=r"^bomb.yaml:\d+: not valid YAML \(more than 20,000 values\)$"):
        resolve(params="bomb.yaml")


def test_a_wrong_value_names_the_file_it_was_read_from() -> None:
    Path("my.yaml").write_text("training: {epochs: 0}\nwalk: {hops: 5}\n")
    with pytest.raises(ConfigError) as error:
        resolve(params="my.yaml", sets=["walk.hops=-1"])
    assert str(error.value).splitlines() == [
        "walk.hops = -1: input should be greater than or equal to 0",
        "my.yaml: training.epochs: 0: expected a whole number from 1 to 100000, or auto",
    ]
    Path("my.yaml").write_text("training: {epochs: 2, warmup_epochs: 5}\n")
    with pytest.raises(ConfigError, match=r"^my.yaml: training: warmup_epochs = 5 exceeds epochs = 2"):
        resolve(params="my.yaml")
    with pytest.raises(ConfigError, match=r"^training: warmup_epochs = 5 exceeds epochs = 3"):
        resolve(params="my.yaml", sets=["training.epochs=3"])


def test_text_that_looks_like_another_type_is_kept_by_a_parameter_file() -> None:
    for text in ("yes", "1e5", "010", "1:30", "2024-02-30", "null", "~", "0x10", "a: b", "[x", "#x y", "é"):
        config = resolve(params=None).model_copy(update={"data": resolve().data.model_copy(update={"path": text})})
        Path("again.yaml").write_text(to_yaml(config))
        assert resolve(params="again.yaml").data.path == text


def test_every_wrong_value_gets_a_line() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(sets=["walk.hops=-1", "walk.restart=2"])
    assert [line.split(" = ")[0] for line in str(error.value).splitlines()] == ["walk.hops", "walk.restart"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("walk: {hops: [}", "f.yaml:1: not valid YAML"),
        ("- 1", "f.yaml: expected a mapping of sections, found a list"),
        ("walk: 3", "f.yaml: walk: expected a mapping, found 3"),
        ("walk: {hopss: 3}", "f.yaml: walk.hopss: unknown; did you mean hops?"),
    ],
)
def test_broken_parameter_files_are_refused(text: str, line: str) -> None:
    Path("f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=line.replace("[", r"\[")):
        resolve(params="f.yaml")


def test_a_missing_file_and_an_unknown_preset_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        resolve(params="nowhere.yaml")
    with pytest.raises(ConfigError, match="did you mean demo?"):
        resolve(preset="dmeo")


def test_a_section_from_kfp_has_floats_for_integers() -> None:
    section = parse_section("walk", {"hops": 400.0, "restart": 0.8, "top_k": 2.0})
    assert (section.hops, section.top_k) == (400, 2)  # type: ignore[attr-defined]
    assert isinstance(section.hops, int)  # type: ignore[attr-defined]
    base = parse_section("base", {"clusters": {"size": 8.0}})
    assert base.clusters.size == 8 and isinstance(base.clusters.size, int)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean hops"):
        parse_section("walk", {"hop": 1.0})


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve().walk.hops = 3  # type: ignore[misc]


def test_every_knob_has_help_and_source() -> None:
    for name, section in SECTIONS.items():
        for path, field in knobs(section):
            assert field.description and extra(field, "source"), f"{name}.{path}"


def test_ranges_are_described() -> None:
    fields = SECTIONS["walk"].model_fields
    assert describe_range(fields["restart"]) == "> 0, <= 1"
    assert describe_range(SECTIONS["encoder"].model_fields["pooling"]) == "auto | mean | cls"


def test_a_preset_extends_another_and_overrides_it() -> None:
    paper, titles, full = (resolve(preset=name) for name in ("paper", "lf-wikiseealsotitles-320k", "lf-wikipedia-500k"))
    assert titles.training == paper.training and titles.pruning == paper.pruning
    assert (titles.encoder.max_length, full.encoder.max_length) == (32, 128)
    assert (full.scoring.propensity_a, full.scoring.propensity_b) == (0.5, 0.4)
    assert paper.pruning.rule == "threshold" and paper.pruning.threshold == 0 and not paper.objective.symmetric
    assert paper.objective.graph_negatives == 0
    assert (paper.training.batch_size, paper.training.epochs, paper.training.lr) == (1024, 300, 2e-4)


def test_published_figures_are_those_of_the_paper() -> None:
    from ramen.ablation.published import FILE, published
    from ramen.ablation.study import list_studies, read_study

    found = published("LF-WikiSeeAlsoTitles-320K")
    assert found["RAMEN ICLR T1", "RAMEN(ANCE)"]["p_at_1"] == 35.2
    assert found["RAMEN ICLR T1", "ANCE"]["psp_at_5"] == 28.7
    assert found["OAK", "OAK"]["p_at_1"] == 33.71
    assert published("LF-Wikipedia-500K")["RAMEN ICLR T14", "RAMEN(NGAME)"]["p_at_1"] == 85.9
    assert published("unknown") == {}
    assert published("LF-WikiSeeAlsoTitles-320K", "T5 design")["RAMEN ICLR", "no pruning"]["p_at_1"] == 31.3
    known = {row.split(",")[1] for row in FILE.read_text(encoding="utf-8").splitlines()}
    for name in list_studies():
        assert set(read_study(name).published) <= known, name


def test_an_encoding_that_python_does_not_know_is_refused() -> None:
    assert resolve(sets=["data.encoding=latin-1"]).data.encoding == "latin-1"
    with pytest.raises(ConfigError, match=r"data.encoding: no encoding 'klingon'; utf-8 and latin-1"):
        resolve(sets=["data.encoding=klingon"])
