"""`ramen probe` on planted graphs: one that knows what the texts do not say, one drawn at random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner
from on_disk import on_disk

from ramen.artifacts import open_artifact
from ramen.cli import cli
from ramen.config import Config, resolve
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.data.subset import hide_labels
from ramen.errors import ArtifactError, DataError
from ramen.evaluation.uncertainty import Gain
from ramen.probe import probe

from training_recipe import changed, train

WORDS = [
    "apple", "bridge", "cloud", "desk", "engine", "forest", "glass", "harbor",
    "island", "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil",
]  # fmt: skip
LABELS, DOCUMENTS = 16, 300


def one_each(columns: np.ndarray, width: int) -> sp.csr_matrix:
    rows = np.arange(len(columns))
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(rows), width))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Labels have code names. Anchors of `told` say what a label is about, those of `noise` are dealt at random."""
    folder = tmp_path_factory.mktemp("planted")
    rng = np.random.default_rng(0)
    topic = rng.integers(0, LABELS, DOCUMENTS)
    y, empty = one_each(topic, LABELS), sp.csr_matrix((DOCUMENTS, LABELS), dtype=np.float32)
    anchors = Texts([f"a{i}" for i in range(LABELS)], [f"about {word}" for word in WORDS])
    told = AnchorSet(anchors, y, sp.identity(LABELS, np.float32, "csr"), y[:40])
    noise = replace(
        told, texts=Texts([f"n{i}" for i in range(LABELS)], anchors.texts), test=y[:40],
        train=one_each(rng.integers(0, LABELS, DOCUMENTS), LABELS), labels=one_each(rng.permutation(LABELS), LABELS),
    )  # fmt: skip
    problem = Dataset(
        Texts([f"d{i}" for i in range(DOCUMENTS)], [f"{WORDS[t]} {WORDS[t]} shop" for t in topic]),
        Texts([f"t{i}" for i in range(40)], [f"{WORDS[t]} shop" for t in topic[:40]]),
        Texts([f"l{i}" for i in range(LABELS)], [f"x{i * 37 % 101}q" for i in range(LABELS)]),
        y, y[:40], empty, empty[:40], {"noise": noise, "told": told},
    )  # fmt: skip
    return on_disk(problem, folder)


def settings(*sets: str) -> Config:
    return resolve(sets=["encoder.name=minilm", "training.validation_fraction=0.4", *sets])


def test_the_graph_that_knows_more_gains_and_noise_does_not(planted: dict[str, Path]) -> None:
    opened = [open_artifact(planted[name], name) for name in ("dataset", "graph")]
    text, said = probe(opened[0], opened[1], None, settings(), on_test=False)
    told, noise = said["told"], said["noise"]
    assert text["p_at_1"] < 30, "the texts alone say nothing"
    gain = told.gains["labels"]["p_at_1"]
    assert text["p_at_1"] + gain.points > 80 and gain.points > 10 * gain.error
    assert noise.gains["labels"]["p_at_1"].points < 20
    assert (told.documents, told.labels, told.true, told.missed) == (100, 100, 100, 100)
    assert told.chance == pytest.approx(100 / LABELS, abs=4), "one of 16 labels shares the anchor"
    assert told.mistaken == 0 and noise.true < 30


def test_held_out_documents_are_asked_for_labels_that_training_may_see(
    planted: dict[str, Path], tmp_path: Path
) -> None:
    """Of a zero-shot problem they have no others, while at test only unseen labels compete."""
    hidden = on_disk(hide_labels(Dataset.read(planted["dataset"]), 0.3, seed=0), tmp_path)
    opened = [open_artifact(hidden[name], name) for name in ("dataset", "graph")]
    text, said = probe(opened[0], opened[1], None, settings(), on_test=False)
    assert text["p_at_1"] + said["told"].gains["labels"]["p_at_1"].points > 60, "three in ten have no label left"


def test_errors_are_clustered_by_the_groups_of_the_documents_asked(planted: dict[str, Path], tmp_path: Path) -> None:
    problem = Dataset.read(planted["dataset"])
    groups = {"groups": problem.y_train.indices % 4, "test_groups": problem.y_test.indices}  # by topic
    grouped = on_disk(replace(problem, **groups), tmp_path)

    def gain(paths: dict[str, Path], on_test: bool) -> Gain:
        opened = [open_artifact(paths[name], name) for name in ("dataset", "graph")]
        said = probe(opened[0], opened[1], None, settings("encoder.name=tiny"), on_test=on_test)[1]
        return said["told"].gains["labels"]["p_at_1"]

    plain, clustered = gain(planted, on_test=True), gain(grouped, on_test=True)
    assert plain.points == clustered.points and plain.error and clustered.error and clustered.error > 1.2 * plain.error
    assert gain(planted, on_test=False).error
    assert gain(grouped, on_test=False).error is None, "one whole group is held out"


def test_test_documents_are_asked_with_their_own_edges_only_on_request(planted: dict[str, Path]) -> None:
    opened = [open_artifact(planted[name], name) for name in ("dataset", "graph")]
    said = probe(opened[0], opened[1], None, settings("training.validation_fraction=0"), on_test=True)[1]
    assert said["told"].true == 100 and set(said["told"].gains) == {"labels", "documents", "both"}
    with pytest.raises(DataError, match="no held-out document to ask; set training.validation_fraction above 0"):
        probe(opened[0], opened[1], None, settings("training.validation_fraction=0"), on_test=False)


def test_a_model_is_asked_what_it_has_not_seen_whatever_the_caller_says(
    planted: dict[str, Path], tmp_path: Path
) -> None:
    train(planted, tmp_path, changed(training={"epochs": 2, "warmup_epochs": 1, "validation_fraction": 0.4, "seed": 3}))
    opened = [open_artifact(planted[name], name) for name in ("dataset", "graph")]
    model = open_artifact(tmp_path / "model", "model")
    text, _ = probe(opened[0], opened[1], model, settings("training.seed=3"), on_test=False)
    again, _ = probe(opened[0], opened[1], model, settings("training.validation_fraction=0"), on_test=False)
    assert text == again
    moved = tmp_path / "other" / "dataset"
    other = on_disk(replace(Dataset.read(planted["dataset"]), y_test=sp.csr_matrix((40, LABELS))), moved.parent)
    with pytest.raises(ArtifactError, match="was not trained on .*ask the test documents with --test"):
        probe(open_artifact(other["dataset"], "dataset"), opened[1], model, settings(), on_test=False)


def test_a_graph_of_other_data_is_refused(planted: dict[str, Path], tmp_path: Path) -> None:
    other = on_disk(replace(Dataset.read(planted["dataset"]), y_test=sp.csr_matrix((40, LABELS))), tmp_path)
    words = ["probe", f"--dataset={planted['dataset']}", f"--graph={other['graph']}", "--set=encoder.name=tiny"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 4 and "was made from another dataset than" in done.output


def test_the_command_prints_both_tables_and_json(planted: dict[str, Path]) -> None:
    words = ["probe", *(f"--{name}={path}" for name, path in planted.items()), "--set=encoder.name=tiny"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0 and "labels put first by mistake" in done.output and "told" in done.output
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).stdout)
    assert set(found["sets"]["told"]["gains"]["labels"]["p_at_1"]) == {"points", "error"}
