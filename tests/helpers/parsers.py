"""Parsers of user files and values as functions of bytes, for property tests and fuzzing.

On any bytes a parser returns or raises a RamenError whose lines are printable. `make fuzz` runs

    python tests/helpers/parsers.py [--seconds N] [--findings DIR] [TARGET ...]

which searches for counterexamples with atheris (libFuzzer with coverage of Python code) and writes them to DIR/TARGET.
Add a test for each.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

MEMORY_MB = 2048
"""A target that uses more memory ends the search."""
SECONDS_PER_INPUT = 10


def accept(parse: Callable[[Path, bytes], object], folder: Path, data: bytes) -> None:
    """Parse `data`; raise unless the parser succeeds or raises a RamenError with printable lines."""
    from ramen.errors import RamenError, printable

    try:
        parse(folder, data)
    except RamenError as error:
        lines = str(error).split("\n")
        assert len(lines) <= 20 and all(line == printable(line) and line.strip() for line in lines), lines


def _write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def yaml_file(folder: Path, data: bytes) -> object:
    from ramen.yamlfile import read_yaml

    return read_yaml(_write(folder, "any.yaml", data))


def parameters(folder: Path, data: bytes) -> object:
    from ramen.config import resolve, to_yaml

    config = resolve(params=_write(folder, "params.yaml", data))
    again = resolve(params=_write(folder, "again.yaml", to_yaml(config).encode()))
    assert again == config
    return config


def assignment(folder: Path, data: bytes) -> object:
    from ramen.config import resolve

    return resolve(sets=[data.decode("utf-8", "surrogateescape")])


def study(folder: Path, data: bytes) -> object:
    from ramen.ablation.study import read_study

    return read_study(str(_write(folder, "study.yaml", data)), ["links"])


def text_matrix(folder: Path, data: bytes) -> object:
    return _matrix(_write(folder, "m.txt", data))


def packed_matrix(folder: Path, data: bytes) -> object:
    return _matrix(_write(folder, "m.npz", data))


def archive_of_arrays(folder: Path, data: bytes) -> object:
    """Parse an archive of five arrays, separated by 0xffff in `data`: random bytes are rarely an archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, part in zip(("format", "shape", "indices", "indptr", "data"), data.split(b"\xff\xff"), strict=False):
            archive.writestr(f"{name}.npy", part)
    return _matrix(_write(folder, "m.npz", buffer.getvalue()))


def _matrix(path: Path) -> object:
    from ramen.data.sources.lines import Defects
    from ramen.data.sources.matrices import read_matrix

    defects = Defects()
    matrix = read_matrix(path, defects)
    defects.raise_if_any()
    assert matrix.has_sorted_indices and (matrix.data == 1).all()
    assert not matrix.nnz or 0 <= matrix.indices.min() <= matrix.indices.max() < matrix.shape[1]
    return matrix


def pairs(folder: Path, data: bytes) -> object:
    from ramen.data.sources.lines import Defects
    from ramen.data.sources.matrices import read_pairs

    defects = Defects()
    found = read_pairs(_write(folder, "pairs.txt", data), (10, 10), defects)
    defects.raise_if_any()
    return found


def documents(folder: Path, data: bytes) -> object:
    """Parse a folder of the source `xc` whose JSON files all have this content."""
    from ramen.data.sources.xc import read

    for name in ("trn.json", "tst.json", "lbl.json"):
        _write(folder, name, data)
    dataset = read(_data_section("xc", folder))
    for text in (*dataset.train.texts, *dataset.train.uids):
        text.encode()
    return dataset


def raw_texts(folder: Path, data: bytes) -> object:
    """Parse a folder of the source `xc` whose raw texts and groups all have this content."""
    from ramen.data.sources.xc import read

    (folder / "raw_data").mkdir(exist_ok=True)
    for name in ("raw_data/train.raw.txt", "raw_data/test.raw.txt", "raw_data/label.raw.txt", "trn_groups.txt"):
        _write(folder, name, data)
    for name in ("trn_X_Y.txt", "tst_X_Y.txt"):
        _write(folder, name, b"1 1\n0:1\n")
    return read(_data_section("xc", folder))


