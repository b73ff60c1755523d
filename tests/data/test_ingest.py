"""Stage `ingest`: its artifact, its validation, and reproducible digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tzlocal

from ramen.artifacts import open_artifact
from ramen.config import DataConfig
from ramen.data import sources, validation
from ramen.data.dataset import PLACEHOLDER, AnchorSet, Dataset, Texts
from ramen.errors import DataError
from ramen.stages import run_stage
from ramen.tracking import NullTracker


class Recorder(NullTracker):
    """Records what a stage reports."""

    def __init__(self) -> None:
        self.seen_tags: dict[str, str] = {}
        self.files: set[str] = set()
        self.datasets: list[tuple[str, str, str]] = []

    def tags(self, values: Mapping[str, str]) -> None:
        self.seen_tags.update(values)

    def artifact(self, path: Path, folder: str = "") -> None:
        self.files |= {f"{folder}/{file.relative_to(path).as_posix()}" for file in path.rglob("*") if file.is_file()}

    def dataset(self, name: str, digest: str, source: str) -> None:
        self.datasets.append((name, digest, source))


@pytest.fixture(autouse=True)
def _set_work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "work"))


def ingest(folder: Path, out: Path, track: NullTracker | None = None, **values: Any) -> dict[str, float]:
    data = {"source": "xc", "path": str(folder), **values}
    return run_stage("ingest", sections={"data": data}, outputs={"dataset": out}, track=track)


@pytest.mark.slow
def test_ingest_writes_dataset_and_validation_report(
    tiny_dataset: Dataset, xc_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    track = Recorder()
    metrics = ingest(xc_folder, tmp_path / "dataset", track)
    artifact = open_artifact(tmp_path / "dataset", "dataset")
    found = Dataset.read(artifact.path)
    assert found.train == tiny_dataset.train and found.labels == tiny_dataset.labels
    assert (found.y_test != tiny_dataset.y_test).nnz == 0
    assert (artifact.path / "anchors" / "links" / "test.npz").is_file()
    assert found.anchor_sets["links"].test is None, "the anchors' ground truth is not read"
    assert metrics["documents"] == 60 and metrics["labels"] == 30
    assert metrics["labels_per_document"] == pytest.approx(tiny_dataset.y_train.nnz / 60)
    assert metrics["edges/links/train"] == tiny_dataset.anchor_sets["links"].train.nnz
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz_/") for name in metrics)
    assert artifact.counts["anchor_sets"]["category"]["anchors"] == 6
    page = (artifact.path / "validation" / "index.html").read_text()
    assert "relations" in page and "fa-check-circle" in page and "fa-times" not in page
    facts = json.loads((artifact.path / "validation" / "statistics.json").read_text())
    assert facts["labels"]["without_training_documents"] == int((tiny_dataset.y_train.sum(0) == 0).sum())
    assert {"validation/index.html", "validation/statistics.json"} <= track.files
    assert track.seen_tags == {"validation": "passed"}
    settings = DataConfig(source="xc", path=str(xc_folder))
    assert ("raw", sources.fingerprint(settings), str(xc_folder)) in track.datasets
    streams = capfd.readouterr()
    expected = "filtered pairs: 1 self (same uid), 0 reciprocal, 2 from the source\n"
    assert streams.out == "" and streams.err == expected, "Great Expectations prints nothing"
    assert artifact.counts["filtered_pairs"] == {"identity": "uid", "files": 2, "self_pairs": 1, "reciprocal": 0}


@pytest.mark.slow
def test_digest_does_not_depend_on_time_zone(xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest(xc_folder, tmp_path / "one")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Pacific/Honolulu")
        tzlocal.reload_localzone()
        ingest(xc_folder, tmp_path / "two")
    tzlocal.reload_localzone()
    one, two = (open_artifact(tmp_path / name, "dataset") for name in ("one", "two"))
    assert one.manifest["files"] == two.manifest["files"]
    assert one.digest == two.digest


def test_ingest_writes_nothing_for_broken_raw_data(xc_folder: Path, tmp_path: Path) -> None:
    (xc_folder / "trn_X_Y.txt").write_text("60 30\n")
    out = tmp_path / "out" / "dataset"
    with pytest.raises(DataError, match=r"trn_X_Y\.txt:1: header says 60 rows, found 0"):
        ingest(xc_folder, out)
    assert not out.parent.exists()


def test_failed_validation_writes_nothing_but_tracks_report(xc_folder: Path, tmp_path: Path) -> None:
    test = xc_folder / "raw_data" / "test.raw.txt"
    test.write_text(test.read_text().replace("test-7->", "train-5->"))
    out, track = tmp_path / "out" / "dataset", Recorder()
    with pytest.raises(DataError) as error:
        ingest(xc_folder, out, track)
    assert str(error.value) == (
        f"{test}: 1 test documents are also training documents (first: 'train-5'); remove them from one of the two"
    )
    assert not out.parent.exists()
    assert track.seen_tags == {"validation": "failed"} and "validation/index.html" in track.files


def test_warnings_do_not_fail_the_stage(xc_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = xc_folder / "raw_data" / "test.raw.txt"
    file.write_text(file.read_text().replace(next(line for line in file.read_text().split("\n")[3:4]), "test-3->"))
    labels = (xc_folder / "trn_X_Y.txt").read_text().split("\n")
    labels[8] = ""
    (xc_folder / "trn_X_Y.txt").write_text("\n".join(labels))
    track = Recorder()
    ingest(xc_folder, tmp_path / "dataset", track)
    assert capsys.readouterr().err.splitlines()[:-1] == [
        f"warning: {file}:4: empty text, replaced by {PLACEHOLDER}",
        f"warning: {xc_folder / 'trn_X_Y.txt'}: 1 documents have no label (first: row 8)",
    ]
    assert track.seen_tags == {"validation": "warnings"}
    assert open_artifact(tmp_path / "dataset", "dataset").counts["documents"] == 60
    facts = json.loads((tmp_path / "dataset" / "validation" / "statistics.json").read_text())
    assert facts["texts"]["texts/test"]["placeholders"] == 1


def make_unchecked_csr(indices: list[int], indptr: list[int], shape: tuple[int, int]) -> sp.csr_matrix:
    """Make a CSR matrix without scipy's checks."""
    matrix = sp.csr_matrix(shape, dtype=np.float32)
    matrix.indices, matrix.indptr = np.array(indices, np.int32), np.array(indptr, np.int32)
    matrix.data = np.ones(len(indices), np.float32)
    return matrix


