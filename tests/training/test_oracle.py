"""MOGIC's oracle in both training stages: its texts, its effect on the encoder, and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import graphs_of, on_disk

from ramen.data.dataset import AnchorSet, Dataset
from ramen.errors import ConfigError
from ramen.graph.metadata import read_graphs
from ramen.training.oracle import FILES, add_anchor_texts, read_oracle
from ramen.training.trainer import Trainer

from training_recipe import (
    TrainOnce,
    assert_same_artifacts,
    changed,
    history,
    interrupt_before_steps,
    run_retraining,
    run_until_done,
    run_warmup,
    same_weights,
    train,
)

pytestmark = pytest.mark.slow
GUIDANCE = {"enabled": True, "epochs": 3, "max_length": 24}
GUIDED = changed(guidance=GUIDANCE)


def extend_texts(dataset: Dataset, artifacts: dict[str, Path], max_anchors: int = 24, seed: int = 0) -> Dataset:
    return add_anchor_texts(dataset, read_graphs(artifacts["graph"]), "inverse_sqrt_degree", max_anchors, seed)


def test_anchor_texts_follow_each_text(tiny_dataset: Dataset, tiny_artifacts: dict[str, Path]) -> None:
    extended = extend_texts(tiny_dataset, tiny_artifacts)
    assert extended.train.uids == tiny_dataset.train.uids and extended.labels.uids == tiny_dataset.labels.uids
    for side in ("train", "labels"):
        texts, extended_texts = (getattr(dataset, side).texts for dataset in (tiny_dataset, extended))
        for row, (text, extended_text) in enumerate(zip(texts, extended_texts, strict=True)):
            assert extended_text.startswith(text)
            expected = [
                anchors.texts.texts[column]
                for anchors in tiny_dataset.anchor_sets.values()
                for column in getattr(anchors, side)[row].indices
            ]
            assert sorted(extended_text[len(text) :].split()) == sorted(" ".join(expected).split()), row
    assert extended.test == tiny_dataset.test


def test_documents_are_not_extended_by_their_labels_nor_labels_by_their_documents(tiny_dataset: Dataset) -> None:
    # the anchors are the labels, or the documents: every edge of a document leads to one of its labels
    labels, documents = tiny_dataset.labels, tiny_dataset.train
    n, m = len(documents), len(labels)
    anchor_sets = {
        "labels": AnchorSet(labels, tiny_dataset.y_train, sp.csr_matrix((m, m), dtype=np.float32)),
        "documents": AnchorSet(
            documents, sp.csr_matrix((n, n), dtype=np.float32), sp.csr_matrix(tiny_dataset.y_train.T)
        ),
    }
    dataset = replace(tiny_dataset, anchor_sets=anchor_sets)
    extended = add_anchor_texts(dataset, graphs_of(dataset), "uniform", 24, 0)
    assert extended.train.texts == documents.texts and extended.labels.texts == labels.texts


def test_order_of_anchor_texts_depends_on_the_seed_and_their_number_is_limited(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path]
) -> None:
    first, repeated, other = (extend_texts(tiny_dataset, tiny_artifacts, seed=seed).train.texts for seed in (0, 0, 1))
    assert first == repeated and first != other
    limited = extend_texts(tiny_dataset, tiny_artifacts, max_anchors=1).train.texts
    for text, short, long in zip(tiny_dataset.train.texts, limited, first, strict=True):
        assert long.startswith(short) and short.startswith(text) and len(text) < len(short), "the first one remains"
    assert sum(map(len, limited)) < sum(map(len, first))


def test_oracle_has_a_separate_max_length(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = train_once() / "model"  # saved with a maximum length of 16 tokens
    lengths: list[tuple[int, int]] = []
    resume = Trainer.resume

    def record_lengths(trainer: Trainer) -> None:
        lengths.append((trainer.encoder.settings.max_length, int(trainer.inputs.texts.store.lengths.max())))
        resume(trainer)

    monkeypatch.setattr(Trainer, "resume", record_lengths)
    train(tiny_artifacts, tmp_path, changed(encoder={"name": str(encoder)}, guidance=GUIDANCE))
    assert [limit for limit, _ in lengths] == [24, 16, 16] and lengths[0][1] > 16


def test_oracle_without_weights_changes_no_bit_of_the_encoder(train_once: TrainOnce) -> None:
    terms = {"align_documents", "align_labels", "match_documents", "match_labels"}
    without_weights = train_once(changed(guidance={**GUIDANCE, **dict.fromkeys(terms, 0.0)}))
    assert same_weights(train_once() / "model", without_weights / "model")
    assert not same_weights(train_once() / "model", train_once(GUIDED) / "model")
    assert terms < set(history(train_once(GUIDED) / "model")[-1]["terms"])


def test_only_the_warm_model_contains_files_of_the_oracle(train_once: TrainOnce) -> None:
    files, guided_files = (
        {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        for folder in (train_once(), train_once(GUIDED))
    )
    assert guided_files - files == {f"warm_model/{file}" for file in FILES.values()}
    oracle = read_oracle(train_once(GUIDED) / "warm_model")
    assert oracle.documents.shape == (60, 32) and oracle.labels.shape == (30, 32)
    np.testing.assert_allclose(np.linalg.norm(np.float32(oracle.labels), axis=1), 1.0, atol=1e-2)


def test_training_interrupted_during_and_after_the_oracle_is_bit_identical(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_once(GUIDED)
    interrupt_before_steps(monkeypatch, [5, 17])
    assert run_until_done(lambda: run_warmup(tiny_artifacts, tmp_path, GUIDED)) == 2
    run_retraining(tiny_artifacts, tmp_path / "warm_model", tmp_path, GUIDED)
    assert_same_artifacts(tmp_path, expected, "warm_model", "model")


def test_encoder_learns_what_only_the_oracle_reads(bandit_benchmark: ModuleType, tmp_path: Path) -> None:
    rows = bandit_benchmark.ROWS
    guided_row = {**rows["read by an oracle"], "guidance": {**rows["read by an oracle"]["guidance"], "epochs": 20}}
    data = bandit_benchmark.write(bandit_benchmark.planted(), tmp_path / "data")
    base, _ = bandit_benchmark.train(data, tmp_path / "base", rows["base"], 2, 20)
    guided, _ = bandit_benchmark.train(data, tmp_path / "guided", guided_row, 2, 20)
    assert guided > base + 4


def test_unknown_anchor_set_of_the_oracle_is_refused(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"guidance.anchor_sets: 'link' is no anchor set of the dataset"):
        run_warmup(tiny_artifacts, tmp_path, changed(guidance={**GUIDANCE, "anchor_sets": ["link"]}))


def test_oracle_of_a_dataset_without_anchor_sets_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    artifacts = on_disk(replace(tiny_dataset, anchor_sets={}), tmp_path)
    with pytest.raises(ConfigError, match="the dataset has no anchor sets"):
        run_warmup(artifacts, tmp_path, GUIDED)
