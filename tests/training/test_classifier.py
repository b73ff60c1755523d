"""The second stage: classifiers on frozen vectors, fused into one vector per label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ramen.artifacts import open_artifact
from ramen.config import EncoderConfig
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors, has_context_or_classifier
from ramen.encoder.loading import load_encoder
from ramen.errors import Interrupted
from ramen.stages import run_stage
from ramen.training.labels.classifier import Classifiers, _hinges
from ramen.training.progress import Progress

from training_recipe import changed, train

NGAME = changed(base={"name": "ngame", "refresh_from": 1}, classifier={"epochs": 40}, training={"epochs": 6})


@pytest.fixture(autouse=True)
def _small_data_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH_SIZE": 16, "SHORTLIST": 8, "LEARNING_RATE": 0.02, "DROPOUT": 0.2}.items():
        monkeypatch.setattr(f"ramen.training.labels.classifier.{name}", value)


def test_classifiers_start_as_the_labels_and_learn_their_documents(
    tiny_artifacts: dict[str, Path], tmp_path: Path, tiny_dataset: Dataset
) -> None:
    metrics = train(tiny_artifacts, tmp_path / "out", NGAME)
    model = tmp_path / "out" / "model"
    assert has_context_or_classifier(model) and 0 <= metrics["classifier/share"] <= 1
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    documents, labels = (
        encoder.encode(tiny_dataset.train.texts),
        encode_labels(encoder, model, tiny_dataset.labels.texts),
    )
    weight = load_file(model / "classifier.safetensors")["weight"]
    np.testing.assert_allclose(np.linalg.norm(weight, axis=1), 1, atol=1e-5)
    y = tiny_dataset.y_train.toarray() > 0

    def accuracy(vectors: np.ndarray) -> float:
        best = (documents @ vectors.T).argmax(1)
        return float(y[np.arange(60), best].mean())

    assert accuracy(weight) > accuracy(labels), "they have seen these documents"
    untouched = ~y.any(0)
    assert untouched[29]
    share = metrics["classifier/share"]
    expected = (1 - share) * documents @ labels.T + share * documents @ weight.T
    np.testing.assert_allclose(documents @ fuse_label_vectors(model, labels).T, expected, atol=1e-5)


def test_it_is_trained_only_where_the_base_has_a_second_stage_and_it_is_on(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    alone = {"label_context": "none"}
    train(tiny_artifacts, tmp_path / "plain", changed(objective=alone))
    off = changed(objective=alone, base={"name": "ngame"}, classifier={"epochs": 0})
    train(tiny_artifacts, tmp_path / "off", off)
    assert not has_context_or_classifier(tmp_path / "plain" / "model") and not has_context_or_classifier(
        tmp_path / "off" / "model"
    )


@pytest.mark.parametrize("at", [1, 77, 150])
def test_stopped_in_the_middle_it_goes_on_and_ends_bit_identical(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    from ramen.training.labels import classifier

    train(tiny_artifacts, tmp_path / "whole", NGAME)
    sessions: list[object] = []
    plain, advance, calls = classifier.train_classifiers, Progress.advance, 0

    def remember(session: object, *rest: object) -> object:
        sessions.append(session)
        return plain(session, *rest)  # type: ignore[arg-type]

    def stop(self: Progress, count: int, facts: str) -> None:
        nonlocal calls
        advance(self, count, facts)
        if sessions:
            calls += 1
            if calls == at:
                sessions[-1].interrupted = True  # type: ignore[attr-defined]

    monkeypatch.setattr("ramen.training.stage.train_classifiers", remember)
    monkeypatch.setattr(Progress, "advance", stop)
    inputs = {**tiny_artifacts, "warm_model": tmp_path / "whole" / "warm_model"}
    outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    with pytest.raises(Interrupted):
        run_stage("prune-retrain", sections=NGAME, inputs=inputs, outputs=outputs)
    run_stage("prune-retrain", sections=NGAME, inputs=inputs, outputs=outputs)
    theirs = open_artifact(tmp_path / "whole" / "model", "model").digest
    assert open_artifact(tmp_path / "model", "model").digest == theirs and len(sessions) == 2


def test_hinges_are_torchs_margin_loss_over_all_pairs_of_a_positive_and_a_valid_negative() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.5, 0.1, 0.8], [0.3, 0.4, 0.35, 0.9, 0.0]])  # two positives, three negatives
    valid = torch.tensor([[True, True, False], [True, False, True]])
    total, count = 0.0, 0
    for row in range(2):
        for p in range(2):
            for n in range(3):
                if valid[row, n]:
                    a, b = scores[row, p], scores[row, 2 + n]
                    total += float(torch.nn.functional.margin_ranking_loss(a, b, torch.tensor(1.0), margin=0.2))
                    count += 1
    assert float(_hinges(scores, 2, valid, 0.2)) == pytest.approx(total / count, abs=1e-6)


def test_only_the_touched_classifiers_move() -> None:
    start = np.eye(4, 3, dtype=np.float32) + 0.1
    model = Classifiers(start)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    model(
        torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1], [1, 1]])
    ).sum().backward()
    optimizer.step()
    moved = (model.table.weight.detach().numpy() != start).any(1)
    assert moved.tolist() == [True, True, False, False]
