"""Property tests: on any input a parser succeeds or raises a RamenError, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsers import TARGETS, accept, write_seeds

settings.register_profile(
    "parsers",
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PROFILE = settings.get_profile("parsers")


@contextmanager
def limit_memory(megabytes: int = 100) -> Iterator[None]:
    """Fail if Python and numpy allocate more memory than this at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes << 20, f"{peak >> 20} MB"


@pytest.mark.parametrize("target", TARGETS)
@settings(PROFILE)
@given(data=st.binary(max_size=200))
def test_parser_survives_any_bytes(target: str, data: bytes, tmp_path: Path) -> None:
    accept(TARGETS[target], tmp_path, data)


@pytest.mark.parametrize("target", TARGETS)
@settings(PROFILE)
@given(data=st.data())
def test_parser_survives_damaged_valid_files(target: str, data: st.DataObject, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    if not seeds.exists():
        seeds.mkdir()
        write_seeds(target, seeds)
    content = bytearray(data.draw(st.sampled_from(sorted(seeds.iterdir()))).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    accept(TARGETS[target], tmp_path, bytes(content))


NAMES = ["uid", "title", "content", "target_ind", "target_rel", "name", "source", "description", "depends", "tags",
         "recommends", "suggests"]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(["\ud800", "a", "", "\x1b[31m"]),
    st.sampled_from([10**30, -1, 2**63, 2**64, 1e308]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=8,
)
OBJECTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES))


@pytest.mark.parametrize("target", ["documents", "snapshot"])
@settings(PROFILE)
@given(lines=st.lists(OBJECTS | VALUES, min_size=1, max_size=4))
def test_json_readers_survive_any_json(target: str, lines: list[object], tmp_path: Path) -> None:
    accept(TARGETS[target], tmp_path, "\n".join(map(json.dumps, lines)).encode())


TOKENS = ["walk", "hops", "training", "epochs", "title", "rows", "name", "set", ": ", ":", "- ", "\n", "\n  ", "[", "]",
          "{", "}", ", ", "&a ", "*a", "!!int ", "!!timestamp ", "!!python/name:os.system ", "! ", "<<", "2024-02-30",
          "1e5", "1:30", "0x1F", "yes", "~", ".inf", "'", '"', "|", ">", "%YAML 9", "---", "#", "? ", "\t", "\\u0041",
          "\\ud800", "=", "9" * 5000]  # fmt: skip


@pytest.mark.parametrize("target", ["yaml_file", "parameters", "assignment", "study"])
@settings(PROFILE)
@given(tokens=st.lists(st.sampled_from(TOKENS), max_size=20))
def test_yaml_readers_survive_any_yaml(target: str, tokens: list[str], tmp_path: Path) -> None:
    prefix = "walk.hops=" if target == "assignment" else ""
    accept(TARGETS[target], tmp_path, (prefix + "".join(tokens)).encode())


@settings(PROFILE)
@given(
    tree=st.dictionaries(st.sampled_from(["walk", "training", "index", "data", "rows", "title"]) | st.text(), VALUES)
)
def test_configuration_survives_any_tree_of_values(tree: dict[str, object], tmp_path: Path) -> None:
    for target in ("parameters", "study"):
        accept(TARGETS[target], tmp_path, yaml.safe_dump(tree).encode("utf-8", "surrogatepass"))


ARRAYS = st.one_of(
    st.builds(
        lambda values, dtype: np.array(values).astype(dtype),
        st.lists(st.integers(-2, 4), max_size=5),
        st.sampled_from(["i4", ">i8", "u1", "u8", "f4", "f8", "f2", "c8", "?", "S3", "U2", "M8[s]", "m8[D]"]),
    ),
    st.sampled_from([np.array(b"csr"), np.array("csc"), np.array([b"coo"]), np.array(b"bsr"), np.zeros((2, 2)),
                     np.array(3), np.array([3, 3]), np.array([2**31 - 1, 20]), np.array([2**62, 1]), np.array([0, 0]),
                     np.array([2, 3], float), np.array([0, 1, 2, 2]), np.zeros(3, "i4,f4")]),
)  # fmt: skip
MEMBERS = ("format", "shape", "indices", "indptr", "data", "row", "col")


