"""The model card: metadata that huggingface_hub reads, and content that depends on the arguments alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from ramen.config import EncoderConfig, resolve
from ramen.encoder.loading import load_encoder
from ramen.encoder.model_card import CARD_FILE, write_model_card

DATASET: dict[str, Any] = {
    "sections": {"data": {"path": "/home/someone/debian.jsonl.gz"}},
    "counts": {
        "documents": 1595,
        "labels": 3205,
        "pairs": 4000,
        "anchor_sets": {"depends": {"anchors": 700, "train_edges": 5000, "label_edges": 6000}},
    },
}
COUNTS = {"epochs": 4, "steps": 1234, "documents": 1515}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load_encoder("tiny", EncoderConfig(max_length=16)).save(tmp_path)
    return tmp_path


def write(folder: Path, sections: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> ModelCard:
    values = resolve(preset="demo").sections(("encoder", "base", "objective", "training", "guidance"))
    changed = {name: {**values[name], **knobs} for name, knobs in (sections or {}).items()}
    write_model_card(folder, sections=values | changed, counts=COUNTS, **{"dataset": DATASET, **options})
    return ModelCard.load(folder / CARD_FILE)


def test_metadata_is_what_the_hub_reads(folder: Path) -> None:
    card = write(folder, heldout_p_at_1=51.234)
    data = card.data.to_dict()
    assert data["library_name"] == "sentence-transformers" and data["pipeline_tag"] == "sentence-similarity"
    assert data["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert "license" not in data
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("precision@1", 51.234)
    assert result.dataset_name == "debian, held-out training documents"


def test_card_describes_data_model_and_training(folder: Path) -> None:
    text = write(folder, {"base": {"name": "ngame"}, "training": {"lr": 0.5}}, heldout_p_at_1=51.234).text
    for expected in ("| depends | 700 | 5,000 | 6,000 |", "debian: 1,595 training documents, 3,205 labels", "16 tokens",
                     "32 dimensions, mean pooling", "| Precision@1 | 51.23 |", "lr: 0.5", "1,234 steps",
                     "NGAME: Negative Mining-aware", "Graph Regularized Encoder Training"):  # fmt: skip
        assert expected in text
    assert "/home/someone" not in text


def test_test_metrics_are_those_of_the_encoder_alone(folder: Path) -> None:
    metrics = {"p_at_1": 60.0, "encoder/p_at_1": 55.0, "r_at_100": 80.0, "psp_at_5": float("nan")}
    card = write(folder, heldout_p_at_1=1.0, test_metrics=metrics)
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {"precision@1": 55.0, "recall@100": 80.0}


def test_card_without_metrics_or_counts_is_valid(folder: Path) -> None:
    card = write(folder, {"encoder": {"name": "tiny"}}, dataset={"sections": {}, "counts": {}})
    assert not card.data.eval_results and card.data.base_model is None
    assert "A dataset in memory." in card.text and "Not measured during training." in card.text


def test_local_base_model_is_no_hub_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    local = f"{folder.name}/1_Pooling"
    card = write(folder, {"encoder": {"name": local}})
    assert card.data.base_model is None and "a local folder, 1_Pooling" in card.text and folder.name not in card.text
    assert write(folder, {"encoder": {"name": "org/model"}}).data.base_model == "org/model"


def test_same_arguments_give_the_same_bytes(folder: Path) -> None:
    first = write(folder, heldout_p_at_1=51.234).content
    assert write(folder, heldout_p_at_1=51.234).content == first


def test_folder_loads_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    write(folder)
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_propagation()
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ResourceWarning)
            SentenceTransformer(str(folder), device="cpu")
    finally:
        transformers_logging.disable_propagation()
        transformers_logging.set_verbosity(before)
    assert not [record.getMessage() for record in caplog.records]
