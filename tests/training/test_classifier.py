"""The second stage: classifiers on frozen vectors, fused into one vector per label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ramen.config import EncoderConfig
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors, has_context_or_classifier
from ramen.encoder.loading import load_encoder
from ramen.errors import Interrupted
from ramen.training.labels.classifier import Classifiers, mean_hinge
from ramen.training.progress import Progress
from ramen.training.trainer import Trainer

from training_recipe import TrainOnce, assert_same_artifacts, changed, run_retraining, train

NGAME = changed(base={"name": "ngame", "refresh_from": 1}, classifier={"epochs": 40}, training={"epochs": 6})


@pytest.fixture(autouse=True)
def _small_data_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH_SIZE": 16, "SHORTLIST": 8, "LEARNING_RATE": 0.02, "DROPOUT": 0.2}.items():
        monkeypatch.setattr(f"ramen.training.labels.classifier.{name}", value)


@pytest.mark.slow
def test_classifiers_fit_training_documents_better_than_label_vectors(
    tiny_artifacts: dict[str, Path], tmp_path: Path, tiny_dataset: Dataset
) -> None:
    metrics = train(tiny_artifacts, tmp_path, NGAME)
    model, share = tmp_path / "model", metrics["classifier/share"]
    assert has_context_or_classifier(model) and 0 <= share <= 1
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    documents = encoder.encode(tiny_dataset.train.texts)
    labels = encode_labels(encoder, model, tiny_dataset.labels.texts)
    weight = load_file(model / "classifier.safetensors")["weight"]
    np.testing.assert_allclose(np.linalg.norm(weight, axis=1), 1, atol=1e-5)
    y = tiny_dataset.y_train.toarray() > 0

    def accuracy(vectors: np.ndarray) -> float:
        best = (documents @ vectors.T).argmax(1)
        return float(y[np.arange(60), best].mean())

    assert accuracy(weight) > accuracy(labels)
    assert not y[:, 29].any(), "the last label has no document"
    expected = (1 - share) * documents @ labels.T + share * documents @ weight.T
    np.testing.assert_allclose(documents @ fuse_label_vectors(model, labels).T, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"base": {"name": "ngame"}, "classifier": {"epochs": 0}}])
def test_other_bases_and_zero_epochs_train_no_classifiers(train_once: TrainOnce, more: dict[str, object]) -> None:
    model = train_once(changed(objective={"label_context": "none"}, **more)) / "model"
    assert not has_context_or_classifier(model)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 77, 150])
def test_interrupted_classifiers_are_bit_identical_after_resume(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    expected = train_once(NGAME)
    trainers: list[Trainer] = []
    resume, advance, steps = Trainer.resume, Progress.advance, 0

    def keep_trainer(trainer: Trainer) -> None:
        trainers.append(trainer)
        resume(trainer)

    def interrupt(progress: Progress, items: int, facts: str) -> None:
        nonlocal steps
        advance(progress, items, facts)
        if progress.name == "classifier":
            steps += 1
            if steps == step:
                trainers[-1].interrupted = True

    monkeypatch.setattr(Trainer, "resume", keep_trainer)
    monkeypatch.setattr(Progress, "advance", interrupt)
    with pytest.raises(Interrupted):
        run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, NGAME)
    run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, NGAME)
    assert_same_artifacts(tmp_path, expected, "model")
    assert len(trainers) == 2


def test_mean_hinge_equals_torch_margin_loss_over_pairs_of_positives_and_valid_negatives() -> None:
    scores = torch.tensor([[0.9, 0.2, 0.5, 0.1, 0.8], [0.3, 0.4, 0.35, 0.9, 0.0]])  # two positives, three negatives
    valid = torch.tensor([[True, True, False], [True, False, True]])
    total, count = 0.0, 0
    for row in range(2):
        for p in range(2):
            for n in valid[row].nonzero().ravel().tolist():
                pair = scores[row, p], scores[row, 2 + n]
                total += float(torch.nn.functional.margin_ranking_loss(*pair, torch.tensor(1.0), margin=0.2))
                count += 1
    assert float(mean_hinge(scores, 2, valid, 0.2)) == pytest.approx(total / count, abs=1e-6)


def test_optimiser_changes_only_the_classifiers_of_a_step() -> None:
    start = np.eye(4, 3, dtype=np.float32) + 0.1
    model = Classifiers(start)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    documents = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    model(documents, torch.tensor([[0, 1], [1, 1]])).sum().backward()
    optimizer.step()
    changed_rows = (model.table.weight.detach().numpy() != start).any(1)
    assert changed_rows.tolist() == [True, True, False, False]