def replace_links(dataset: Dataset, **changes: Any) -> Dataset:
    anchors: dict[str, AnchorSet] = dict(dataset.anchor_sets)
    anchors["links"] = replace(anchors["links"], **changes)
    return replace(dataset, anchor_sets=anchors)


def replace_text(texts: Texts, row: int, *, uid: str | None = None, text: str | None = None) -> Texts:
    uids, contents = list(texts.uids), list(texts.texts)
    uids[row] = uids[row] if uid is None else uid
    contents[row] = contents[row] if text is None else text
    return Texts(uids, contents)


ADD_PAIRS = "add some, or check the file of filtered pairs if there is one"
BROKEN: list[tuple[Callable[[Dataset], Dataset], list[str]]] = [
    (lambda p: replace(p, labels=replace_text(p.labels, 4, text=" \t")),
     ["texts/labels.parquet:5: expected a text, found none; write a placeholder"]),
    (lambda p: replace(p, train=replace_text(p.train, 2, uid="")),
     ["texts/train.parquet:3: expected an identifier, found none"]),
    (lambda p: replace(p, train=replace_text(p.train, 2, uid="train-9")),
     ["texts/train.parquet:3: duplicate identifier 'train-9'; make the identifiers of each file unique",
      "texts/train.parquet:10: duplicate identifier 'train-9'; make the identifiers of each file unique"]),
    (lambda p: replace(p, y_test=p.y_test[:-1]),
     ["labels/test.npz: expected 20 rows, one per text, found 19; row i must be text i"]),
    (lambda p: replace_links(p, labels=sp.csr_matrix((30, 7), dtype=np.float32)),
     ["anchors/links/labels.npz: expected 31 columns, one per text, found 7; column j must be text j"]),
    (lambda p: replace(p, filter_test=make_unchecked_csr([30], [0, 0, *[1] * 19], (20, 30))),
     ["filters/test.npz: 1 entries outside the 30 columns (first: row 2); check the indices"]),
    (lambda p: replace_links(p, train=make_unchecked_csr([3, 4, 3], [0, 0, 0, *[3] * 58], (60, 31))),
     ["anchors/links/train.npz: 1 repeated entries (first: row 3); list each column once per row"]),
    (lambda p: replace(p, y_train=p.y_train * 2),
     ["labels/train.npz: 110 values are not 1 (first: row 1); matrices are binary"]),
    (lambda p: replace(p, test=replace_text(p.test, 3, uid="train-1")),
     ["texts/test.parquet: 1 test documents are also training documents (first: 'train-1'); "
      "remove them from one of the two"]),
    (lambda p: replace(p, y_train=sp.csr_matrix((60, 30), dtype=np.float32)),
     ["labels/train.npz: no training document has an unfiltered label; " + ADD_PAIRS]),
    (lambda p: replace(p, y_test=sp.csr_matrix((20, 30), dtype=np.float32)),
     ["labels/test.npz: no test document has an unfiltered label; " + ADD_PAIRS]),
    (lambda p: replace(p, filter_train=p.y_train),
     ["labels/train.npz: no training document has an unfiltered label; " + ADD_PAIRS]),
    (lambda p: replace(p, filter_test=p.y_test),
     ["labels/test.npz: no test document has an unfiltered label; " + ADD_PAIRS]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "expected"), BROKEN)