@settings(PROFILE, max_examples=150)
@given(arrays=st.fixed_dictionaries({"format": ARRAYS, "shape": ARRAYS}, optional=dict.fromkeys(MEMBERS[2:], ARRAYS)))
def test_npz_reader_survives_any_arrays(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    accept(TARGETS["packed_matrix"], tmp_path, buffer.getvalue())


@settings(PROFILE, max_examples=100)
@given(
    form=st.sampled_from(["csr", "csc", "coo"]),
    shape=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    first=st.lists(st.integers(-1, 4), max_size=6),
    second=st.lists(st.integers(-1, 6), max_size=6),
    values=st.lists(st.floats(width=32), max_size=6),
)
def test_npz_reader_survives_any_sparse_matrix(
    form: str, shape: tuple[int, int], first: list[int], second: list[int], values: list[float], tmp_path: Path
) -> None:
    names = ("row", "col") if form == "coo" else ("indices", "indptr")
    arrays = {"format": np.array(form.encode()), "shape": np.array(shape), "data": np.array(values, np.float32)}
    arrays |= {name: np.array(part, np.int32) for name, part in zip(names, (first, second), strict=True)}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    accept(TARGETS["packed_matrix"], tmp_path, buffer.getvalue())


CELLS = [
    "0:1",
    "1:2",
    "9:1",
    "1:nan",
    "1:1e999",
    "-1:1",
    "x",
    ":",
    " ",
    "1:.",
    "\t",
    "9" * 5000 + ":1",
    "0:" + "9" * 5000,
]


@settings(PROFILE)
@given(rows=st.lists(st.lists(st.sampled_from(CELLS))))
@pytest.mark.parametrize("header", ["2 3", "2147483647 20", "1 2147483647", "9" * 5000 + " 1", "-1 3", "2 3 4", ""])
def test_matrix_reader_survives_any_text(header: str, rows: list[list[str]], tmp_path: Path) -> None:
    with limit_memory():
        accept(TARGETS["text_matrix"], tmp_path, "\n".join([header, *map(" ".join, rows)]).encode())


@pytest.mark.parametrize(
    ("target", "data"),
    [
        ("yaml_file", b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12))),
        ("parameters", b"objective: {lambdas: {" + b"a: 1, " * 30_000),
        ("yaml_file", b"- " * 100_000), ("yaml_file", b"{" * 200_000), ("yaml_file", b"[1,\n" * 30_000),
        ("yaml_file", b'"\\' * 30_000), ("yaml_file", b"a: |\n" + b" \n" * 30_000), ("yaml_file", b"x" * 10**6),
        ("text_matrix", b"1 1\n0:" + b"1" * 10**6 + b"x\n"), ("text_matrix", b"1 1\n" + b"0:1 " * 250_000 + b"x"),
        ("text_matrix", b" " * 10**6), ("text_matrix", b"1" * 10**6 + b" 1"), ("pairs", b"1" * 10**6 + b" 1"),
        ("documents", b"[" * 10**6), ("documents", b'{"title":' * 10**5), ("documents", b"9" * 10**6),
        ("documents", b'{"title": "a", "target_ind": [' + b"9" * 4000 + b"]}"),
        ("snapshot", b"[" * 10**6), ("packages", b"Package: a\nTag: " + b"a{" * 10**5 + b"\n"),
        ("packages", b"Package: a\nVersion: " + b"1" * 10**5 + b"\n\nPackage: a\nVersion: " + b"\xc2\xb2:1\n"),
        ("packages", b"Package: a\nDescription: b\n" + b" c\n" * 10**5),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_large_input_is_parsed_in_little_memory(target: str, data: bytes, tmp_path: Path) -> None:
    with limit_memory():
        accept(TARGETS[target], tmp_path, data)


def test_endless_line_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramen.data.sources import lines

    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)
    path, defects = tmp_path / "m.txt.gz", lines.Defects()
    path.write_bytes(gzip.compress(b"0" * 100_000_000, 1))
    with limit_memory(20):
        assert list(lines.numbered_lines(path, defects)) == []
    assert str(defects.found[0]) == (
        f"{path}:1: expected lines of at most 1,048,576 bytes, found a longer one; check that it is a text file"
    )
