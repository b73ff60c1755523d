"""The two training stages on the tiny problem: what a user relies on."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
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
from ramen.errors import ArtifactError, ConfigError, DataError, Interrupted, RamenError
from ramen.graph.metadata import read_graphs
from ramen.stages import run_stage
from ramen.training.heldout import HeldOut, split_held_out
from ramen.training.schedule import linear_schedule
from ramen.training.setup import make_optimizer
from ramen.training.step_sampler import Step
from ramen.training.trainer import Trainer

from training_recipe import SECTIONS, StopAt, changed, history, same, train


def test_training_learns_and_writes_a_loadable_model(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    sections = changed(training={"epochs": 30, "warmup_epochs": 20}, pruning={"every": 5})
    metrics = train(tiny_artifacts, tmp_path / "out", sections)
    records = history(tmp_path / "out" / "model")
    assert [r["epoch"] for r in records] == list(range(1, 31))
    assert [r["phase"] for r in records] == ["warmup"] * 20 + ["retrain"] * 10
    assert records[-1]["task_loss"] < 0.5 * records[0]["task_loss"]
    assert records[-1]["terms"]["links.document"] < records[0]["terms"]["links.document"]
    assert metrics["rounds"] == 2 and metrics["val_p_at_1"] > 30
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu").encode(["chess rook"])
    assert vectors.shape == (1, 32)


def test_nothing_of_a_training_stays_in_memory(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    gc.collect()  # what other tests left
    gc.disable()  # Python may not get round to it in time: what waits are gigabytes in a handful of objects
    try:
        train(tiny_artifacts, tmp_path / "out", SECTIONS)
        assert not [each for each in gc.get_objects() if type(each) is Trainer]
    finally:
        gc.enable()


def test_the_same_seed_gives_the_same_artifact_and_another_seed_another(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_artifacts, tmp_path / name, changed(training={"seed": seed}))
    digests = [open_artifact(tmp_path / name / "model", "model").digest for name in "abc"]
    assert digests[0] == digests[1]
    assert not same(tmp_path / "a" / "model", tmp_path / "c" / "model")


def test_graphs_without_weights_and_negatives_are_the_base_bit_for_bit(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    train(tiny_artifacts, tmp_path / "base", changed(objective={"graphs": False}))
    nothing = {"lambda_document": 0.0, "lambda_label": 0.0, "graph_negatives": 0.0}
    train(tiny_artifacts, tmp_path / "zero", changed(objective=nothing))
    train(tiny_artifacts, tmp_path / "ramen")
    assert same(tmp_path / "base" / "model", tmp_path / "zero" / "model")
    assert not same(tmp_path / "base" / "model", tmp_path / "ramen" / "model")


def test_a_single_weight_overrides_its_sides_default(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    objective = {"lambda_document": 0.0, "lambda_label": 0.2, "lambdas": {"links.label": 0.0, "category.document": 0.5}}
    train(tiny_artifacts, tmp_path, changed(objective=objective))
    record = history(tmp_path / "model")[0]
    assert set(record["terms"]) == {"category.document", "category.label"}
    assert record["lambda"] == {
        "task": 1.0,
        "category.document": 0.5,
        "category.label": 0.2,
        "links.document": 0.0,
        "links.label": 0.0,
    }
    expected = (
        record["task_loss"] + 0.5 * record["terms"]["category.document"] + 0.2 * record["terms"]["category.label"]
    )
    assert record["loss"] == pytest.approx(expected, rel=1e-5)


def test_only_the_anchor_sets_asked_for_are_used(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    train(tiny_artifacts, tmp_path, changed(objective={"anchor_sets": ["links"]}))
    assert set(history(tmp_path / "model")[0]["terms"]) == {"links.document", "links.label"}
    assert set(read_graphs(tmp_path / "pruned_graph")) == {"links"}
    with pytest.raises(ConfigError, match=r"'link' is no anchor set of the dataset; anchor sets: category, links"):
        train(tiny_artifacts, tmp_path / "wrong", changed(objective={"anchor_sets": ["link"]}))


def test_graph_negatives_come_from_the_sets_asked_for_and_go_with_the_graphs(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    def losses(name: str, **objective: object) -> list[float]:
        regularised = {"lambda_document": 0.0, "lambda_label": 0.0}
        train(tiny_artifacts, tmp_path / name, changed(objective={**regularised, **objective}))
        return [record["loss"] for record in history(tmp_path / name / "model")]

    plain = losses("base", graphs=False)
    both, one = losses("both"), losses("one", negative_sets=["links"])
    assert both != plain and one != plain and both != one
    with pytest.raises(ConfigError, match=r"objective.negative_sets: 'link' is no anchor set of the dataset"):
        losses("wrong", negative_sets=["link"])


def test_pruning_starts_from_the_original_and_obeys_the_threshold(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    train(tiny_artifacts, tmp_path / "all", changed(pruning={"rule": "threshold", "threshold": 1.0}))
    pruned = read_graphs(tmp_path / "all" / "pruned_graph")
    held_out = set(split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))[0].tolist())
    for sides in pruned.values():
        assert sides["labels"].num_edges == 0
        assert set(sides["train"].rows().tolist()) <= held_out, "no step draws these, so they were never judged"
    train(tiny_artifacts, tmp_path / "none", changed(pruning={"rule": "none"}))
    whole, kept = read_graphs(tiny_artifacts["graph"]), read_graphs(tmp_path / "none" / "pruned_graph")
    for name, sides in whole.items():
        for side, graph in sides.items():
            np.testing.assert_array_equal(graph.indices, kept[name][side].indices)
    rounds = json.loads((tmp_path / "all" / "pruned_graph" / "rounds.json").read_text())
    assert [r["epoch"] for r in rounds] == [2, 3] and set(rounds[0]["edges_kept"].values()) == {0.0}


def test_pruning_stops_when_validation_stops_improving_and_training_goes_on(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a learning rate of nearly nothing never improves on the warm-up
    monkeypatch.setattr("ramen.training.pruning_rounds.CONVERGED_AT", 1.0)  # the graphs never converge
    train(tiny_artifacts, tmp_path, changed(training={"epochs": 8, "lr": 1e-12}, pruning={"patience": 3}))
    rounds = json.loads((tmp_path / "pruned_graph" / "rounds.json").read_text())
    assert [record["converged"] for record in rounds] == [False] * 3 + [True] * 3
    assert len(history(tmp_path / "model")) == 8


def test_held_out_documents_are_never_trained_on(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    held_out, kept = split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))
    assert len(held_out) == 6 and len(kept) == 54 and not set(held_out) & set(kept)
    train(tiny_artifacts, tmp_path)
    assert open_artifact(tmp_path / "model", "model").counts["documents"] == 54


def test_validation_ranks_labels_for_a_sample_of_many_held_out_documents(tiny_dataset: Dataset) -> None:
    rng = np.random.default_rng(0)
    labels = rng.standard_normal((30, 8)).astype(np.float32)
    held_out = np.arange(3, 43)
    whole = HeldOut.of(tiny_dataset, held_out, tiny_dataset.filter_train)
    assert whole.evenly_spaced(40) is whole
    part = whole.evenly_spaced(10)
    assert len({*part.rows}) == 10 and {*part.rows} < {*held_out}
    documents = rng.standard_normal((len(part), 8)).astype(np.float32)
    documents[:5] = 9 * labels[tiny_dataset.y_train[part.rows[:5]].toarray().argmax(1)]
    scores = np.where(tiny_dataset.filter_train[part.rows].toarray() > 0, -np.inf, documents @ labels.T)
    best = tiny_dataset.y_train[part.rows].toarray()[np.arange(10), scores.argmax(1)]
    assert part.quality(documents, labels).p_at_1 == pytest.approx(100 * best.mean())
    assert best.sum() >= 5


def test_labels_that_training_must_not_see_do_not_compete_for_held_out_documents(tiny_dataset: Dataset) -> None:
    problem = hide_labels(tiny_dataset, 0.3, seed=1)
    held_out = np.flatnonzero(np.diff(problem.y_train.indptr))
    documents = np.eye(30, dtype=np.float32)[problem.y_train[held_out].argmax(1).A1]
    labels = np.eye(30, dtype=np.float32)
    labels[problem.unseen] = 2.0  # first for every document
    assert HeldOut.of(problem, held_out, problem.filter_train).quality(documents, labels).p_at_1 == 100.0


def test_groups_are_held_out_whole(tiny_dataset: Dataset, tmp_path: Path) -> None:
    groups = np.repeat([0, 1, 2, 3, 4], [12, 4, 4, 20, 20])
    problem = replace(tiny_dataset, groups=groups)
    wanted = set()
    for seed in range(5):
        held_out, kept = split_held_out(problem, TrainingConfig(validation_fraction=0.2, seed=seed))
        assert not set(groups[held_out]) & set(groups[kept]) and sorted([*held_out, *kept]) == list(range(60))
        assert len(held_out) in (8, 12), "of 12 at most: one group of 12, or both of 4; 20 never fit"
        wanted.add(tuple(held_out))
    assert len(wanted) == 2, "the seed chooses"
    artifacts = on_disk(problem, tmp_path)
    train(artifacts, tmp_path, changed(training={"validation_fraction": 0.2}))
    assert open_artifact(tmp_path / "model", "model").counts["validation_documents"] in (8, 12)


def test_large_groups_are_held_out_last(tiny_dataset: Dataset) -> None:
    groups = np.concatenate([np.repeat([0, 1], 20), np.arange(2, 22)])
    problem = replace(tiny_dataset, groups=groups)
    for seed in range(10):
        held_out, _ = split_held_out(problem, TrainingConfig(validation_fraction=0.2, seed=seed))
        assert len(held_out) == 12 and groups[held_out].min() > 1, "20 documents of other groups suffice"
    large = replace(problem, groups=np.repeat([0, 1, 2], 20))
    assert len(split_held_out(large, TrainingConfig(validation_fraction=0.4))[0]) == 20, "there are only large groups"


def test_groups_too_large_to_be_held_out_are_told(
    tiny_dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    artifacts = on_disk(replace(tiny_dataset, groups=np.repeat([0, 1], 30)), tmp_path)
    train(artifacts, tmp_path, changed(training={"epochs": 2, "validation_fraction": 0.1}, pruning={"rule": "none"}))
    said = "warning: training.validation_fraction = 0.1 holds out no document (every group of documents is larger)"
    assert said in capfd.readouterr().err


def test_texts_cut_at_the_limit_are_told(
    tiny_dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = replace(tiny_dataset, labels=replace(tiny_dataset.labels, texts=["a b c " * 9] * len(tiny_dataset.labels)))
    for name, problem, told in (("short", tiny_dataset, False), ("long", long, True)):
        train(on_disk(problem, tmp_path / name), tmp_path / name, changed(training={"epochs": 2}))
        said = capfd.readouterr().err
        assert ("warning: encoder.max_length = 16 tokens truncates 100 % of labels" in said) == told
        assert ("truncates" in said) == told


@pytest.mark.parametrize(("stage", "after"), [("warmup", 1), ("prune-retrain", 2)])
def test_a_stopped_stage_goes_on_where_it_was_and_ends_bit_identical(
    stage: str, after: int, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    train(tiny_artifacts, tmp_path / "whole")
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    outputs = {"warm_model": tmp_path / "warm_model"}
    if stage == "prune-retrain":
        inputs["warm_model"] = tmp_path / "whole" / "warm_model"
        outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    with pytest.raises(Interrupted):
        run_stage(stage, sections=SECTIONS, inputs=inputs, outputs=outputs, track=StopAt(after))
    assert not any(path.exists() for path in outputs.values()), "nothing half-written"
    run_stage(stage, sections=SECTIONS, inputs=inputs, outputs=outputs)
    for name, path in outputs.items():
        assert open_artifact(path, name).digest == open_artifact(tmp_path / "whole" / name, name).digest
    assert not list((tmp_path / "ramen-work").iterdir()), "checkpoints are removed after success"


def test_no_held_out_document_is_an_anchor_in_training(tiny_dataset: Dataset, tmp_path: Path) -> None:
    # every label's anchors are its documents themselves: the edge to a held-out one is the very pair it validates
    own = AnchorSet(tiny_dataset.train, sp.identity(60, np.float32, "csr"), sp.csr_matrix(tiny_dataset.y_train.T))
    artifacts = on_disk(replace(tiny_dataset, anchor_sets={"pages": own}), tmp_path)
    train(artifacts, tmp_path, changed(training={"validation_fraction": 0.4}, pruning={"rule": "none"}))
    kept = split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.4))[1]
    used = set(read_graphs(tmp_path / "pruned_graph")["pages"]["labels"].indices.tolist())
    assert used <= set(kept.tolist()) and len(used) > 30


def test_labels_hidden_from_training_are_in_no_step(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = hide_labels(tiny_dataset, 0.4, seed=1)
    seen, plain = set[int](), Trainer.train_step

    def look(self: Trainer, step: Step) -> dict[str, float]:
        seen.update(step.labels.tolist())
        return plain(self, step)

    monkeypatch.setattr(Trainer, "train_step", look)
    train(on_disk(hidden, tmp_path), tmp_path, changed(base={"name": "ance", "refresh_from": 1, "random_labels": 1.0}))
    assert hidden.candidates is not None and seen == set(range(30)) - set(hidden.candidates.tolist())


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_documents_for_a_step_are_refused(tiny_dataset: Dataset, tmp_path: Path, count: int) -> None:
    y = tiny_dataset.y_train.tolil()
    y[count:] = 0
    artifacts = on_disk(replace(tiny_dataset, y_train=y.tocsr()), tmp_path)
    with pytest.raises(DataError, match=f"too few training documents with a label for a step: {count}, and 0 held out"):
        train(artifacts, tmp_path, changed(training={"validation_fraction": 0.0}))


def test_names_of_regularisers_that_are_none_are_refused(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lambdas.link.label: no such regulariser; did you mean links.label"):
        train(tiny_artifacts, tmp_path, changed(objective={"lambdas": {"link.label": 0.5}}))


def test_a_bandit_without_a_whole_window_is_refused(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bandit.period = 30: training has 16 steps"):
        train(tiny_artifacts, tmp_path, changed(bandit={"enabled": True}))


@pytest.mark.parametrize(
    ("section", "knobs", "says"),
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
def test_knobs_that_a_warmed_up_model_has_settled_are_refused(
    tiny_artifacts: dict[str, Path], tmp_path: Path, section: str, knobs: dict[str, Any], says: str
) -> None:
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    run_stage("warmup", sections=SECTIONS, inputs=inputs, outputs={"warm_model": tmp_path / "warm_model"})
    with pytest.raises(ConfigError, match=says):
        run_stage(
            "prune-retrain",
            sections=changed(**{section: knobs}),
            inputs={**inputs, "warm_model": tmp_path / "warm_model"},
            outputs={"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"},
        )


def test_a_graph_of_other_data_is_refused_before_anything_trains(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    names = tiny_dataset.labels.uids
    other = on_disk(replace(tiny_dataset, labels=Texts(names, [*names[1:], names[0]])), tmp_path / "other")
    mixed = {"dataset": tiny_artifacts["dataset"], "graph": other["graph"]}
    with pytest.raises(ArtifactError, match=r"was made from another dataset than .*; run `ramen build-graph` again"):
        run_stage("warmup", sections=SECTIONS, inputs=mixed, outputs={"warm_model": tmp_path / "warm_model"})
    train(other, tmp_path)
    mixed = {"dataset": other["dataset"], "model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    sections = {"encoder": SECTIONS["encoder"]}
    run_stage("evaluate", sections=sections, inputs=mixed, outputs={"evaluation": tmp_path / "evaluation"})
    mixed["dataset"] = tiny_artifacts["dataset"]
    with pytest.raises(ArtifactError, match=r"was made from another dataset than .*; run `ramen prune-retrain` again"):
        run_stage("evaluate", sections=sections, inputs=mixed, outputs={"evaluation": tmp_path / "again"})


def test_a_bandit_without_anyone_to_judge_it_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    y = tiny_dataset.y_train.tolil()
    y[split_held_out(tiny_dataset, TrainingConfig(validation_fraction=0.1))[0]] = 0
    artifacts = on_disk(replace(tiny_dataset, y_train=y.tocsr()), tmp_path)
    with pytest.raises(ConfigError, match=r"held-out document with a label.*raise training.validation_fraction"):
        train(artifacts, tmp_path, changed(bandit={"enabled": True}))


def test_a_loss_that_is_not_finite_stops_with_the_step(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.training.step_loss.weighted_sum", lambda terms, weights: terms["task"] * torch.inf)
    with pytest.raises(RamenError, match=r"loss is (inf|nan) at step 0 .*training\.lr"):
        train(tiny_artifacts, tmp_path, changed())


def test_a_folder_with_a_limit_of_its_own_is_cut_where_the_knob_says(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """As the same weights are by their name: a model of sentence-transformers says 256 or 512 tokens of itself."""
    load_encoder("tiny", EncoderConfig(name="tiny", max_length=16)).save(tmp_path / "start")
    train(tiny_artifacts, tmp_path, changed(encoder={"name": str(tmp_path / "start"), "max_length": 8}))
    for name in ("warm_model", "model"):
        said = json.loads((tmp_path / name / SETTINGS_FILE).read_text())
        assert said["max_seq_length"] == 8


def test_model_of_older_version_is_refused_in_one_line(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    warm = tmp_path / "warm_model"
    run_stage("warmup", sections=SECTIONS, inputs=inputs, outputs={"warm_model": warm})
    manifest = json.loads((warm / "manifest.json").read_text())
    base = manifest["sections"]["base"]
    del base["dexa"]
    base |= {"labels_per_offset": 3, "offset_heads": 1000}
    (warm / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="written by an older version, .*; run `ramen warmup` again") as error:
        run_stage(
            "prune-retrain",
            sections=SECTIONS,
            inputs={**inputs, "warm_model": warm},
            outputs={"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"},
        )
    assert len(str(error.value).splitlines()) == 1


def test_the_rate_rises_then_falls_to_nothing() -> None:
    at = linear_schedule(4, 12)
    assert [at(step) for step in range(13)] == pytest.approx([0.25, 0.5, 0.75, 1, *np.arange(8, -1, -1) / 8])
    assert linear_schedule(50, 10)(4) == 1 and linear_schedule(50, 10)(0) == 0.2, "half of all steps at most"


def test_biases_norms_and_label_offsets_do_not_decay() -> None:
    encoder, offsets = load_encoder("tiny", EncoderConfig(name="tiny", precision="fp32")), torch.nn.Embedding(3, 4)
    decayed, free = make_optimizer(encoder, offsets, 1e-3, 0.01).param_groups
    assert decayed["weight_decay"] == 0.01 and free["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    plain = {names.get(id(parameter), "offsets") for parameter in free["params"]}
    assert plain == {name for name in names.values() if name.endswith("bias") or "norm" in name.lower()} | {"offsets"}


def test_a_long_step_is_clipped(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: dict[float, list[float]] = {math.inf: [], 0.01: []}
    for norm, found in norms.items():

        def look(self: torch.optim.AdamW, *_: object, found: list[float] = found) -> None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            found.append(float(torch.nn.utils.get_total_norm(gradients)))

        monkeypatch.setattr(torch.optim.AdamW, "step", look)
        monkeypatch.setattr("ramen.training.trainer.CLIP_NORM", norm)
        train(tiny_artifacts, tmp_path / str(norm))
    assert max(norms[0.01]) == pytest.approx(0.01, rel=1e-3) and max(norms[math.inf]) > 0.1


def test_the_bandits_perturbations_switch_no_regulariser_off(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 0.1 less a perturbation of 0.1 is 0, for a window; the next one may want it."""
    monkeypatch.setattr("ramen.objective.bandit.LAMBDA_MIN", 0.0)
    bandit = {"enabled": True, "period": 4, "feedback": "task_loss"}
    sections = changed(bandit=bandit, training={**SECTIONS["training"], "seed": 2})
    train(tiny_artifacts, tmp_path / "out", sections)
    assert all(len(record["terms"]) == 4 for record in history(tmp_path / "out" / "model"))
    # and stopped in the middle of a round, it ends as it would have
    plain, steps = Trainer.train_step, 0

    def stop(self: Trainer, step: Step) -> dict[str, float]:
        nonlocal steps
        steps += 1
        if steps == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, step)

    monkeypatch.setattr(Trainer, "train_step", stop)
    with pytest.raises(Interrupted):
        train(tiny_artifacts, tmp_path / "stopped", sections)
    train(tiny_artifacts, tmp_path / "stopped", sections, again=False)
    assert same(tmp_path / "out" / "model", tmp_path / "stopped" / "model")


def test_pairs_that_do_not_count_are_not_learnt(tiny_dataset: Dataset) -> None:
    y, ignored = tiny_dataset.y_train, tiny_dataset.y_train.copy().tolil()
    ignored[1:] = 0
    problem = replace(tiny_dataset, filter_train=ignored.tocsr())
    assert y[0].nnz and not problem.positives[0].nnz
    np.testing.assert_array_equal(problem.positives[1:].toarray(), y[1:].toarray())


def test_weights_of_sets_that_are_left_out_are_refused(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    objective = {"lambdas": {"links.label": 0.5}, "anchor_sets": ["category"]}
    with pytest.raises(ConfigError, match=r"lambdas\.links\.label: no such regulariser of objective\.anchor_sets"):
        train(tiny_artifacts, tmp_path, changed(objective=objective))
