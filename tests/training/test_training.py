"""Both training stages on the tiny dataset."""

from __future__ import annotations

import gc
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from on_disk import on_disk

from ramen.artifacts import open_artifact
from ramen.config import EncoderConfig, TrainingConfig
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.data.subset import hide_labels
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import SETTINGS_FILE
from ramen.errors import ArtifactError, ConfigError, DataError, Interrupted
from ramen.graph.metadata import read_graphs
from ramen.stages import run_stage
from ramen.training.heldout import split_held_out
from ramen.training.setup import make_optimizer
from ramen.training.step_sampler import Step
from ramen.training.trainer import Trainer

from training_recipe import (
    SECTIONS,
    InterruptAtPoint,
    TrainOnce,
    assert_same_artifacts,
    changed,
    history,
    interrupt_before_steps,
    run_retraining,
    run_warmup,
    same_weights,
    train,
)

pytestmark = pytest.mark.slow


def test_training_learns_and_writes_a_loadable_model(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    sections = changed(training={"epochs": 30, "warmup_epochs": 20}, pruning={"every": 5})
    metrics = train(tiny_artifacts, tmp_path, sections)
    records = history(tmp_path / "model")
    assert [r["epoch"] for r in records] == list(range(1, 31))
    assert [r["phase"] for r in records] == ["warmup"] * 20 + ["retrain"] * 10
    assert records[-1]["task_loss"] < 0.5 * records[0]["task_loss"]
    assert records[-1]["terms"]["links.document"] < records[0]["terms"]["links.document"]
    assert metrics["rounds"] == 2 and metrics["val_p_at_1"] > 30
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(["chess rook"])
    assert vectors.shape == (1, 32)


def test_training_leaves_no_trainer_in_memory(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # a trainer in a reference cycle would keep gigabytes alive until the next collection
    try:
        train(tiny_artifacts, tmp_path)
        assert not [item for item in gc.get_objects() if type(item) is Trainer]
    finally:
        gc.enable()


def test_seed_determines_the_artifacts(tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path) -> None:
    train(tiny_artifacts, tmp_path)
    assert_same_artifacts(tmp_path, train_once(), "model")
    assert not same_weights(tmp_path / "model", train_once(changed(training={"seed": 1})) / "model")


def test_graphs_without_weights_and_negatives_change_no_bit(train_once: TrainOnce) -> None:
    base = train_once(changed(objective={"graphs": False}))
    no_effect = {"lambda_document": 0.0, "lambda_label": 0.0, "graph_negatives": 0.0}
    assert same_weights(base / "model", train_once(changed(objective=no_effect)) / "model")
    assert not same_weights(base / "model", train_once() / "model")


def test_weight_of_one_regulariser_overrides_that_of_its_side(train_once: TrainOnce) -> None:
    objective = {"lambda_document": 0.0, "lambda_label": 0.2, "lambdas": {"links.label": 0.0, "category.document": 0.5}}
    record = history(train_once(changed(objective=objective)) / "model")[0]
    terms = record["terms"]
    assert set(terms) == {"category.document", "category.label"}
    assert record["lambda"] == {
        "task": 1.0,
        "category.document": 0.5,
        "category.label": 0.2,
        "links.document": 0.0,
        "links.label": 0.0,
    }
    expected = record["task_loss"] + 0.5 * terms["category.document"] + 0.2 * terms["category.label"]
    assert record["loss"] == pytest.approx(expected, rel=1e-5)


def test_only_selected_anchor_sets_are_used(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    train(tiny_artifacts, tmp_path, changed(objective={"anchor_sets": ["links"]}))
    assert set(history(tmp_path / "model")[0]["terms"]) == {"links.document", "links.label"}
    assert set(read_graphs(tmp_path / "pruned_graph")) == {"links"}
    with pytest.raises(ConfigError, match=r"'link' is no anchor set of the dataset; anchor sets: category, links"):
        train(tiny_artifacts, tmp_path / "wrong", changed(objective={"anchor_sets": ["link"]}))


def test_graph_negatives_come_from_the_selected_sets(train_once: TrainOnce) -> None:
    def losses(**objective: object) -> list[float]:
        no_weights = {"lambda_document": 0.0, "lambda_label": 0.0}
        return [r["loss"] for r in history(train_once(changed(objective=no_weights | objective)) / "model")]

    without, from_both, from_one = losses(graphs=False), losses(), losses(negative_sets=["links"])
    assert from_both != without and from_one != without and from_both != from_one
    with pytest.raises(ConfigError, match=r"objective.negative_sets: 'link' is no anchor set of the dataset"):
        losses(negative_sets=["link"])


def test_pruning_starts_from_the_original_graphs_and_applies_the_threshold(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], train_once: TrainOnce
) -> None:
    all_pruned = train_once(changed(pruning={"rule": "threshold", "threshold": 1.0})) / "pruned_graph"
    held_out = set(split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))[0].tolist())
    for sides in read_graphs(all_pruned).values():
        assert sides["labels"].num_edges == 0
        assert set(sides["train"].rows().tolist()) <= held_out, "edges that no step can draw are not evaluated"
    rounds = json.loads((all_pruned / "rounds.json").read_text())
    assert [r["epoch"] for r in rounds] == [2, 3] and set(rounds[0]["edges_kept"].values()) == {0.0}
    not_pruned = read_graphs(train_once(changed(pruning={"rule": "none"})) / "pruned_graph")
    for name, sides in read_graphs(tiny_artifacts["graph"]).items():
        for side, graph in sides.items():
            np.testing.assert_array_equal(graph.indices, not_pruned[name][side].indices)


