"""Label context: informative sets get a share, others do not, and the label vectors change accordingly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import on_disk
from scipy.stats import rankdata, ttest_rel

from ramen.config import EncoderConfig, TrainingConfig
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors, has_context_or_classifier
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import SentenceEncoder
from ramen.training.heldout import HeldOut, split_held_out
from ramen.training.labels.context import PARSIMONY, PRIOR, choose_share, compare_context_shares
from ramen.training.labels.selection import FEWEST, SelectionSample
from ramen.training.trainer import Trainer

from training_recipe import changed, run_retraining, run_warmup, train

WORDS = [
    "apple", "bridge", "cloud", "desk", "engine", "forest", "glass", "harbor",
    "island", "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil",
]  # fmt: skip
LABEL_TEXTS = [f"x{i * 37 % 101}q" for i in range(len(WORDS))]
RECIPE = changed(
    encoder={"name": "minilm"},
    objective={"label_context": "anchors"},
    base={"random_labels": 0.5},  # without random labels, noise may look like a gain: there are only 16 texts
    training={"lr": 1e-6, "epochs": 2, "validation_fraction": 0.4},
    pruning={"rule": "none"},
)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artifacts `dataset`, `graph` and `warm_model`; do not modify them.

    The texts of the labels are codes. Each anchor of the set `topic` describes one label, the set `noise` links labels
    to random descriptions.
    """
    rng = np.random.default_rng(0)
    labels = Texts([f"l{i}" for i in range(16)], LABEL_TEXTS)
    topic = rng.integers(0, 16, 200)
    texts = [f"{WORDS[t]} {WORDS[t]} shop" for t in topic]
    y = sp.csr_matrix((np.ones(200, np.float32), (np.arange(200), topic)), shape=(200, 16))
    empty = sp.csr_matrix((200, 16), dtype=np.float32)
    descriptions = [f"about {word}" for word in WORDS]
    informative = AnchorSet(
        Texts([f"a{i}" for i in range(16)], descriptions), empty, sp.identity(16, np.float32, "csr")
    )
    shuffled = sp.csr_matrix((np.ones(16, np.float32), (np.arange(16), rng.permutation(16))), shape=(16, 16))
    noise = replace(informative, texts=Texts([f"n{i}" for i in range(16)], descriptions), labels=shuffled)
    dataset = Dataset(
        Texts([f"d{i}" for i in range(200)], texts), Texts(["t0"], ["apple shop"]), labels, y, y[:1], empty, empty[:1],
        {"noise": noise, "topic": informative},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("coded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAMEN_WORK", str(folder / "ramen-work"))
        artifacts = on_disk(dataset, folder)
        run_warmup(artifacts, folder, RECIPE)
    return artifacts | {"warm_model": folder / "warm_model"}


def retrain(coded: dict[str, Path], out: Path, **objective: object) -> dict[str, float]:
    """Run the stage `prune-retrain` with other settings of the section `objective`, and return its metrics."""
    sections = RECIPE | {"objective": RECIPE["objective"] | objective}
    return run_retraining(coded, coded["warm_model"], out, sections)


def load_labels(model: Path) -> tuple[SentenceEncoder, np.ndarray]:
    """Return the encoder of a model, and its label vectors without context."""
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    return encoder, encode_labels(encoder, model, LABEL_TEXTS)


def normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.slow
def test_informative_set_gets_a_share_and_noise_does_not(coded: dict[str, Path], tmp_path: Path) -> None:
    metrics = retrain(coded, tmp_path)
    assert metrics["context/topic"] > 0 and metrics["context/noise"] == 0
    assert has_context_or_classifier(tmp_path / "model")
    encoder, labels = load_labels(tmp_path / "model")
    with_context = fuse_label_vectors(tmp_path / "model", labels)
    descriptions = encoder.encode([f"about {word}" for word in WORDS])
    np.testing.assert_allclose(with_context, normalise(labels + metrics["context/topic"] * descriptions), atol=1e-4)
    queries = encoder.encode([f"{word} shop" for word in WORDS])
    before, after = (
        float(((queries @ vectors.T).argmax(1) == np.arange(16)).mean()) for vectors in (labels, with_context)
    )
    assert before < 0.3 and after > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("objective", [{"label_context": "none"}, {"graphs": False}, {"anchor_sets": ["noise"]}])
def test_no_label_context_when_off_or_without_information(
    coded: dict[str, Path], tmp_path: Path, objective: dict[str, object]
) -> None:
    retrain(coded, tmp_path, **objective)
    assert not has_context_or_classifier(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["anchors", "both"])
def test_no_label_context_without_held_out_documents(coded: dict[str, Path], tmp_path: Path, kind: str) -> None:
    train(coded, tmp_path, changed(**RECIPE | {
        "objective": {"label_context": kind}, "training": {**RECIPE["training"], "validation_fraction": 0.0}
    }))  # fmt: skip
    assert not has_context_or_classifier(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [0, 1, FEWEST - 1, FEWEST])
def test_shares_are_not_chosen_on_few_labelled_held_out_documents(
    coded: dict[str, Path], tmp_path: Path, labelled: int, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = Dataset.read(coded["dataset"])
    held_out, _ = split_held_out(dataset, TrainingConfig.model_validate(RECIPE["training"]))
    y = dataset.y_train.tolil()
    y[held_out[labelled:]] = 0
    artifacts = on_disk(replace(dataset, y_train=y.tocsr()), tmp_path)
    ngame = {"base": {"name": "ngame", "random_labels": 0.5}, "classifier": {"epochs": 1}}
    metrics = train(artifacts, tmp_path, RECIPE | ngame)
    log = capfd.readouterr().err
    reason = f": {labelled} held-out documents have a label, {FEWEST} are needed; raise training.valid"
    enough = labelled == FEWEST
    assert ("warning: no label context" + reason in log) == (not enough)
    assert ("warning: the classifiers' share is 0.5" + reason in log) == (not enough)
    assert (metrics.get("context/topic", 0) > 0) == enough
    assert enough or metrics["classifier/share"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_training_documents_get_a_share(coded: dict[str, Path], tmp_path: Path, graphs: bool) -> None:
    metrics = retrain(coded, tmp_path, label_context="documents", graphs=graphs)
    assert metrics["context/training_documents"] > 0 and "context/topic" not in metrics
    encoder, labels = load_labels(tmp_path / "model")
    # all documents of a label have the same text, so any of them is their mean; its share grows with their number
    count = np.asarray(Dataset.read(coded["dataset"]).y_train.sum(0)).reshape(-1, 1)
    assert count.min() < count.max()
    share = metrics["context/training_documents"] * count / (count + PRIOR)
    expected = normalise(labels + share * encoder.encode([f"{word} {word} shop" for word in WORDS]))
    np.testing.assert_allclose(fuse_label_vectors(tmp_path / "model", labels), expected, atol=1e-4)


@pytest.mark.slow
def test_set_that_repeats_the_documents_gets_no_share(coded: dict[str, Path], tmp_path: Path) -> None:
    metrics = retrain(coded, tmp_path, label_context="both")
    assert metrics["context/training_documents"] > 0 and metrics["context/topic"] == metrics["context/noise"] == 0


def test_smallest_share_close_to_the_best_is_chosen_and_chance_gains_are_not() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.05, (3, 400))
    noise -= noise.mean(1, keepdims=True)  # makes the differences of the means exact
    zero = rng.random(400)
    half, best, lucky = zero + 0.1 + noise[0], zero + 0.101 + noise[1], zero + 0.002 + noise[2]
    assert ttest_rel(best, half).pvalue > 0.3 and ttest_rel(lucky, zero).pvalue > 0.3
    gain = np.stack([zero, half, best])
    assert choose_share(gain, -gain, PARSIMONY) == 1 and choose_share(gain, -gain, 0.0) == 2
    gain = np.stack([zero, lucky])
    assert choose_share(gain, -gain, 0.0) == choose_share(gain, -gain, PARSIMONY) == 0
    gain = np.stack([zero, half])
    assert choose_share(gain, np.zeros_like(gain), PARSIMONY) == 0, "the log rank must improve as well"


@pytest.mark.slow
def test_classifiers_are_fused_with_context_without_held_out_documents(
    coded: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the classifiers is chosen on the held-out documents, so the vectors must not contain them."""
    calls: list[tuple[np.ndarray, np.ndarray]] = []

    def record_call(trainer: Trainer, *arguments: np.ndarray) -> None:
        calls.append((trainer.inputs.held_out.rows, arguments[-1]))

    monkeypatch.setattr("ramen.training.stage.train_classifiers", record_call)
    metrics = retrain(coded, tmp_path, label_context="documents", graphs=False)
    ((held_out, vectors),) = calls
    encoder, labels = load_labels(tmp_path / "model")
    y = Dataset.read(coded["dataset"]).y_train
    count = np.asarray(y.sum(0) - y[held_out].sum(0)).reshape(-1, 1)
    share = metrics["context/training_documents"] * count / (count + PRIOR)
    assert share.min() > 0
    expected = normalise(labels + share * encoder.encode([f"{word} {word} shop" for word in WORDS]))
    np.testing.assert_allclose(vectors, expected, atol=1e-4)


@pytest.mark.parametrize(("labels_per_document", "unseen"), [(2, []), (2, [8, 11]), (300, [])])
def test_gain_and_log_rank_equal_those_of_scipy(labels_per_document: int, unseen: list[int]) -> None:
    """A label is ranked among the wrong labels that training may see."""
    rng, width = np.random.default_rng(1), 6 * labels_per_document
    documents, labels, mean = (rng.standard_normal((n, 8)).astype(np.float32) for n in (5, width, width))
    y = sp.csr_matrix(sum(np.eye(5, width, k=3 * i, dtype=np.float32) for i in range(labels_per_document)))
    ignored = sp.csr_matrix(np.eye(5, width, k=1, dtype=np.float32))
    held_out = HeldOut(np.arange(5), y, ignored, np.array(unseen, np.int64))
    gain, log_rank = compare_context_shares(SelectionSample(held_out, documents), labels, mean, (0.0, 0.5))
    for number, share in enumerate((0.0, 0.5)):
        scores = documents @ normalise(labels + share * mean).T
        for i in range(5):
            true, not_counted = np.flatnonzero(y.toarray()[i]), np.flatnonzero(ignored.toarray()[i])
            wrong = np.setdiff1d(np.arange(width), [*true, *not_counted, *unseen])
            ranks = [rankdata(-np.append(scores[i, wrong], scores[i, label]))[-1] for label in true]
            assert log_rank[number, i] == pytest.approx(np.mean(np.log2(ranks)))
            assert gain[number, i] == pytest.approx(np.mean(1 / np.log2(1 + np.array(ranks))))


def test_mean_that_is_the_same_for_all_labels_gains_nothing() -> None:
    """It changes no ranking, although it raises the likelihood at a fixed temperature."""
    rng = np.random.default_rng(2)
    documents, labels = (normalise(vectors) for vectors in rng.standard_normal((2, 40, 4)))
    x, z = np.zeros((2, 40, 5), np.float32)
    x[:, :4], z[:, :4] = documents, labels
    same_mean = np.tile(np.eye(5, dtype=np.float32)[4], (40, 1))
    y = sp.identity(40, np.float32, "csr")
    held_out = HeldOut(np.arange(40), y, sp.csr_matrix((40, 40), dtype=np.float32), np.zeros(0, np.int64))
    gain, log_rank = compare_context_shares(SelectionSample(held_out, x), z, same_mean, (0.0, 1.0))
    np.testing.assert_allclose(gain[0], gain[1])
    np.testing.assert_allclose(log_rank[0], log_rank[1])
