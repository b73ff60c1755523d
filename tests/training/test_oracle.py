"""MOGIC's oracle through both training stages: what it reads, what it brings, what is left of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import graphs_of

from ramen.artifacts import create_drafts, open_artifact
from ramen.data.dataset import AnchorSet, Dataset
from ramen.errors import ConfigError, Interrupted
from ramen.graph.metadata import read_graphs, write_graphs
from ramen.stages import run_stage
from ramen.training.oracle import FILES, add_anchor_texts, read_oracle
from ramen.training.trainer import Trainer

from training_recipe import changed, history, same, train

WITH = {"enabled": True, "epochs": 3, "max_length": 24}


def read(problem: Dataset, artifacts: dict[str, Path], most: int = 24, seed: int = 0) -> Dataset:
    return add_anchor_texts(problem, read_graphs(artifacts["graph"]), "inverse_sqrt_degree", most, seed)


def test_it_reads_each_text_and_its_anchors_and_no_name_of_a_match(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path]
) -> None:
    seen = read(tiny_dataset, tiny_artifacts)
    assert seen.train.uids == tiny_dataset.train.uids and seen.labels.uids == tiny_dataset.labels.uids
    category, links = tiny_dataset.anchor_sets["category"], tiny_dataset.anchor_sets["links"]
    for side, ours, theirs in (
        ("train", seen.train.texts, tiny_dataset.train.texts),
        ("labels", seen.labels.texts, tiny_dataset.labels.texts),
    ):
        for row, (long, short) in enumerate(zip(ours, theirs, strict=True)):
            assert long.startswith(short)
            wanted = [
                anchors.texts.texts[a] for anchors in (category, links) for a in getattr(anchors, side)[row].indices
            ]
            rest = long[len(short) :]
            assert sorted(rest.split()) == sorted(" ".join(wanted).split()), row
    assert seen.test == tiny_dataset.test


def test_a_document_does_not_read_its_labels_nor_a_label_its_documents(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path]
) -> None:
    # the anchors are the labels, or the documents, themselves: every link of a document is one of its labels
    labels, documents = tiny_dataset.labels, tiny_dataset.train
    n, m = len(documents), len(labels)
    sets = {
        "labels": AnchorSet(labels, tiny_dataset.y_train, sp.csr_matrix((m, m), dtype=np.float32)),
        "documents": AnchorSet(
            documents, sp.csr_matrix((n, n), dtype=np.float32), sp.csr_matrix(tiny_dataset.y_train.T)
        ),
    }
    problem = replace(tiny_dataset, anchor_sets=sets)
    seen = add_anchor_texts(problem, graphs_of(problem), "uniform", 24, 0)
    assert seen.train.texts == documents.texts and seen.labels.texts == labels.texts


def test_the_order_of_anchors_is_the_seeds_and_long_lists_are_cut(
    tiny_dataset: Dataset, tiny_artifacts: dict[str, Path]
) -> None:
    one, again, other = (read(tiny_dataset, tiny_artifacts, seed=seed).train.texts for seed in (0, 0, 1))
    assert one == again and one != other
    cut = read(tiny_dataset, tiny_artifacts, most=1).train.texts
    for text, short, long in zip(tiny_dataset.train.texts, cut, one, strict=True):
        # the first of several is all that is left
        assert long.startswith(short) and short.startswith(text) and len(text) < len(short)
    assert sum(map(len, cut)) < sum(map(len, one))


def test_it_reads_as_much_as_asked_from_a_folder_that_reads_less(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_artifacts, tmp_path / "plain")  # a folder whose own limit is 16 tokens
    seen: list[tuple[int, int]] = []

    def record(self: Trainer) -> None:
        seen.append((self.encoder.settings.max_length, int(self.inputs.texts.store.lengths.max())))
        resume(self)

    resume = Trainer.resume
    monkeypatch.setattr(Trainer, "resume", record)
    train(tiny_artifacts, tmp_path / "guided", changed(encoder={"name": str(tmp_path / "plain/model")}, guidance=WITH))
    assert [length for length, _ in seen] == [24, 16, 16] and seen[0][1] > 16


def test_without_weights_the_encoder_is_what_it_is_without_an_oracle(
    tiny_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    train(tiny_artifacts, tmp_path / "plain")
    nothing = {"align_documents": 0.0, "align_labels": 0.0, "match_documents": 0.0, "match_labels": 0.0}
    train(tiny_artifacts, tmp_path / "deaf", changed(guidance={**WITH, **nothing}))
    train(tiny_artifacts, tmp_path / "guided", changed(guidance=WITH))
    assert same(tmp_path / "plain" / "model", tmp_path / "deaf" / "model")
    assert not same(tmp_path / "plain" / "model", tmp_path / "guided" / "model")
    terms = history(tmp_path / "guided" / "model")[-1]["terms"]
    assert {"align_documents", "align_labels", "match_documents", "match_labels"} < set(terms)


def test_nothing_of_the_oracle_is_in_the_model(tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    train(tiny_artifacts, tmp_path / "plain")
    train(tiny_artifacts, tmp_path / "guided", changed(guidance=WITH))
    files = {
        name: {file.relative_to(tmp_path / name).as_posix() for file in (tmp_path / name).rglob("*") if file.is_file()}
        for name in ("plain", "guided")
    }
    assert files["guided"] - files["plain"] == {f"warm_model/{file}" for file in FILES.values()}
    oracle = read_oracle(tmp_path / "guided" / "warm_model")
    assert oracle.documents.shape == (60, 32) and oracle.labels.shape == (30, 32)
    np.testing.assert_allclose(np.linalg.norm(np.float32(oracle.labels), axis=1), 1.0, atol=1e-2)


def test_stopped_while_the_oracle_learns_and_after_it_ends_bit_identical(
    tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = changed(guidance=WITH)
    train(tiny_artifacts, tmp_path / "whole", sections)
    plain, seen, stops = Trainer.train_step, 0, {5, 17}

    def stop(self: Trainer, step: object) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen in stops:
            self.interrupted = True
        return plain(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", stop)
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    for _ in range(2):
        with pytest.raises(Interrupted):
            run_stage("warmup", sections=sections, inputs=inputs, outputs={"warm_model": tmp_path / "warm_model"})
    train(tiny_artifacts, tmp_path, sections)
    for artifact in ("warm_model", "model"):
        theirs = open_artifact(tmp_path / "whole" / artifact, artifact)
        assert open_artifact(tmp_path / artifact, artifact).digest == theirs.digest, artifact


def test_what_only_the_oracle_reads_reaches_the_encoder(planting: ModuleType, tmp_path: Path) -> None:
    data = planting.write(planting.planted(), tmp_path / "data")
    base, _ = planting.train(data, tmp_path / "base", planting.ROWS["base"], 2, 40)
    guided, _ = planting.train(data, tmp_path / "guided", planting.ROWS["read by an oracle"], 2, 40)
    assert guided > base + 4


def test_what_cannot_be_is_said(tiny_dataset: Dataset, tiny_artifacts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"guidance.anchor_sets: 'link' is no anchor set of the dataset"):
        train(tiny_artifacts, tmp_path / "wrong", changed(guidance={**WITH, "anchor_sets": ["link"]}))
    train(tiny_artifacts, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"guidance.enabled = True: .*warm_model was warmed up with False"):
        run_stage(
            "prune-retrain",
            sections=changed(guidance=WITH),
            inputs={**tiny_artifacts, "warm_model": tmp_path / "plain" / "warm_model"},
            outputs={"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"},
        )
    bare = {name: tmp_path / f"bare-{name}" for name in ("dataset", "graph")}
    with create_drafts(bare, sections={}, inputs={}, work=tmp_path / "work") as made:
        replace(tiny_dataset, anchor_sets={}).write(made["dataset"].path)
        write_graphs(made["graph"].path, {})
    with pytest.raises(ConfigError, match="the dataset has no anchor sets"):
        train(bare, tmp_path / "none", changed(guidance=WITH))