def test_training_continues_after_pruning_stops(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.training.pruning_rounds.CONVERGED_AT", 1.0)  # the graphs never converge
    # with a learning rate of almost 0, held-out quality never improves
    train(tiny_artifacts, tmp_path, changed(training={"epochs": 8, "lr": 1e-12}, pruning={"patience": 3}))
    rounds = json.loads((tmp_path / "pruned_graph" / "rounds.json").read_text())
    assert [record["converged"] for record in rounds] == [False] * 3 + [True] * 3
    assert len(history(tmp_path / "model")) == 8


def test_held_out_documents_are_not_trained_on(train_once: TrainOnce) -> None:
    assert open_artifact(train_once() / "model", "model").counts["documents"] == 54


def test_whole_groups_are_held_out_in_training(tiny_dataset: Dataset, tmp_path: Path) -> None:
    dataset = replace(tiny_dataset, groups=np.repeat([0, 1, 2, 3, 4], [12, 4, 4, 20, 20]))
    run_warmup(on_disk(dataset, tmp_path), tmp_path, changed(training={"validation_fraction": 0.2}))
    assert open_artifact(tmp_path / "warm_model", "warm_model").counts["validation_documents"] in (8, 12)


def test_groups_too_large_to_be_held_out_are_a_warning(
    tiny_dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    artifacts = on_disk(replace(tiny_dataset, groups=np.repeat([0, 1], 30)), tmp_path)
    run_warmup(artifacts, tmp_path)
    expected = "warning: training.validation_fraction = 0.1 holds out no document (every group of documents is larger)"
    assert expected in capfd.readouterr().err


def test_truncated_texts_are_a_warning(
    tiny_dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long_labels = replace(tiny_dataset.labels, texts=["a b c " * 9] * len(tiny_dataset.labels))
    for name, dataset, truncated in (
        ("short", tiny_dataset, False),
        ("long", replace(tiny_dataset, labels=long_labels), True),
    ):
        run_warmup(on_disk(dataset, tmp_path / name), tmp_path / name)
        log = capfd.readouterr().err
        assert ("warning: encoder.max_length = 16 tokens truncates 100 % of labels" in log) == truncated
        assert ("truncates" in log) == truncated


def test_interrupted_warmup_is_bit_identical_after_resume(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path
) -> None:
    expected = train_once()
    with pytest.raises(Interrupted):
        run_warmup(tiny_artifacts, tmp_path, track=InterruptAtPoint(1))
    assert not (tmp_path / "warm_model").exists(), "no partial output"
    run_warmup(tiny_artifacts, tmp_path)
    assert_same_artifacts(tmp_path, expected, "warm_model")
    assert not list((tmp_path / "ramen-work").iterdir()), "checkpoints are removed after success"


def test_interrupted_retraining_is_bit_identical_after_resume(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path
) -> None:
    expected = train_once()
    with pytest.raises(Interrupted):
        run_retraining(tiny_artifacts, expected / "warm_model", tmp_path, track=InterruptAtPoint(2))
    assert not (tmp_path / "model").exists() and not (tmp_path / "pruned_graph").exists(), "no partial output"
    run_retraining(tiny_artifacts, expected / "warm_model", tmp_path)
    assert_same_artifacts(tmp_path, expected)
    assert not list((tmp_path / "ramen-work").iterdir()), "checkpoints are removed after success"


def test_held_out_documents_are_no_anchors_in_training(tiny_dataset: Dataset, tmp_path: Path) -> None:
    # a label's anchors are its documents: an edge to a held-out document would be the pair that is evaluated
    pages = AnchorSet(tiny_dataset.train, sp.identity(60, np.float32, "csr"), sp.csr_matrix(tiny_dataset.y_train.T))
    artifacts = on_disk(replace(tiny_dataset, anchor_sets={"pages": pages}), tmp_path)
    train(artifacts, tmp_path, changed(training={"validation_fraction": 0.4}, pruning={"rule": "none"}))
    training_rows = split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.4))[1]
    anchors = set(read_graphs(tmp_path / "pruned_graph")["pages"]["labels"].indices.tolist())
    assert anchors <= set(training_rows.tolist()) and len(anchors) > 30


def test_no_step_contains_a_hidden_label(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = hide_labels(tiny_dataset, 0.4, seed=1)
    labels, train_step = set[int](), Trainer.train_step

    def record_labels(trainer: Trainer, step: Step) -> dict[str, float]:
        labels.update(step.labels.tolist())
        return train_step(trainer, step)

    monkeypatch.setattr(Trainer, "train_step", record_labels)
    sections = changed(base={"name": "ance", "refresh_from": 1, "random_labels": 1.0})
    train(on_disk(dataset, tmp_path), tmp_path, sections)
    assert dataset.candidates is not None and labels == set(range(30)) - set(dataset.candidates.tolist())


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_documents_for_a_step_are_refused(tiny_dataset: Dataset, tmp_path: Path, count: int) -> None:
    y = tiny_dataset.y_train.tolil()
    y[count:] = 0
    artifacts = on_disk(replace(tiny_dataset, y_train=y.tocsr()), tmp_path)
    with pytest.raises(DataError, match=f"too few training documents with a label for a step: {count}, and 0 held out"):
        run_warmup(artifacts, tmp_path, changed(training={"validation_fraction": 0.0}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"objective": {"lambdas": {"link.label": 0.5}}},
            "lambdas.link.label: no such regulariser; did you mean links.label",
        ),
        (
            {"objective": {"lambdas": {"links.label": 0.5}, "anchor_sets": ["category"]}},
            r"lambdas\.links\.label: no such regulariser in objective\.anchor_sets",
        ),
        ({"bandit": {"enabled": True}}, "bandit.period = 30: training has 16 steps"),
    ],
)
def test_invalid_settings_are_refused(
    tiny_artifacts: dict[str, Path], tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_warmup(tiny_artifacts, tmp_path, changed(**sections))


@pytest.mark.parametrize(
    ("section", "knob", "message"),
    [
        ("encoder", {"name": "minilm"}, "encoder.name = minilm: .* was trained with tiny"),
        ("encoder", {"max_length": 64}, "encoder.max_length = 64: .* was trained with 16"),
        ("training", {"seed": 5}, "training.seed = 5: .* was trained with 0"),
        ("training", {"validation_fraction": 0.2}, "training.validation_fraction = 0.2: .* was trained with 0.1"),
        ("base", {"name": "dexa"}, "base.name = dexa: .* was trained with inbatch"),
        ("base", {"dexa": {"labels_per_offset": 2}}, "base.dexa.labels_per_offset = 2: .* was trained with 3"),
        ("objective", {"augment_labels": True}, "objective.augment_labels = True: .* was trained with False"),
        ("guidance", {"enabled": True}, "guidance.enabled = True: .* was trained with False"),
        ("training", {"epochs": 1, "warmup_epochs": 1}, "training.warmup_epochs = 1: .* was trained with 2"),
    ],
)
def test_retraining_refuses_settings_that_differ_from_those_of_the_warmup(
    tiny_artifacts: dict[str, Path],
    train_once: TrainOnce,
    tmp_path: Path,
    section: str,
    knob: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_retraining(tiny_artifacts, train_once() / "warm_model", tmp_path, changed(**{section: knob}))


def test_artifact_of_another_dataset_is_refused(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    uids = tiny_dataset.labels.uids
    other = on_disk(replace(tiny_dataset, labels=Texts(uids, [*uids[1:], uids[0]])), tmp_path / "other")
    with pytest.raises(ArtifactError, match=r"was made from another dataset than .*; run `ramen build-graph` again"):
        run_warmup({"dataset": tiny_artifacts["dataset"], "graph": other["graph"]}, tmp_path)
    train(other, tmp_path)
    inputs = {"dataset": other["dataset"], "model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    sections = {"encoder": SECTIONS["encoder"]}
    run_stage("evaluate", sections=sections, inputs=inputs, outputs={"evaluation": tmp_path / "evaluation"})
    inputs["dataset"] = tiny_artifacts["dataset"]
    with pytest.raises(ArtifactError, match=r"was made from another dataset than .*; run `ramen prune-retrain` again"):
        run_stage("evaluate", sections=sections, inputs=inputs, outputs={"evaluation": tmp_path / "mixed"})


def test_bandit_without_labelled_held_out_documents_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    y = tiny_dataset.y_train.tolil()
    y[split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))[0]] = 0
    artifacts = on_disk(replace(tiny_dataset, y_train=y.tocsr()), tmp_path)
    with pytest.raises(ConfigError, match=r"held-out document with a label.*raise training.validation_fraction"):
        run_warmup(artifacts, tmp_path, changed(bandit={"enabled": True}))


def test_max_length_overrides_that_of_an_encoder_folder(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Models of sentence-transformers declare 256 or 512 tokens."""
    load_encoder("tiny", EncoderConfig(name="tiny", max_length=16)).save(tmp_path / "start")
    train(tiny_artifacts, tmp_path, changed(encoder={"name": str(tmp_path / "start"), "max_length": 8}))
    for name in ("warm_model", "model"):
        assert json.loads((tmp_path / name / SETTINGS_FILE).read_text())["max_seq_length"] == 8


def test_model_of_older_version_is_refused_in_one_line(
    tiny_artifacts: dict[str, Path], train_once: TrainOnce, tmp_path: Path
) -> None:
    warm_model = shutil.copytree(train_once() / "warm_model", tmp_path / "warm_model")
    manifest = json.loads((warm_model / "manifest.json").read_text())
    base = manifest["sections"]["base"]
    del base["dexa"]
    base |= {"labels_per_offset": 3, "offset_heads": 1000}
    (warm_model / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="written by an older version, .*; run `ramen warmup` again") as error:
        run_retraining(tiny_artifacts, warm_model, tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_biases_layer_norms_and_label_offsets_have_no_weight_decay() -> None:
    encoder, offsets = load_encoder("tiny", EncoderConfig(name="tiny", precision="fp32")), torch.nn.Embedding(3, 4)
    decayed, not_decayed = make_optimizer(encoder, offsets, 1e-3, 0.01).param_groups
    assert decayed["weight_decay"] == 0.01 and not_decayed["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    found = {names.get(id(parameter), "offsets") for parameter in not_decayed["params"]}
    assert found == {name for name in names.values() if name.endswith("bias") or "norm" in name.lower()} | {"offsets"}


def test_gradients_are_clipped(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: dict[float, list[float]] = {math.inf: [], 0.01: []}
    for limit, found in norms.items():

        def record_norm(optimizer: torch.optim.AdamW, *_: object, found: list[float] = found) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            found.append(float(torch.nn.utils.get_total_norm(gradients)))

        monkeypatch.setattr(torch.optim.AdamW, "step", record_norm)
        monkeypatch.setattr("ramen.training.trainer.CLIP_NORM", limit)
        train(tiny_artifacts, tmp_path / str(limit))
    assert max(norms[0.01]) == pytest.approx(0.01, rel=1e-3) and max(norms[math.inf]) > 0.1


def test_bandit_does_not_switch_off_regularisers(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 0.1 may be perturbed to 0 for a window; the regulariser must still be computed in the next one."""
    monkeypatch.setattr("ramen.objective.bandit.LAMBDA_MIN", 0.0)
    sections = changed(bandit={"enabled": True, "period": 4, "feedback": "task_loss"}, training={"seed": 2})
    train(tiny_artifacts, tmp_path / "whole", sections)
    assert all(len(record["terms"]) == 4 for record in history(tmp_path / "whole" / "model"))
    interrupt_before_steps(monkeypatch, [11])  # within a pruning round
    with pytest.raises(Interrupted):
        train(tiny_artifacts, tmp_path / "resumed", sections)
    train(tiny_artifacts, tmp_path / "resumed", sections, skip_finished=True)
    assert same_weights(tmp_path / "whole" / "model", tmp_path / "resumed" / "model")
