"""Datasets loaded from folders, DataFrames and lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import MultiLabelBinarizer

import ramen
from ramen.data.dataset import Dataset
from ramen.errors import ConfigError, DataError
from ramen.stages import run_stage

TEXTS = ["mail client", "mail server", "text editor", "web server", "small editor"]
LABELS = [["mail", "client"], ["mail", "server"], ["editor"], ["server"], ["editor"]]
SPLIT = ["train", "train", "train", "train", "test"]


def matrices(dataset: Dataset) -> dict[str, np.ndarray]:
    found = {name: getattr(dataset, name) for name in ("y_train", "y_test", "filter_train", "filter_test")}
    for name, anchors in dataset.anchor_sets.items():
        found |= {f"{name}/train": anchors.train, f"{name}/labels": anchors.labels}
    return {name: matrix.toarray() for name, matrix in found.items()}


def assert_same(a: Dataset, b: Dataset) -> None:
    for part in ("train", "test", "labels"):
        assert getattr(a, part) == getattr(b, part)
    assert {name: anchors.texts for name, anchors in a.anchor_sets.items()} == {
        name: anchors.texts for name, anchors in b.anchor_sets.items()
    }
    found, expected = matrices(a), matrices(b)
    assert found.keys() == expected.keys()
    for name, matrix in found.items():
        np.testing.assert_array_equal(matrix, expected[name], name)


def test_import_loads_no_heavy_module() -> None:
    heavy = ["torch", "mlflow", "faiss", "pandas", "transformers", "sentence_transformers"]
    code = f"import ramen, sys; print([name for name in {heavy} if name in sys.modules], 'train' in dir(ramen))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


def test_public_names_are_importable() -> None:
    for name in ramen.__all__:
        assert getattr(ramen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ramen.trian  # noqa: B018


def test_lists_give_the_matrices_of_scikit_learn() -> None:
    dataset = ramen.load_dataset(TEXTS, LABELS, split=SPLIT)
    binarizer = MultiLabelBinarizer()
    expected = binarizer.fit_transform(LABELS)
    assert dataset.labels.texts == list(binarizer.classes_)
    np.testing.assert_array_equal(dataset.y_train.toarray(), expected[:4])
    np.testing.assert_array_equal(dataset.y_test.toarray(), expected[4:])
    assert dataset.train.texts == TEXTS[:4] and dataset.test.texts == TEXTS[4:]


@pytest.mark.parametrize("ids", [None, ["a", "b", "c", "d", "e"]])
def test_frame_gives_the_dataset_of_its_lists(ids: list[str] | None) -> None:
    frame = pd.DataFrame({"text": TEXTS, "labels": LABELS, "split": SPLIT})
    for by_id in (frame.set_axis(ids), frame.assign(id=ids)) if ids else (frame,):
        assert_same(ramen.load_dataset(by_id), ramen.load_dataset(TEXTS, LABELS, split=SPLIT, ids=ids))


def test_frame_read_from_parquet_is_accepted(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": TEXTS, "labels": LABELS, "split": SPLIT})
    frame.to_parquet(tmp_path / "data.parquet")  # lists come back as arrays
    assert_same(ramen.load_dataset(pd.read_parquet(tmp_path / "data.parquet")), ramen.load_dataset(frame))


def test_labels_may_be_given_by_id_position_or_text() -> None:
    texts = {10: "client", 20: "editor", 30: "mail", 40: "server", 50: "unused"}
    by_text = ramen.load_dataset(TEXTS, LABELS, split=SPLIT, label_texts=list(texts.values()))
    ids, positions = (
        {text: name for name, text in enumerate_} for enumerate_ in (texts.items(), enumerate(texts.values()))
    )
    by_id = ramen.load_dataset(TEXTS, [[ids[label] for label in row] for row in LABELS], split=SPLIT, label_texts=texts)
    by_position = ramen.load_dataset(
        TEXTS,
        [np.array([positions[label] for label in row]) for row in LABELS],
        split=SPLIT,
        label_texts=list(texts.values()),
    )
    assert by_id.labels.uids == ["10", "20", "30", "40", "50"]
    assert by_id.labels.texts == by_position.labels.texts == by_text.labels.texts == list(texts.values())
    for other in (by_id, by_position):
        np.testing.assert_array_equal(other.y_train.toarray(), by_text.y_train.toarray())


@pytest.mark.parametrize(
    "documents",
    [
        {0: ["internet", "communication"], 4: ["text"], 3: "internet"},
        [(0, "internet"), (0, "communication"), (4, "text"), (3, "internet")],
        pd.DataFrame({"row": [0, 0, 4, 3], "topic": ["internet", "communication", "text", "internet"]}),
    ],
    ids=["mapping", "pairs", "frame"],
)
def test_edges_may_be_a_mapping_pairs_or_a_frame(documents: Any) -> None:
    graphs = {"topic": {"documents": documents, "labels": {"editor": "text"}}}
    anchors = ramen.load_dataset(TEXTS, LABELS, split=SPLIT, graphs=graphs).anchor_sets["topic"]
    assert anchors.texts.texts == ["communication", "internet", "text"]
    np.testing.assert_array_equal(anchors.train.toarray(), [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(anchors.labels.toarray(), [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    assert anchors.test is not None
    np.testing.assert_array_equal(anchors.test.toarray(), [[0, 0, 1]])


def test_random_split_has_the_given_share_and_depends_on_the_seed() -> None:
    texts, labels = [f"text {i}" for i in range(50)], [["a"], ["b"]] * 25
    first = ramen.load_dataset(texts, labels, test_fraction=0.3)
    assert first.shape == (35, 15, 2)
    assert first.test == ramen.load_dataset(texts, labels, test_fraction=0.3).test
    assert first.test != ramen.load_dataset(texts, labels, test_fraction=0.3, seed=1).test


def test_documents_that_are_labels_are_filtered() -> None:
    texts = ["mail", *TEXTS[1:]]
    dataset = ramen.load_dataset(texts, [["client"], *LABELS[1:]], split=SPLIT)
    assert dataset.filter_train[0].indices.tolist() == [dataset.labels.texts.index("mail")]
    assert not ramen.load_dataset(texts, [["client"], *LABELS[1:]], split=SPLIT, filter_self="none").filter_train.nnz


def test_folder_gives_the_dataset_of_ingest(tiny_xc_folder: Path, tmp_path: Path) -> None:
    data = {"source": "xc", "path": str(tiny_xc_folder)}
    run_stage("ingest", sections={"data": data}, outputs={"dataset": tmp_path / "dataset"})
    dataset = ramen.load_dataset(tiny_xc_folder)
    assert_same(dataset, Dataset.read(tmp_path / "dataset"))
    assert_same(dataset, ramen.load_dataset(tmp_path / "dataset"))
    with pytest.raises(ConfigError, match="is a finished dataset"):
        ramen.load_dataset(tmp_path / "dataset", max_documents=5)


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"text": TEXTS, "labels": LABELS} | columns)


def topics(**sides: Any) -> dict[str, Any]:
    return {"graphs": {"topic": sides}, "split": SPLIT}


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (frame(labels=["a", *LABELS[1:]]), {}, "row 0 [labels]: expected a list of labels, found 'a'"),
        (frame(text=[None, *TEXTS[1:]]), {}, "row 0 [text]: expected a text, found"),
        (frame(split=["train", "dev", *SPLIT[2:]]), {}, "row 1 [split]: expected train or test, found 'dev'"),
        (frame(id=[1, 2, 2, 3, 4]), {}, "row 2 [id]: 2 identifies row 1 too"),
        (frame().rename(columns={"labels": "tags"}), {}, "no column 'labels'; its columns are text, tags"),
        (frame(labels=[[1]] * 5), {}, "row 0 [labels]: expected label texts, found 1; or give label_texts"),
        (frame(), {"label_texts": {"mial": "mail"}}, "label 'mail' is not in label_texts; did you mean mial?"),
        (frame(), {"split": SPLIT}, "split: a DataFrame has a column of this kind"),
        (frame(split=["train"] * 5), {}, "none of the 0 test documents has a label"),
        (TEXTS, {"labels": LABELS[:3]}, "labels: 3 entries for 5 texts"),
        (TEXTS, {}, "expected the labels of each text, found none"),
        (TEXTS, {"labels": LABELS, **topics(documents=[(9, "a")])},
         "graphs['topic']['documents'], edge 0: no document has the id 9"),
        (TEXTS, {"labels": LABELS, **topics(documents=["ab"])}, "edge 0: expected a pair (item, anchor text), found"),
        (TEXTS, {"labels": LABELS, **topics(labels={"editr": ["a"]})}, "did you mean editor?"),
        (TEXTS, {"labels": LABELS, **topics(tests={})}, "expected a mapping with the keys documents, labels or both"),
        (TEXTS, {"labels": LABELS, "graphs": {"a/b": {"labels": {}}}}, "expected a name of letters, digits, _ and -"),
    ],
)  # fmt: skip
def test_error_of_invalid_data_names_the_row(source: Any, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises((DataError, ConfigError)) as error:
        ramen.load_dataset(source, **arguments)
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"sed": 1}, "data.sed: unknown; did you mean seed?"),
        ({"test_fraction": 2}, "data.test_fraction = 2"),
        ({"max_documents": 3}, "data.max_documents: has no effect on data in memory"),
    ],
)
def test_unknown_and_invalid_knobs_are_refused(knobs: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        ramen.load_dataset(TEXTS, LABELS, **knobs)
    assert expected in str(error.value)


def test_arguments_for_data_in_memory_are_refused_with_a_path(tiny_xc_folder: Path) -> None:
    with pytest.raises(ConfigError, match="graphs: has no effect on the data at"):
        ramen.load_dataset(tiny_xc_folder, graphs={})