def test_each_critical_rule_finds_its_defect(
    tiny_dataset: Dataset, tmp_path: Path, damage: Callable[[Dataset], Dataset], expected: list[str]
) -> None:
    report = validation.validate(damage(tiny_dataset), tmp_path / "validation")
    assert [str(defect) for defect in report.critical] == expected
    page = (tmp_path / "validation" / "index.html").read_text()
    assert "fa-times" in page, "the Data Docs show the failure"


@pytest.mark.slow
def test_test_documents_copied_from_training_are_a_warning(tiny_dataset: Dataset, tmp_path: Path) -> None:
    row = 5
    labels = tiny_dataset.y_test.tolil()
    labels[2] = tiny_dataset.y_train[row].toarray()
    copied = replace(
        tiny_dataset,
        test=replace_text(tiny_dataset.test, 2, text=tiny_dataset.train.texts[row]),
        y_test=sp.csr_matrix(labels),
    )
    before = validation.validate(tiny_dataset, tmp_path / "a")
    after = validation.validate(copied, tmp_path / "b")
    assert before.critical == after.critical == [] and before.warnings == []
    assert "1 test documents have the text of a training document (1 also its labels)" in str(after.warnings[0])


def test_duplicate_training_texts_are_a_warning(tiny_dataset: Dataset, tmp_path: Path) -> None:
    duplicated = replace(tiny_dataset, train=replace_text(tiny_dataset.train, 2, text=tiny_dataset.train.texts[5]))
    (warning,) = validation.validate(duplicated, tmp_path / "a").warnings
    assert "1 training documents repeat the text of another one; write one line per text" in str(warning)


def test_validation_counts_defects_beyond_the_first_twenty(tiny_dataset: Dataset, tmp_path: Path) -> None:
    empty = replace(tiny_dataset, labels=Texts(tiny_dataset.labels.uids, [PLACEHOLDER] * 30))
    warnings = validation.validate(empty, tmp_path / "a").warnings
    assert len(warnings) == 21 and "and 10 more defects of this kind" in str(warnings[-1])


def test_data_docs_contain_no_texts(tiny_dataset: Dataset, tmp_path: Path) -> None:
    secret = "a very private sentence"
    validation.validate(replace(tiny_dataset, train=replace_text(tiny_dataset.train, 1, text=secret)), tmp_path)
    assert all(secret not in page.read_text() for page in tmp_path.rglob("*.html"))


def test_source_table_matches_configuration() -> None:
    assert set(sources.SOURCES) == set(DataConfig.model_fields["source"].annotation.__args__)  # type: ignore[union-attr]
