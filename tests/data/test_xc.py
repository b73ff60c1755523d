"""Source `xc`: folders in the layouts of the Extreme Classification Repository."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen import config
from ramen.data.dataset import PLACEHOLDER, Dataset
from ramen.data.sources import fingerprint, xc
from ramen.data.sources import lines as lines_module
from ramen.data.subset import hide_labels
from ramen.errors import DataError


def make_settings(folder: Path, **values: object) -> config.DataConfig:
    return config.DataConfig.model_validate({"source": "xc", "path": str(folder), **values})


def equal(left: sp.csr_matrix, right: sp.csr_matrix) -> bool:
    return left.shape == right.shape and (left != right).nnz == 0


def error_lines(error: pytest.ExceptionInfo[DataError]) -> list[str]:
    return str(error.value).split("\n")


def write_json(folder: Path, *, content: bool = True) -> Path:
    """Write two training documents, one test document and three labels, the last of them unused."""
    folder.mkdir()
    documents = {
        "trn.json": [("a", "Alpha", [0]), ("b", "Beta", [1, 0])],
        "tst.json": [("c", "Gamma", [1])],
        "lbl.json": [("x", "Ex", None), ("y", "Why", None), ("z", "Zed", None)],
    }
    for name, rows in documents.items():
        lines = []
        for uid, title, targets in rows:
            item = {"uid": uid, "title": title, **({"content": f"all about {title}"} if content else {})}
            if targets is not None:
                item |= {"target_ind": targets, "target_rel": [0.5] * len(targets)}
            lines.append(json.dumps(item) + "\n")
        with gzip.open(folder / f"{name}.gz", "wt", encoding="utf-8") as stream:
            stream.writelines(lines)
    return folder


def test_written_dataset_round_trips(tiny_dataset: Dataset, xc_folder: Path) -> None:
    found = xc.read(make_settings(xc_folder))
    for name in ("train", "test", "labels"):
        assert getattr(found, name) == getattr(tiny_dataset, name)
    for name in ("y_train", "y_test", "filter_train", "filter_test"):
        assert equal(getattr(found, name), getattr(tiny_dataset, name)), name
    assert list(found.anchor_sets) == ["category", "links"]
    for name, anchors in tiny_dataset.anchor_sets.items():
        read = found.anchor_sets[name]
        assert read.texts == anchors.texts
        assert equal(read.train, anchors.train) and equal(read.labels, anchors.labels)
        assert equal(read.test, anchors.test)


def test_matrix_with_misspelt_anchor_set_name_is_warned_of(xc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = list(xc.read(make_settings(xc_folder)).anchor_sets)
    assert capsys.readouterr().err == ""
    (xc_folder / "links_train_X_Y.txt").write_text("60 3\n")
    (xc_folder / "links_renee_trn_X_Y.txt").write_text("a linker's predictions")
    assert list(xc.read(make_settings(xc_folder)).anchor_sets) == sets
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and warnings[0].startswith(
        f"warning: {xc_folder}/links_train_X_Y.txt: not read; expected NAME_trn"
    )


def test_misplaced_or_incomplete_anchor_set_is_warned_of(xc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = list(xc.read(make_settings(xc_folder)).anchor_sets)
    raw = xc_folder / "raw_data"
    (raw / "sessions.raw.txt").write_text("one\ntwo\n")
    (raw / "clicks_trn_X_Y.txt").write_text("60 2\n")
    assert list(xc.read(make_settings(xc_folder)).anchor_sets) == sets
    incomplete = f"{raw}/sessions.raw.txt: not read; found neither sessions_trn_X_Y nor sessions_lbl_X_Y in {xc_folder}"
    misplaced = f"{raw}/clicks_trn_X_Y.txt: not read; move matrices of anchor sets from raw_data to its parent folder"
    assert capsys.readouterr().err.splitlines() == [f"warning: {misplaced}", f"warning: {incomplete}"]


def test_byte_order_mark_is_skipped(xc_folder: Path, tiny_dataset: Dataset) -> None:
    for name in ("raw_data/train.raw.txt", "trn_X_Y.txt"):
        file = xc_folder / name
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    found = xc.read(make_settings(xc_folder))
    assert found.train == tiny_dataset.train and equal(found.y_train, tiny_dataset.y_train)


def test_training_groups_round_trip_and_stay_whole_in_a_subset(xc_folder: Path, tmp_path: Path) -> None:
    assert xc.read(make_settings(xc_folder)).groups is None
    sites = [f"site {i // 7}" for i in range(60)]
    (xc_folder / "trn_groups.txt").write_text("\n".join(sites) + "\n")
    whole = xc.read(make_settings(xc_folder))
    assert whole.groups is not None and (np.diff(whole.groups) != 0).sum() == len(set(sites)) - 1
    whole.write(tmp_path / "dataset")
    np.testing.assert_array_equal(Dataset.read(tmp_path / "dataset").groups, whole.groups)
    part = xc.read(make_settings(xc_folder, max_documents=40))
    row = {uid: i for i, uid in enumerate(whole.train.uids)}
    assert part.groups is not None and 0 < len(part.train) < 40
    chosen, sizes = np.unique(part.groups, return_counts=True)
    np.testing.assert_array_equal(sizes, np.bincount(whole.groups)[chosen], "groups stay whole")
    np.testing.assert_array_equal(part.groups, [whole.groups[row[uid]] for uid in part.train.uids])


def test_test_groups_stay_aligned_with_documents(xc_folder: Path, tmp_path: Path) -> None:
    assert xc.read(make_settings(xc_folder)).test_groups is None
    numbers = np.repeat(range(7), [1, 4, 2, 5, 3, 1, 4])
    sites = {f"test-{i}": f"site {9 - group}" for i, group in enumerate(numbers)}
    (xc_folder / "tst_groups.txt").write_text("\n".join(sites.values()) + "\n")
    whole = xc.read(make_settings(xc_folder))
    assert whole.groups is None, "the two files are independent"
    whole.write(tmp_path / "dataset")
    part = xc.read(make_settings(xc_folder, max_documents=40))
    for dataset in (whole, Dataset.read(tmp_path / "dataset"), part, hide_labels(whole, 0.3, seed=1)):
        assert dataset.test_groups is not None
        pairs = {(sites[uid], group) for uid, group in zip(dataset.test.uids, dataset.test_groups, strict=True)}
        assert len(pairs) == len({site for site, _ in pairs}) == len({group for _, group in pairs})
    assert 0 < len(part.test) < 20
    sizes = [list(sites.values()).count(sites[uid]) for uid in part.test.uids]
    assert sizes == [[sites[uid] for uid in part.test.uids].count(sites[uid]) for uid in part.test.uids], "whole groups"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("trn", "a\nb\n", "trn_groups.txt: expected a line for each of 60 training documents, found 2; line i is"),
        ("trn", "a\n" * 8 + "\n" + "a\n" * 51, "trn_groups.txt:9: expected the name of a group, found an empty line"),
        ("tst", "a\n" * 60, "tst_groups.txt: expected a line for each of 20 test documents, found more; line i is"),
    ],
)
def test_broken_groups_are_refused(xc_folder: Path, file: str, text: str, expected: str) -> None:
    (xc_folder / f"{file}_groups.txt").write_text(text)
    with pytest.raises(DataError) as caught:
        xc.read(make_settings(xc_folder))
    assert expected in str(caught.value)


def test_json_layout_and_text_fields_by_folder_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_json(tmp_path / "LF-Things")
    full = xc.read(make_settings(folder))
    fields = "texts are title and content (data.text=auto: no 'Titles' in the folder's name)"
    assert capsys.readouterr().err == f"{folder}: {fields}\n"
    assert full.train.texts == ["Alpha all about Alpha", "Beta all about Beta"]
    assert full.y_train.toarray().tolist() == [[1, 0, 0], [1, 1, 0]], "labels come from the lines of lbl.json"
    assert full.filter_train.nnz == full.filter_test.nnz == 0
    full.write(tmp_path / "dataset")
    assert Dataset.read(tmp_path / "dataset").train.titles == full.train.titles == ["Alpha", "Beta"]
    assert full.train.select([1]).names == ["Beta"]
    assert xc.read(make_settings(folder, text="title")).train.texts == ["Alpha", "Beta"]
    titles = write_json(tmp_path / "LF-ThingsTitles-3")
    assert xc.read(make_settings(titles)).test.texts == ["Gamma"]
    assert "texts are title (data.text=auto: 'Titles' in the folder's name)" in capsys.readouterr().err
    assert xc.read(make_settings(titles, text="title+content")).test.texts == ["Gamma all about Gamma"]


def test_dexml_layout_and_renee_filter_names_are_read(tiny_dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for name, texts in (("trn_X", tiny_dataset.train), ("tst_X", tiny_dataset.test), ("Y", tiny_dataset.labels)):
        (tmp_path / "raw" / f"{name}.txt").write_text("\n".join(texts.texts) + "\n")
    sp.save_npz(tmp_path / "Y.trn.npz", tiny_dataset.y_train * 3)
    sp.save_npz(tmp_path / "Y.tst.npz", tiny_dataset.y_test)
    (tmp_path / "tst_filter_labels.txt").write_text("2 3\n")
    found = xc.read(make_settings(tmp_path))
    assert found.train.uids[:2] == ["train:0", "train:1"] and found.train.texts == tiny_dataset.train.texts
    assert equal(found.y_train, tiny_dataset.y_train)
    assert list(zip(*found.filter_test.nonzero(), strict=True)) == [(2, 3)]


def test_non_latin_and_arrow_texts_round_trip(xc_folder: Path, tiny_dataset: Dataset) -> None:
    file = xc_folder / "raw_data" / "label.raw.txt"
    lines = file.read_text().split("\n")
    lines[0], lines[1], lines[2] = "l0->ラーメン と 餃子", "l1->a -> b\tc", "l2->line\u2028separator"
    file.write_text("\n".join(lines), encoding="utf-8")
    found = xc.read(make_settings(xc_folder)).labels
    assert found.texts[:3] == ["ラーメン と 餃子", "a -> b\tc", "line\u2028separator"]
    assert found.uids[:2] == ["l0", "l1"]


def test_latin1_needs_data_encoding(xc_folder: Path) -> None:
    file = xc_folder / "raw_data" / "test.raw.txt"
    data = file.read_bytes().split(b"\n")
    data[1] = "test-1->caf\xe9".encode("latin-1")
    file.write_bytes(b"\n".join(data))
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    assert error_lines(error) == [f"{file}:2: expected utf-8, found byte 0xe9 at column 12; set data.encoding=latin-1"]
    assert xc.read(make_settings(xc_folder, encoding="latin-1")).test.texts[1] == "café"
    file.write_bytes("test-0->a".encode("utf-16"))
    with pytest.raises(DataError, match=r":1: expected utf-8, found byte 0xff at column 1; save it as UTF-8"):
        xc.read(make_settings(xc_folder))


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "set")
    (folder / "trn.json.gz").rename(folder / "trn.json")
    assert xc.read(make_settings(folder)).train.uids == ["a", "b"]


def test_json_objects_without_uid_are_numbered(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "set")
    (folder / "trn.json.gz").unlink()
    (folder / "trn.json").write_text('{"uid": null, "title": "A"}\n{"uid": null, "title": "B", "target_ind": [0]}\n')
    assert xc.read(make_settings(folder)).train.uids == ["train:0", "train:1"]


def test_empty_texts_become_placeholders_and_empty_anchors_are_dropped(xc_folder: Path, tiny_dataset: Dataset) -> None:
    raw = xc_folder / "raw_data"
    lines = (raw / "test.raw.txt").read_text().split("\n")
    lines[4] = "test-4->"
    (raw / "test.raw.txt").write_text("\n".join(lines))
    anchors = tiny_dataset.anchor_sets["category"].texts
    (raw / "category.raw.txt.gz").unlink()
    rows = [f"{uid}->{anchors.texts[i] if i != 2 else ''}" for i, uid in enumerate(anchors.uids)]
    (raw / "category.raw.txt").write_text("\n".join(rows) + "\n")
    found = xc.read(make_settings(xc_folder))
    assert found.test.texts[4] == PLACEHOLDER
    kept = found.anchor_sets["category"]
    assert anchors.uids[2] not in kept.texts.uids and len(kept.texts) == len(anchors) - 1
    columns = [0, 1, 3, 4, 5]
    assert equal(kept.labels, tiny_dataset.anchor_sets["category"].labels[:, columns])


def test_linker_predictions_and_features_are_ignored(xc_folder: Path) -> None:
    for name in ("category_renee_trn_X_Y.npz", "category_renee_lbl_X_Y.npz", "trn_X_Xf.txt", "lbl_X_Y.txt"):
        (xc_folder / name).write_text("whatever")
    assert xc.anchor_set_names(xc_folder) == ["category", "links"]
    assert list(xc.read(make_settings(xc_folder)).anchor_sets) == ["category", "links"]


def test_subset_is_smaller_consistent_and_deterministic(xc_folder: Path, tiny_dataset: Dataset) -> None:
    one, two = (xc.read(make_settings(xc_folder, max_documents=30, seed=3)) for _ in range(2))
    assert len(one.train) + len(one.test) == 30 and one.train == two.train
    assert xc.read(make_settings(xc_folder, max_documents=30, seed=4)).train != one.train
    whole = dict(zip(tiny_dataset.train.uids, tiny_dataset.y_train.toarray(), strict=True))
    for uid, row in zip(one.train.uids, one.y_train.toarray(), strict=True):
        expected = {tiny_dataset.labels.uids[i] for i in whole[uid].nonzero()[0]}
        assert {one.labels.uids[i] for i in row.nonzero()[0]} == expected
    assert ((one.y_train.sum(0) + one.y_test.sum(0)) > 0).all(), "every remaining label has a document"
    for anchors in one.anchor_sets.values():
        assert ((anchors.train.sum(0) + anchors.labels.sum(0)) > 0).all()


def replace_line(file: Path, number: int, line: str) -> None:
    lines = file.read_text().split("\n")
    lines[number - 1] = line
    file.write_text("\n".join(lines))


def drop_last(file: Path) -> None:
    file.write_text("\n".join(file.read_text().split("\n")[:-2]) + "\n")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: replace_line(f / "raw_data/train.raw.txt", 5, "no arrow here"),
     "{f}/raw_data/train.raw.txt:5: expected `identifier->text` as on the other lines, found no arrow"),
    (lambda f: replace_line(f / "raw_data/label.raw.txt", 9, "label-3->again"),
     "{f}/raw_data/label.raw.txt:9 [uid]: 'label-3' is already on line 4; make the identifiers unique"),
    (lambda f: replace_line(f / "raw_data/label.raw.txt", 9, "->no name"),
     "{f}/raw_data/label.raw.txt:9 [uid]: expected an identifier, found none"),
    (lambda f: (f / "raw_data/test.raw.txt").unlink(),
     "{f}: no file with the test texts; expected one of tst.json, raw_data/test.raw.txt, raw/tst_X.txt (or .gz)"),
    (lambda f: (f / "tst_X_Y.txt").unlink(),
     "{f}: no file with the test labels; expected one of tst_X_Y.npz, tst_X_Y.txt, Y.tst.npz (or .gz)"),
    (lambda f: drop_last(f / "raw_data/train.raw.txt"),
     "{f}/trn_X_Y.txt: expected 59 rows (texts of train.raw.txt) and 30 columns (label texts), found 60 and 30; "
     "row i of every file must be the same item"),
    (lambda f: drop_last(f / "raw_data/label.raw.txt"),
     "{f}/trn_X_Y.txt: expected 60 rows (texts of train.raw.txt) and 29 columns (label texts), found 60 and 30; "
     "row i of every file must be the same item"),
    (lambda f: replace_line(f / "trn_X_Y.txt", 4, "31:1"),
     "{f}/trn_X_Y.txt:4: expected columns below 30 (from the header), found 31; columns start at zero"),
    (lambda f: replace_line(f / "links_lbl_X_Y.txt", 3, "4:1 2:1 4:1"),
     "{f}/links_lbl_X_Y.txt:3: duplicate column 4 in this row; list each column once"),
    (lambda f: (f / "links_lbl_X_Y.txt").unlink(),
     "{f}: anchor set links has no links_lbl_X_Y.txt (or .npz); a set needs train and label edges; write an empty "
     "matrix if there are none"),
    (lambda f: (f / "raw_data/links.raw.txt.gz").unlink(),
     "{f}: anchor set links has no texts; expected raw_data/links.raw.txt or links.raw.txt (or .gz)"),
    (lambda f: (f / "filter_labels_test.txt").write_text("20 0\n"),
     "{f}/filter_labels_test.txt:1: expected a row below 20 and a column below 30, found 20 0; indices start at "
     "zero"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "expected"), BROKEN)
def test_each_defect_names_file_and_line(xc_folder: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(xc_folder)
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    assert expected.format(f=xc_folder) in error_lines(error)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"uid": "b", "title": "B", "target_ind": [3]}',
         ":2 [target_ind]: expected labels 0 to 2 (lines of the label file), found 3"),
        ('{"uid": "b", "title": "B", "target_ind": [1, 1]}', ":2 [target_ind]: duplicate label; list each label once"),
        ('{"uid": "b", "title": "B", "target_ind": [99999999999999999999]}',
         ":2 [target_ind]: expected a list of integers, and as many numbers in `target_rel`"),
        ('{"uid": "b", "title": "B", "target_ind": ["1"]}',
         ":2 [target_ind]: expected a list of integers, and as many numbers in `target_rel`"),
        ('{"uid": "b", "title": "B", "target_ind": [1], "target_rel": 5}',
         ":2 [target_ind]: expected a list of integers, and as many numbers in `target_rel`"),
        ('{"uid": "b", "title": "B", "target_idx": [1], "target_rel": [1.0]}',
         ":2: expected `target_ind` next to `target_rel`, found uid, title, target_idx, target_rel"),
        ('{"uid": "b", "title": "B", "target_ind": [1, 2], "target_rel": [1.0, NaN]}',
         ":2 [target_rel]: expected a value of 0 or more, found nan; leave out false pairs, or set them to 0"),
        ('{"uid": "b", "title": "B", "target_ind": [1, 2], "target_rel": [-1, 0]}',
         ":2 [target_rel]: expected a value of 0 or more, found -1; leave out false pairs, or set them to 0"),
        ('{"uid": "b"}', ":2 [title]: expected a JSON object with a string `title`"),
        ('{"uid": ', ":2: not a JSON object (Expecting value: line 1 column 9 (char 8))"),
    ],
)  # fmt: skip
def test_broken_json_line_names_line_and_field(tmp_path: Path, line: str, expected: str) -> None:
    folder = write_json(tmp_path / "set")
    (folder / "trn.json.gz").unlink()
    (folder / "trn.json").write_text('{"uid": "a", "title": "A", "target_ind": [0]}\n' + line + "\n")
    with pytest.raises(DataError) as error:
        xc.read(make_settings(folder))
    assert error_lines(error) == [f"{folder}/trn.json{expected}"]


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; set data\.path"):
        xc.read(make_settings(tmp_path / "nowhere"))


def test_fingerprint_changes_with_the_folder(xc_folder: Path) -> None:
    before = fingerprint(make_settings(xc_folder))
    assert before == fingerprint(make_settings(xc_folder))
    file = xc_folder / "trn_X_Y.txt"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    touched = fingerprint(make_settings(xc_folder))
    (xc_folder / "new.txt").write_text("x")
    assert len({before, touched, fingerprint(make_settings(xc_folder))}) == 3


def test_max_documents_above_the_size_changes_nothing(xc_folder: Path) -> None:
    """Labels without documents are kept too."""
    whole, limited = (xc.read(config.DataConfig(source="xc", path=str(xc_folder), max_documents=n)) for n in (0, 80))
    assert whole.labels == limited.labels and whole.shape == limited.shape


INVALID_JSON = [
    ('{"uid": ["a"], "title": "A"}', "[uid]: expected a string or an integer, found ['a']"),
    ('{"uid": {"a": 1}, "title": "A"}', "[uid]: expected a string or an integer, found {'a': 1}"),
    ('{"uid": true, "title": "A"}', "[uid]: expected a string or an integer, found True"),
    ('{"uid": "a", "title": ["A"]}', "[title]: expected a JSON object with a string `title`"),
    ('{"uid": "a", "title": "A", "content": {"b": 1}}', "[content]: expected a string, found {'b': 1}"),
    (
        '{"uid": "a", "title": "\\ud800"}',
        r"[title]: unpaired surrogate \ud800; write the whole surrogate pair,",
    ),
    ('{"uid": "\\udcff", "title": "A"}', r"[uid]: unpaired surrogate \xff"),
    ('{"uid": "a", "title": "A", "target_ind": [1e400]}', "[target_ind]: expected a list of integers"),
    (
        '{"uid": "a", "title": "A", "target_ind": [0], "target_rel": [NaN]}',
        "[target_rel]: expected a value of 0 or more",
    ),
    ('{"a":' * 50_000, ": not a JSON object (nested too deeply)"),
    ("9" * 5000, ": not a JSON object (Exceeds the limit"),
]


@pytest.mark.parametrize(("line", "expected"), INVALID_JSON)
def test_json_of_unexpected_types_names_line_and_field(tmp_path: Path, line: str, expected: str) -> None:
    folder = write_json(tmp_path / "set")
    (folder / "trn.json.gz").unlink()
    (folder / "trn.json").write_text('{"uid": "z", "title": "Z", "target_ind": [1]}\n' + line + "\n")
    with pytest.raises(DataError) as error:
        xc.read(make_settings(folder))
    assert [found[: len(f"{folder}/trn.json:2")] for found in error_lines(error)] == [f"{folder}/trn.json:2"]
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("".join(f"train-{i}->caf\xe9\n" for i in range(60)).encode("latin-1"), ":1: expected utf-8, found byte 0xe9"),
        ("".join(f"train-{i}->a\n" for i in range(60)).encode("utf-16"), ":1: expected utf-8, found byte 0xff"),
        (
            "".join(f"train-{i}->a\n" for i in range(60)).encode("utf-16-be"),
            ":1: expected utf-8 text, found a NUL char",
        ),
    ],
)
def test_file_in_another_encoding_is_one_defect(xc_folder: Path, content: bytes, expected: str) -> None:
    file = xc_folder / "raw_data" / "train.raw.txt"
    file.write_bytes(content)
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    assert len(error_lines(error)) == 1 and str(error.value).startswith(f"{file}{expected}")


def test_indented_json_file_is_one_defect(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "set")
    (folder / "lbl.json.gz").unlink()
    (folder / "lbl.json").write_text(json.dumps([{"uid": i, "title": "A"} for i in range(30)], indent=1))
    with pytest.raises(DataError) as error:
        xc.read(make_settings(folder))
    assert len(error_lines(error)) == 1 and str(error.value).endswith("; write one object per line")


@pytest.mark.parametrize("name", ["train", "test", "label"])
def test_empty_file_is_named(xc_folder: Path, name: str) -> None:
    file = xc_folder / "raw_data" / f"{name}.raw.txt"
    file.write_bytes(b"")
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    assert error_lines(error) == [f"{file}: expected a text on each line, found an empty file"]


def test_folder_may_contain_file_names_of_any_bytes(xc_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(make_settings(xc_folder))
    with open(os.fsencode(xc_folder) + b"/caf\xe9.txt", "w") as stream:
        stream.write("notes")
    with open(os.fsencode(xc_folder) + b"/\x1b[31m\n\xe9_trn_X_Y.txt", "w") as stream:
        stream.write("notes")
    xc.read(make_settings(xc_folder))
    assert fingerprint(make_settings(xc_folder)) != before
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and r"/\x1b[31m\n\xe9_trn_X_Y.txt: not read;" in warnings[0]


def test_unreadable_file_is_one_defect(xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(lines_module, "open_binary", refuse)
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    names = ("trn", "tst")
    assert error_lines(error) == [f"{xc_folder}/{name}_X_Y.txt: cannot be read (Permission denied)" for name in names]


@pytest.mark.parametrize(
    ("file", "lines", "expected"),
    [
        ("raw_data/train.raw.txt", 61, "expected 60 lines (rows of trn_X_Y.txt), found more; row i of every"),
        ("raw_data/label.raw.txt", 31, "expected 30 lines (columns of trn_X_Y.txt), found more; row i of every"),
        ("raw_data/links.raw.txt.gz", 32, "expected 31 lines (columns of links_trn_X_Y.txt), found more; row i of"),
        ("trn_groups.txt", 61, "expected a line for each of 60 training documents, found more; line i is"),
    ],
)
def test_text_file_is_read_up_to_the_line_limit_of_its_matrix(
    xc_folder: Path, file: str, lines: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(io.BytesIO):
        left = lines

        def readline(self, *_: object) -> bytes:
            self.left -= 1
            assert self.left >= 0, "at most one line beyond the limit is read"
            return b"name\n"

    opened = lines_module.open_binary
    (xc_folder / file).touch()
    monkeypatch.setattr(
        lines_module, "open_binary", lambda path: Endless() if path == xc_folder / file else opened(path)
    )
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    assert len(error_lines(error)) == 1 and str(error.value).startswith(f"{xc_folder / file}: {expected}")


def test_text_file_is_not_read_if_the_matrix_header_is_invalid(xc_folder: Path) -> None:
    (xc_folder / "trn_X_Y.txt").write_text("no header\n")
    (xc_folder / "raw_data" / "train.raw.txt").write_text("\n" * 100)
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    header = "expected a header `rows columns`, found 'no header'"
    assert error_lines(error) == [f"{xc_folder}/trn_X_Y.txt:1: {header}"]


FILES = ("raw_data/train.raw.txt", "trn_X_Y.npz", "links_lbl_X_Y.txt", "filter_labels_test.txt", "trn_groups.txt")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "a named pipe"),
        (Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link to nowhere (No such file or directory)"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_special_file_is_named_and_never_opened(
    xc_folder: Path, name: str, make: Callable[[Path], object], found: str
) -> None:
    (xc_folder / name).unlink(missing_ok=True)
    make(xc_folder / name)
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    expected = f"expected a file, found {found}; replace it by the file, or remove it"
    assert error_lines(error) == [f"{xc_folder / name}: {expected}"]


def test_file_with_carriage_returns_only_is_refused(xc_folder: Path) -> None:
    file = xc_folder / "raw_data" / "train.raw.txt"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(DataError) as error:
        xc.read(make_settings(xc_folder))
    expected = "expected lines that end with a line feed, found only carriage returns; convert the line endings"
    assert error_lines(error) == [f"{file}: {expected}"]


def test_subset_without_training_documents_names_max_documents(xc_folder: Path) -> None:
    (xc_folder / "trn_groups.txt").write_text("a\n" * 60)
    with pytest.raises(DataError, match="data.max_documents = 40 keeps 0 training and 20 test documents, since groups"):
        xc.read(make_settings(xc_folder, max_documents=40))
