"""Shared fixtures: a small dataset with known structure, the same as files, and a tracking store."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.data.dataset import AnchorSet, Dataset, Texts

TOPICS = {
    "cooking": "flour oven pepper soup kettle butter",
    "sailing": "anchor mast harbour rope tide rudder",
    "astronomy": "comet orbit lens galaxy eclipse nebula",
    "gardening": "soil seed hedge compost pruning bulb",
    "chess": "bishop opening gambit rook endgame pawn",
    "weaving": "loom thread shuttle wool pattern dye",
}
PER_TOPIC, TRAIN, TEST = 5, 60, 20


def _binary(rows: Iterable[Iterable[int]], columns: int) -> sp.csr_matrix:
    rows = [sorted(set(row)) for row in rows]
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([column for row in rows for column in row], np.int32)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), columns))


def _documents(rng: np.random.Generator, count: int, words: list[list[str]]) -> tuple[list[str], list[list[int]]]:
    """Draw documents about one topic each, with one to three of its labels."""
    texts, labels = [], []
    for _ in range(count):
        topic = int(rng.integers(len(words)))
        chosen = rng.choice(PER_TOPIC, size=int(rng.integers(1, 4)), replace=False)
        extra = words[topic][int(rng.integers(PER_TOPIC + 1))]
        texts.append(f"notes about {' and '.join(words[topic][i] for i in chosen)} with {extra}")
        labels.append([topic * PER_TOPIC + int(i) for i in chosen])
    return texts, labels


@pytest.fixture
def tiny_dataset() -> Dataset:
    """The small dataset of `make_tiny_dataset`."""
    return make_tiny_dataset()


@pytest.fixture(scope="session")
def shared_dataset() -> Dataset:
    """The small dataset, shared by all tests of a session: do not modify it."""
    return make_tiny_dataset()


@pytest.fixture(scope="session")
def tiny_xc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dataset as a folder for the source `xc`, shared by all tests of a session: do not modify it."""
    return write_xc(make_tiny_dataset(), tmp_path_factory.mktemp("source") / "xc")


