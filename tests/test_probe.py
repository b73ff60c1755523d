"""`ramen probe` on two graphs: one with information that the texts lack, and a random one."""

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


def make_one_hot(columns: np.ndarray, width: int) -> sp.csr_matrix:
    rows = np.arange(len(columns))
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(rows), width))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Label texts are codes. Anchors in `informative` name the topic of a label; edges of `noise` are random."""
    folder = tmp_path_factory.mktemp("artifacts")
    rng = np.random.default_rng(0)
    topic = rng.integers(0, LABELS, DOCUMENTS)
    y, empty = make_one_hot(topic, LABELS), sp.csr_matrix((DOCUMENTS, LABELS), dtype=np.float32)
    anchors = Texts([f"a{i}" for i in range(LABELS)], [f"about {word}" for word in WORDS])
    informative = AnchorSet(anchors, y, sp.identity(LABELS, np.float32, "csr"), y[:40])
    noise = replace(
        informative, texts=Texts([f"n{i}" for i in range(LABELS)], anchors.texts), test=y[:40],
        train=make_one_hot(rng.integers(0, LABELS, DOCUMENTS), LABELS),
        labels=make_one_hot(rng.permutation(LABELS), LABELS),
    )  # fmt: skip
    dataset = Dataset(
        Texts([f"d{i}" for i in range(DOCUMENTS)], [f"{WORDS[t]} {WORDS[t]} shop" for t in topic]),
        Texts([f"t{i}" for i in range(40)], [f"{WORDS[t]} shop" for t in topic[:40]]),
        Texts([f"l{i}" for i in range(LABELS)], [f"x{i * 37 % 101}q" for i in range(LABELS)]),
        y, y[:40], empty, empty[:40], {"noise": noise, "informative": informative},
    )  # fmt: skip
    return on_disk(dataset, folder)


def make_config(*sets: str) -> Config:
    return resolve(sets=["encoder.name=minilm", "training.validation_fraction=0.4", *sets])


@pytest.mark.slow
def test_informative_graph_gains_and_random_graph_does_not(artifacts: dict[str, Path]) -> None:
    opened = [open_artifact(artifacts[name], name) for name in ("dataset", "graph")]
    text_only, results = probe(opened[0], opened[1], None, make_config(), on_test=False)
    informative, noise = results["informative"], results["noise"]
    assert text_only["p_at_1"] < 30, "the texts have no information on the labels"
    gain = informative.gains["labels"]["p_at_1"]
    assert text_only["p_at_1"] + gain.points > 80 and gain.points > 10 * gain.error
    assert noise.gains["labels"]["p_at_1"].points < 20
    assert (informative.documents, informative.labels, informative.true, informative.missed) == (100, 100, 100, 100)
    assert informative.chance == pytest.approx(100 / LABELS, abs=4), "one of 16 labels has the same anchor"
    assert informative.mistaken == 0 and noise.true < 30


def test_held_out_documents_rank_only_labels_seen_in_training(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """In a zero-shot dataset, held-out documents only have seen labels; test documents only unseen ones."""
    hidden = on_disk(hide_labels(Dataset.read(artifacts["dataset"]), 0.3, seed=0), tmp_path)
    opened = [open_artifact(hidden[name], name) for name in ("dataset", "graph")]
    text_only, results = probe(opened[0], opened[1], None, make_config(), on_test=False)
    gain = results["informative"].gains["labels"]["p_at_1"].points
    assert text_only["p_at_1"] + gain > 60, "3 in 10 have no label"


def test_errors_are_clustered_by_the_groups_of_the_probed_documents(artifacts: dict[str, Path], tmp_path: Path) -> None:
    dataset = Dataset.read(artifacts["dataset"])
    groups = {"groups": dataset.y_train.indices % 4, "test_groups": dataset.y_test.indices}  # by topic
    grouped = on_disk(replace(dataset, **groups), tmp_path)

    def gain(paths: dict[str, Path], on_test: bool) -> Gain:
        opened = [open_artifact(paths[name], name) for name in ("dataset", "graph")]
        results = probe(opened[0], opened[1], None, make_config("encoder.name=tiny"), on_test=on_test)[1]
        return results["informative"].gains["labels"]["p_at_1"]

    plain, clustered = gain(artifacts, on_test=True), gain(grouped, on_test=True)
    assert plain.points == clustered.points and plain.error and clustered.error and clustered.error > 1.2 * plain.error
    assert gain(artifacts, on_test=False).error
    assert gain(grouped, on_test=False).error is None, "a single group is held out"


def test_test_documents_are_probed_with_their_raw_edges_only_on_request(artifacts: dict[str, Path]) -> None:
    opened = [open_artifact(artifacts[name], name) for name in ("dataset", "graph")]
    results = probe(opened[0], opened[1], None, make_config("training.validation_fraction=0"), on_test=True)[1]
    assert results["informative"].true == 100 and set(results["informative"].gains) == {"labels", "documents", "both"}
    with pytest.raises(DataError, match="no held-out document to probe; set training.validation_fraction above 0"):
        probe(opened[0], opened[1], None, make_config("training.validation_fraction=0"), on_test=False)


def test_held_out_documents_are_those_of_the_model_not_of_the_config(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    training = {"epochs": 2, "warmup_epochs": 1, "validation_fraction": 0.4, "seed": 3}
    train(artifacts, tmp_path, changed(training=training))
    opened = [open_artifact(artifacts[name], name) for name in ("dataset", "graph")]
    model = open_artifact(tmp_path / "model", "model")
    text_only, _ = probe(opened[0], opened[1], model, make_config("training.seed=3"), on_test=False)
    same, _ = probe(opened[0], opened[1], model, make_config("training.validation_fraction=0"), on_test=False)
    assert text_only == same
    moved = tmp_path / "other" / "dataset"
    other = on_disk(replace(Dataset.read(artifacts["dataset"]), y_test=sp.csr_matrix((40, LABELS))), moved.parent)
    with pytest.raises(ArtifactError, match="was not trained on .*probe the test documents with --test"):
        probe(open_artifact(other["dataset"], "dataset"), opened[1], model, make_config(), on_test=False)


def test_graph_of_another_dataset_is_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    other = on_disk(replace(Dataset.read(artifacts["dataset"]), y_test=sp.csr_matrix((40, LABELS))), tmp_path)
    command = ["probe", f"--dataset={artifacts['dataset']}", f"--graph={other['graph']}", "--set=encoder.name=tiny"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 4 and "was made from another dataset than" in result.output


def test_command_prints_tables_and_json(artifacts: dict[str, Path]) -> None:
    command = ["probe", *(f"--{name}={path}" for name, path in artifacts.items()), "--set=encoder.name=tiny"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0 and "wrong first labels" in result.output and "informative" in result.output
    output = json.loads(CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False).stdout)
    assert set(output["sets"]["informative"]["gains"]["labels"]["p_at_1"]) == {"points", "error"}