def packages(folder: Path, data: bytes) -> object:
    from ramen.data.sources.packages import read_packages

    return read_packages(_write(folder, "Packages", data))


def snapshot(folder: Path, data: bytes) -> object:
    from ramen.data.sources.packages import read_packages

    return read_packages(_write(folder, "debian.jsonl", data))


def _data_section(source: str, folder: Path) -> object:
    from ramen.config import parse_section

    return parse_section("data", {"source": source, "path": str(folder), "text": "title"})


SEEDS: dict[str, list[bytes]] = {
    "yaml_file": [b"a: &x [1, 2.5e-3, yes]\nb: {c: *x}\n", b"!!int '1'\n", b'"\\u0041"'],
    "parameters": [b"walk: {hops: 3, restart: 0.5}\ntraining:\n  epochs: auto\n", b"index: {gate: {p_at_1: 0}}\n"],
    "assignment": [b"walk.hops=3", b"data.path=a", b"objective.lambdas.a.b=1e-2", b"index.kind=IVF16,PQ8x4"],
    "study": [b"title: t\nrows:\n  - {name: a, set: [training.lr=1]}\n  - {name: b, set: [], against: a}\n"],
    "text_matrix": [b"2 3\n0:1 2:0.5\n\n", b"1 1\n0:1e3\n"],
    "packed_matrix": [],
    "archive_of_arrays": [],
    "pairs": [b"1 2\n3,4\n\n"],
    "documents": [b'{"uid": "a", "title": "x", "content": "y", "target_ind": [0], "target_rel": [1.0]}\n'],
    "raw_texts": [b"a->mail\n", b"mail client\n"],
    "packages": [
        b"Package: a\nVersion: 1:2~3-4\nDepends: b (>= 1) | c, d\nDescription: x\n y\nTag: e::{f,g}, h::i\n\n"
    ],
    "snapshot": [
        b'{"name":"a","source":"a","description":"","depends":[],"recommends":["b"],"suggests":[],"tags":["x::y"]}\n'
    ],
}
TARGETS: dict[str, Callable[[Path, bytes], object]] = {name: globals()[name] for name in SEEDS}
"""Name -> parser of bytes; it may write files under the folder."""


def write_seeds(name: str, folder: Path) -> None:
    """Write valid inputs of a target, the start of the search."""
    import numpy as np
    import scipy.sparse as sp

    seeds = list(SEEDS[name])
    if name in ("packed_matrix", "archive_of_arrays"):
        buffer = io.BytesIO()
        sp.save_npz(buffer, sp.csr_matrix(np.eye(2, 3, dtype=np.float32)), compressed=False)
        with zipfile.ZipFile(buffer) as archive:
            arrays = [archive.read(f"{part}.npy") for part in ("format", "shape", "indices", "indptr", "data")]
        seeds = [buffer.getvalue()] if name == "packed_matrix" else [b"\xff\xff".join(arrays)]
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)


def _search(name: str, arguments: list[str]) -> None:
    """Search with atheris; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["ramen", "yaml"]):
        pass
    folder = Path(tempfile.mkdtemp(prefix="ramen-fuzz-"))
    atheris.Setup([name, *arguments], lambda data: accept(TARGETS[name], folder, data))
    atheris.Fuzz()


def main() -> int:
    """Search each target in a separate process; return 1 if a counterexample was found, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), metavar="DIR")
    parser.add_argument("--search", metavar="TARGET", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default all")
    options, rest = parser.parse_known_args()
    if options.search:
        _search(options.search, rest)
    broken = []
    for name in options.targets or TARGETS:
        folder = options.findings / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as corpus:
            write_seeds(name, Path(corpus))
            limits = [
                f"-max_total_time={options.seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={SECONDS_PER_INPUT}",
                "-max_len=4096", "-verbosity=0", f"-artifact_prefix={folder}/",
            ]  # fmt: skip
            command = [sys.executable, __file__, "--search", name, *limits, corpus]
            search = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if search.returncode:
                broken.append(name)
                print(search.stderr[-4000:], file=sys.stderr)
        print(f"{name}: {'FAILED, see ' + str(folder) if name in broken else 'passed'}", flush=True)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