def make_tiny_dataset() -> Dataset:
    """Make 60 training documents, 20 test documents, 30 labels in 6 topics, and anchor sets `category` and `links`.

    The text of a label names one word, the text of a document the words of its labels. Anchors of `category` are
    topics; each anchor of `links` belongs to one label. Special cases:

    - the last label has no training document;
    - training document 0 is the same item as label 0 (a filtered self pair, not a positive);
    - the test pair of document 0 and the next label of its topic is filtered;
    - the last anchor of `links` is test document 0;
    - every tenth training document has one wrong link.
    """
    rng = np.random.default_rng(7)
    topics, words = list(TOPICS), [value.split() for value in TOPICS.values()]
    labels = [f"{topic} {word}" for topic, row in zip(topics, words, strict=True) for word in row[:PER_TOPIC]]
    train_texts, train = _documents(rng, TRAIN, words)
    test_texts, test = _documents(rng, TEST, words)
    last = len(labels) - 1
    train = [[label for label in row if label != last] or [last - 1] for row in train]
    train_texts[0], train[0], test[1] = labels[0], [1, 2], [last]
    test_texts[1] = f"notes about {words[-1][PER_TOPIC - 1]} with {words[-1][0]}"
    test_texts = [f"more {text}" if text in train_texts else text for text in test_texts]

    label_uids = [f"label-{i}" for i in range(len(labels))]
    train_uids = ["label-0", *(f"train-{i}" for i in range(1, TRAIN))]
    test_uids = [f"test-{i}" for i in range(TEST)]
    links = [[*row, (row[0] + 11) % last] if i % 10 == 9 else row for i, row in enumerate(train)]
    links[3] = [*links[3], len(labels)]
    own_page = [[i] for i in range(len(labels))]
    train_topics = [[row[0] // PER_TOPIC] for row in train]
    anchors = {
        "category": AnchorSet(
            Texts([f"category-{topic}" for topic in topics], [f"everything about {topic}" for topic in topics]),
            _binary(train_topics, len(topics)),
            _binary([[i // PER_TOPIC] for i in range(len(labels))], len(topics)),
            _binary([[row[0] // PER_TOPIC] for row in test], len(topics)),
        ),
        "links": AnchorSet(
            Texts(
                [*(f"page-{i}" for i in range(len(labels))), "test-0"], [*(f"{t} page" for t in labels), test_texts[0]]
            ),
            _binary(links, len(labels) + 1),
            _binary(own_page, len(labels) + 1),
            _binary(test, len(labels) + 1),
        ),
    }
    next_label = next(label for label in range(test[0][0] // PER_TOPIC * PER_TOPIC, last + 1) if label not in test[0])
    return Dataset(
        Texts(train_uids, train_texts),
        Texts(test_uids, test_texts),
        Texts(label_uids, labels),
        _binary(train, len(labels)),
        _binary(test, len(labels)),
        _binary([[0], *([] for _ in range(TRAIN - 1))], len(labels)),
        _binary([[next_label], *([] for _ in range(TEST - 1))], len(labels)),
        anchors,
    )


def write_xc(dataset: Dataset, folder: Path) -> Path:
    """Write a dataset as an Extreme Classification Repository folder (mapped raw texts, plain and gzipped)."""
    raw = folder / "raw_data"
    raw.mkdir(parents=True)
    for name, texts in (("train", dataset.train), ("test", dataset.test), ("label", dataset.labels)):
        lines = "".join(f"{uid}->{text}\n" for uid, text in zip(texts.uids, texts.texts, strict=True))
        (raw / f"{name}.raw.txt").write_text(lines, encoding="utf-8")
    _write_matrix(folder / "trn_X_Y.txt", dataset.y_train)
    _write_matrix(folder / "tst_X_Y.txt", dataset.y_test)
    for name, pairs in (("train", dataset.filter_train), ("test", dataset.filter_test)):
        rows, columns = pairs.nonzero()
        text = "".join(f"{row} {column}\n" for row, column in zip(rows, columns, strict=True))
        (folder / f"filter_labels_{name}.txt").write_text(text)
    for name, anchors in dataset.anchor_sets.items():
        for part, edges in (("trn", anchors.train), ("lbl", anchors.labels), ("tst", anchors.test)):
            if edges is not None:
                _write_matrix(folder / f"{name}_{part}_X_Y.txt", edges)
        lines = "".join(f"{uid}->{text}\n" for uid, text in zip(anchors.texts.uids, anchors.texts.texts, strict=True))
        with gzip.open(raw / f"{name}.raw.txt.gz", "wt", encoding="utf-8") as stream:
            stream.write(lines)
    return folder


def _write_matrix(path: Path, matrix: sp.csr_matrix) -> None:
    lines = [f"{matrix.shape[0]} {matrix.shape[1]}"]
    for row in range(matrix.shape[0]):
        columns = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
        lines.append(" ".join(f"{column}:1.0" for column in columns))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def xc_folder(tiny_dataset: Dataset, tmp_path: Path) -> Path:
    """`tiny_dataset` as a folder for the source `xc`."""
    return write_xc(tiny_dataset, tmp_path / "xc")


@pytest.fixture
def xc_writer() -> Callable[[Dataset, Path], Path]:
    """The function that writes a dataset as a folder for the source `xc`."""
    return write_xc


@pytest.fixture(scope="session")
def tracking_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty tracking database to copy: creating one takes seconds of migrations."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tracking_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create an empty tracking store in the working directory and make MLflow use it; pickles are forbidden."""
    import mlflow

    shutil.copy(tracking_template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield tmp_path / "mlflow.db"
    mlflow.set_tracking_uri(None)


@pytest.fixture(autouse=True)
def _isolate_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep checkpoints in the test's folder, and the caller's tracking environment out of the test."""
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "ramen-work"))
    for name in ("RAMEN_PARENT_RUN", "RAMEN_ARM", "KFP_RUN_ID", "DVC_STAGE", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
