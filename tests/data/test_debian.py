"""Debian package metadata: parsing, snapshots, split, filters, anchor sets."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ramen import config
from ramen.data.dataset import Dataset
from ramen.data.filters import apply_filter_rule
from ramen.data.sources import debian, fingerprint
from ramen.data.sources.lines import Defects
from ramen.data.sources.packages import (
    Package,
    fetch,
    parse_packages,
    parse_relations,
    parse_tags,
    read_packages,
    version_key,
)
from ramen.errors import DataError

PACKAGES = """\
Package: zeta
Source: zed (1.2)
Version: 1.2+b1
Architecture: amd64
Depends: libc6 (>= 2.34), alpha:any | beta (= 1), python3:any (>= 3.9~) [amd64] <!nocheck>,
 virtual-thing
Pre-Depends: dpkg (>= 1.15.6~)
Suggests: beta, nowhere, zeta
Recommends: alpha | gamma (<< 2:3)
Description: last of the letters
 A long text with Depends: beta on a line of its own.
 .
 More.
Tag: devel::lang:perl, implemented-in::{c,c++}, role::program,
 special::not-yet-tagged, uitoolkit::TODO

Package: alpha
Version: 1:0.9
Description: old

Package: alpha
Version: 1:0.10~rc1
Description: first of the letters
Suggests: zeta

Package: beta
Version: 1
Description:

