from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ramen.artifacts import Artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Dataset
from ramen.encoder.loading import load_encoder
from ramen.errors import ArtifactError, RamenError
from ramen.index.build import build_index
from ramen.index.retriever import FACTS_FILE, INDEX_FILE, LABELS_FILE, Retriever, write_retriever
from ramen.serving.query import format_json, format_table

POINTS = {"east": (1, 0), "north": (0, 1), "west": (-1, 0), "northeast": (0.6, 0.8)}


class CompassEncoder:
    """Encodes four words, so that every cosine is known."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([POINTS[text] for text in texts], np.float32)


@pytest.fixture
def compass() -> Retriever:
    words = ["east", "north", "west"]
    return Retriever(
        CompassEncoder(), build_index(CompassEncoder().encode(words), IndexConfig(kind="flat")), ["E", "N", "W"], words
    )


@pytest.fixture
def saved(artifacts: dict[str, Artifact], tiny_dataset: Dataset, tmp_path: Path) -> Path:
    """A saved retriever of the labels of the tiny problem; its encoder is `artifacts["model"].path`."""
    folder = tmp_path / "retriever"
    folder.mkdir()
    model, labels = artifacts["model"], tiny_dataset.labels
    vectors = load_encoder(model.path, EncoderConfig()).encode(labels.texts)
    index = build_index(vectors, IndexConfig(kind="flat"))
    write_retriever(folder, index, labels.uids, labels.texts, encoder_files=model.manifest["files"], facts={})
    return folder


def test_hits_are_best_first_with_the_cosine(compass: Retriever) -> None:
    (hits,) = compass.query(["northeast"], 2)
    assert [(hit.uid, hit.text) for hit in hits] == [("N", "north"), ("E", "east")]
    assert [hit.score for hit in hits] == pytest.approx([0.8, 0.6])


def test_excluded_labels_are_replaced_by_the_next_best(compass: Retriever) -> None:
    answers = compass.query(["northeast", "northeast", "east"], 2, [("N",), (), ("E", "no such label")])
    assert [[hit.uid for hit in hits] for hits in answers] == [["E", "W"], ["N", "E"], ["N", "W"]]
    assert compass.query(["east"], 3, [("E", "N", "W")]) == [[]]


@pytest.mark.parametrize(("identity", "expected"), [("uid", ["N"]), ("text", ["E"]), ("", [])])
def test_own_labels_are_found_by_uid_or_text(compass: Retriever, identity: str, expected: list[str]) -> None:
    retriever = Retriever(compass.encoder, compass.index, compass.uids, compass.texts, identity)
    assert list(retriever.own_labels("N", " east ")) == expected


def test_large_k_returns_all_labels_and_k_below_one_is_refused(compass: Retriever) -> None:
    assert [hit.uid for hit in compass.query(["east"], 50)[0]] == ["E", "N", "W"]
    assert compass.query([], 3) == []
    with pytest.raises(RamenError, match="k = 0: expected at least 1"):
        compass.query(["east"], 0)


def test_equal_scores_are_in_label_order() -> None:
    words = ["east", "north", "east", "east"]
    retriever = Retriever(
        CompassEncoder(), build_index(CompassEncoder().encode(words), IndexConfig(kind="flat")), list("abcd"), words
    )
    assert [hit.uid for hit in retriever.query(["east"], 4)[0]] == ["a", "c", "d", "b"]


def test_label_table_of_different_size_is_refused() -> None:
    with pytest.raises(ArtifactError, match="index holds 1 labels, the label table 2"):
        Retriever(
            CompassEncoder(),
            build_index(CompassEncoder().encode(["east"]), IndexConfig(kind="flat")),
            ["a", "b"],
            ["x", "y"],
        )


def test_loaded_retriever_matches_brute_force(
    saved: Path, artifacts: dict[str, Artifact], tiny_dataset: Dataset
) -> None:
    encoder = load_encoder(artifacts["model"].path, EncoderConfig())
    labels, texts = tiny_dataset.labels, tiny_dataset.test.texts
    scores = encoder.encode(texts) @ encoder.encode(labels.texts).T
    answers = Retriever.load(artifacts["model"].path, saved).query(texts, 5)
    for row, hits in zip(scores, answers, strict=True):
        assert [hit.uid for hit in hits] == [labels.uids[i] for i in np.argsort(-row)[:5]]
        assert [hit.score for hit in hits] == pytest.approx(np.sort(row)[::-1][:5], abs=1e-5)


@pytest.mark.parametrize("name", [INDEX_FILE, LABELS_FILE])
def test_load_refuses_file_with_flipped_bit(name: str, saved: Path, artifacts: dict[str, Artifact]) -> None:
    data = bytearray((saved / name).read_bytes())
    data[len(data) // 2] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{name}: differs from retriever.json: damaged or edited"):
        Retriever.load(artifacts["model"].path, saved)


def test_load_refuses_another_encoder(saved: Path, tmp_path: Path, encoder_folder: Path) -> None:
    other = shutil.copytree(encoder_folder, tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: differs"):
        Retriever.load(other, saved)


def test_load_refuses_missing_or_invalid_metadata(saved: Path, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    model = artifacts["model"].path
    with pytest.raises(ArtifactError, match="not a retriever"):
        Retriever.load(model, tmp_path)
    facts = json.loads((saved / FACTS_FILE).read_text())
    (saved / FACTS_FILE).write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(ArtifactError, match="expected format 1, found 99"):
        Retriever.load(model, saved)
    (saved / FACTS_FILE).write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON"):
        Retriever.load(model, saved)


def test_answers_are_formatted_as_table_and_json(compass: Retriever) -> None:
    (hits,) = compass.query(["northeast"], 2)
    assert format_table(hits).splitlines() == [
        "rank  cosine  uid  text",
        "   1   0.800  N    north",
        "   2   0.600  E    east",
    ]
    assert json.loads(format_json(hits))[0] == {"uid": "N", "text": "north", "score": pytest.approx(0.8)}
    assert format_table([]) == "no labels"