Package: libc6
Version: 2.36
Description: C library
"""


def make_package(name: str, source: str | None = None, **values: list[str]) -> Package:
    lists = {key: values.get(key, []) for key in ("depends", "recommends", "suggests", "tags")}
    return Package(name, source or name, f"the {name} tool", **lists)


def make_archive(*packages: Package) -> dict[str, Package]:
    return {item.name: item for item in sorted(packages, key=lambda item: item.name)}


def labels_by_document(dataset: Dataset, part: str, kind: str = "y") -> dict[str, set[str]]:
    """Return document -> labels, by uid."""
    matrix, texts = getattr(dataset, f"{kind}_{part}"), getattr(dataset, part)
    return {
        uid: {dataset.labels.uids[column] for column in matrix.indices[matrix.indptr[i] : matrix.indptr[i + 1]]}
        for i, uid in enumerate(texts.uids)
    }


def make_sibling_archive(count: int = 60) -> dict[str, Package]:
    """Make `count` sources of three packages each that all suggest packages of other sources."""
    return make_archive(
        *(
            make_package(f"s{i}{end}", f"s{i}", suggests=[f"s{(i * 7 + 1) % count}", f"s{(i + 13) % count}-doc"],
                    depends=[f"s{(i + 2) % count}"], tags=[f"role::r{i % 3}"])
            for i in range(count)
            for end in ("", "-doc", "-dev")
        )
    )  # fmt: skip


def test_parse_packages_reads_fields_and_keeps_newest_version() -> None:
    defects = Defects()
    found = {p.name: p for p in parse_packages(enumerate(PACKAGES.split("\n"), 1), Path("Packages"), defects)}
    assert not defects.found
    assert list(found) == ["alpha", "beta", "libc6", "zeta"], "sorted by name, one version each"
    assert found["alpha"].text == "alpha: first of the letters", "1:0.10~rc1 is newer than 1:0.9"
    assert found["beta"].text == "beta"
    zeta = found["zeta"]
    assert zeta.source == "zed" and zeta.description == "last of the letters"
    assert zeta.depends == ["alpha", "beta", "dpkg", "libc6", "python3", "virtual-thing"]
    assert zeta.recommends == ["alpha", "gamma"] and zeta.suggests == ["beta", "nowhere", "zeta"]
    assert "implemented-in::c" in zeta.tags and "implemented-in::c++" in zeta.tags


def test_relation_and_tag_fields_are_parsed() -> None:
    assert parse_relations("a|b,c(>=1)", "", "b:amd64 [linux-any]") == ["a", "b", "c"]
    assert parse_tags("a::{b,c}, d::e,\n f::g:h") == ["a::b", "a::c", "d::e", "f::g:h"]
    assert debian.describe_tag("implemented-in::python") == "implemented-in: python"
    assert debian.describe_tag("devel::lang:perl") == "devel: lang perl"


ORDERED = (
    "1.0~beta1",
    "1.0~rc1",
    "1.0",
    "1.0-0.1",
    "1.0-1~bpo1",
    "1.0-1",
    "1.0-1+b1",
    "1.0a",
    "1.0+git",
    "1.9",
    "1.10",
)


def test_versions_sort_like_dpkg() -> None:
    shuffled = [*ORDERED[::2], "1:0.1", *ORDERED[1::2]]
    assert sorted(shuffled, key=version_key) == [*ORDERED, "1:0.1"]
    if shutil.which("dpkg"):
        for left, right in pairwise(ORDERED):
            subprocess.run(["dpkg", "--compare-versions", left, "lt", right], check=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Package: a\nnonsense\n", ":2: expected `Field: value`, found 'nonsense'"),
        (" continued\n", ":1: a continuation line without a field before it"),
        ("Version: 1\n", ":1: expected a field `Package` in this paragraph"),
    ],
)
def test_broken_packages_file_names_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "Packages"
    file.write_text(text)
    with pytest.raises(DataError) as error:
        read_packages(file)
    assert str(error.value) == f"{file}{expected}"


def test_fetch_is_deterministic_and_reads_back(tmp_path: Path) -> None:
    plain, gz, xz = tmp_path / "Packages", tmp_path / "Packages.gz", tmp_path / "x_Packages.xz"
    plain.write_text(PACKAGES)
    gz.write_bytes(gzip.compress(PACKAGES.encode()))
    xz.write_bytes(lzma.compress(PACKAGES.encode()))
    snapshots = []
    for i, source in enumerate((plain, gz, xz)):
        path = tmp_path / str(i) / f"debian{i}.jsonl.gz"
        assert fetch(path, source) == 4
        snapshots.append(path.read_bytes())
        assert read_packages(path) == read_packages(source)
    assert snapshots[0] == snapshots[1] == snapshots[2]
    assert snapshots[0][4:8] == bytes(4), "the gzip header has no time"
    assert not list(tmp_path.rglob(".*")), "no temporary file is left"
    settings = config.DataConfig(path=str(tmp_path / "0" / "debian0.jsonl.gz"))
    assert debian.fetch_if_missing(settings) is False
    assert len(fingerprint(settings)) == 64


def test_failed_fetch_keeps_old_snapshot(tmp_path: Path) -> None:
    path, broken = tmp_path / "debian.jsonl.gz", tmp_path / "Packages"
    path.write_bytes(b"old")
    broken.write_text("nonsense\n")
    for source in (broken, tmp_path / "absent"):
        with pytest.raises(DataError):
            fetch(path, source)
    assert path.read_bytes() == b"old"


def test_missing_or_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "debian.jsonl.gz"
    settings = config.DataConfig(path=str(path))
    for action in (debian.read, fingerprint):
        with pytest.raises(DataError) as error:
            action(settings)
        assert str(error.value) == f"{path}: no such file or folder; run `ramen fetch`"
    path.write_bytes(gzip.compress(b'{"name": "a"}\n'))
    with pytest.raises(DataError) as error:
        debian.read(settings)
    assert str(error.value) == (
        f"{path}:1: not a package record in JSON (source: expected a string, found None); "
        "remove the file and run `ramen fetch`"
    )


def test_build_dataset_makes_documents_labels_and_anchor_sets() -> None:
    items = parse_packages(enumerate(PACKAGES.split("\n"), 1), Path("Packages"), Defects())
    dataset = debian.build_dataset({item.name: item for item in items}, config.DataConfig(test_fraction=1e-9))
    found = labels_by_document(dataset, "train")
    assert found == {"alpha": {"zeta"}, "zeta": {"alpha", "beta"}}, "no self pairs, no packages outside the archive"
    assert dataset.labels.uids == ["alpha", "beta", "zeta"]
    assert dataset.train.texts == ["alpha: first of the letters", "zeta: last of the letters"]
    sets = dataset.anchor_sets
    assert sets["depends"].texts.uids == ["alpha", "beta", "libc6"], "packages outside the archive are no anchors"
    assert sets["depends"].train.toarray().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert sets["rdepends"].texts.uids == ["zeta"]
    assert sets["rdepends"].labels.toarray().tolist() == [[1], [1], [0]]
    assert sets["debtags"].texts.texts == [
        "devel: lang perl", "implemented-in: c", "implemented-in: c++", "role: program",
    ]  # fmt: skip


def test_split_keeps_siblings_together() -> None:
    packages = make_sibling_archive()
    for seed in range(5):
        dataset = debian.build_dataset(packages, config.DataConfig(seed=seed, test_fraction=0.3))
        train = {packages[uid].source for uid in dataset.train.uids}
        test = {packages[uid].source for uid in dataset.test.uids}
        assert train and test and not train & test
        assert len(train | test) == 60 and 5 < len(test) < 35
        assert dataset.groups is not None, "held-out documents are split off by group"
        sources = [packages[uid].source for uid in dataset.train.uids]
        assert len(set(zip(sources, dataset.groups, strict=True))) == len(set(sources)) == len(set(dataset.groups))
        assert dataset.test_groups is not None, "standard errors are clustered by source package"
        sources = [packages[uid].source for uid in dataset.test.uids]
        assert len(set(zip(sources, dataset.test_groups, strict=True))) == len(test) == len(set(dataset.test_groups))


def test_split_of_a_source_does_not_depend_on_other_sources() -> None:
    packages = make_sibling_archive()
    settings = config.DataConfig(test_fraction=0.3)
    whole = set(debian.build_dataset(packages, settings).test.uids)
    half = debian.build_dataset(packages, config.DataConfig(test_fraction=0.3, max_documents=90))
    assert set(half.test.uids) <= whole and not set(half.train.uids) & whole
    assert len(half.train) + len(half.test) == 90
    assert {packages[uid].source for uid in (*half.train.uids, *half.test.uids)} < {p.source for p in packages.values()}


def test_subset_keeps_only_used_labels_and_anchors() -> None:
    dataset = debian.build_dataset(make_sibling_archive(), config.DataConfig(max_documents=30))
    assert (dataset.y_train.sum(1) > 0).all() and (dataset.y_test.sum(1) > 0).all()
    assert ((dataset.y_train.sum(0) + dataset.y_test.sum(0)) > 0).all()
    for anchors in dataset.anchor_sets.values():
        assert anchors.test is not None
        assert ((anchors.train.sum(0) + anchors.labels.sum(0)) > 0).all()


def test_reciprocal_pairs_are_filtered_for_test_documents_only() -> None:
    """Training document B has label A: the reversed edge leaks label B of test document A."""
    packages = make_sibling_archive(40)
    dataset, counts = apply_filter_rule(debian.build_dataset(packages, config.DataConfig(test_fraction=0.4)), "auto")
    train, filters = labels_by_document(dataset, "train"), labels_by_document(dataset, "test", "filter")
    labels = set(dataset.labels.uids)
    expected = {a: ({a} | {b for b, targets in train.items() if a in targets}) & labels for a in dataset.test.uids}
    assert filters == expected
    assert any(found - {uid} for uid, found in filters.items())
    assert labels_by_document(dataset, "train", "filter") == {uid: {uid} & labels for uid in dataset.train.uids}
    assert counts.identity == "uid" and counts.reciprocal == sum(len(found - {uid}) for uid, found in filters.items())


def test_suggestions_are_not_edges() -> None:
    packages = make_sibling_archive()
    dataset = debian.build_dataset(packages, config.DataConfig())
    for kind, name in (("depends", "train"), ("rdepends", "train"), ("depends", "labels"), ("rdepends", "labels")):
        anchors = dataset.anchor_sets[kind]
        edges, texts = getattr(anchors, name), getattr(dataset, name)
        for row, column in zip(*edges.nonzero(), strict=True):
            ends = texts.uids[row], anchors.texts.uids[column]
            left, right = ends if kind == "depends" else reversed(ends)
            assert right in packages[left].depends


def test_archive_without_suggestions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "Packages"
    file.write_text("Package: a\nDescription: x\n")
    with pytest.raises(DataError, match="found 0 training and 0 test documents in 1 packages"):
        debian.read(config.DataConfig(path=str(file)))


def test_split_depends_only_on_the_seed() -> None:
    packages = make_sibling_archive()
    one, two, other = (debian.build_dataset(packages, config.DataConfig(seed=seed)) for seed in (1, 1, 2))
    assert one.test == two.test and np.array_equal(one.y_train.indices, two.y_train.indices)
    assert one.test != other.test


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": 1}, "name: expected a string, found 1"),
        ({"name": ""}, "name: expected a name, found an empty string"),
        ({"depends": "libc6"}, "depends: expected a list of strings, found 'libc6'"),
        ({"tags": [["a"]]}, "tags: expected a list of strings, found [['a']]"),
        ({"description": "\ud800"}, r"description: unpaired surrogate \ud800"),
    ],
)
def test_invalid_package_record_names_the_field(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    lists = {"depends": [], "recommends": [], "suggests": [], "tags": []}
    record = {"name": "a", "source": "a", "description": "", **lists}
    path = tmp_path / "debian.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | change) + "\n")
    with pytest.raises(DataError) as error:
        debian.read(config.DataConfig(path=str(path)))
    fix = "remove the file and run `ramen fetch`"
    assert str(error.value) == f"{path}:2: not a package record in JSON ({expected}); {fix}"


def test_fetch_refuses_to_overwrite_other_files(tmp_path: Path) -> None:
    packages = tmp_path / "Packages"
    packages.write_text("Package: a\n\nPackage: b\n")
    notes, snapshot = tmp_path / "notes.txt", tmp_path / "debian.jsonl.gz"
    notes.write_text("mine")
    for path in (notes, packages, tmp_path):
        with pytest.raises(DataError, match="refusing to overwrite: not a package snapshot; set another data.path"):
            fetch(path, packages)
    assert notes.read_text() == "mine" and packages.read_text().startswith("Package: a")
    assert fetch(snapshot, packages) == fetch(snapshot, packages) == 2
    snapshot.write_bytes(b"")
    assert fetch(snapshot, packages) == 2


def test_versions_of_any_length_sort() -> None:
    versions = ["1~1", "1", "1.2", "1.10", f"1.{'9' * 5000}", "²:1", "1:0", "10:0"]
    assert sorted(versions[:5], key=version_key) == versions[:5]
    assert version_key("10:0") > version_key("9:0") > version_key("²:1")


def test_snapshot_with_duplicate_package_is_refused(tmp_path: Path) -> None:
    line = {"name": "a", "source": "a", "description": "", "depends": [], "recommends": [], "suggests": [], "tags": []}
    path = tmp_path / "debian.jsonl"
    path.write_text(f"{json.dumps(line)}\n" * 2)
    with pytest.raises(DataError, match=r"debian.jsonl:2: not a package record in JSON \(name: duplicate 'a'\)"):
        debian.read(config.DataConfig(path=str(path)))


def test_fetch_never_opens_or_replaces_special_files(tmp_path: Path) -> None:
    packages, pipe, link = tmp_path / "Packages", tmp_path / "pipe", tmp_path / "link"
    packages.write_text("Package: a\n")
    os.mkfifo(pipe)
    link.symlink_to("nowhere")
    for path in (pipe, link):
        with pytest.raises(DataError, match="refusing to overwrite: not a package snapshot"):
            fetch(path, packages)
    with pytest.raises(DataError, match="pipe: expected a Packages file, found a named pipe; give another file"):
        fetch(tmp_path / "new.gz", pipe)
    with pytest.raises(DataError, match="pipe: data.source = debian reads a file, found a named pipe"):
        debian.read(config.DataConfig(path=str(pipe)))
