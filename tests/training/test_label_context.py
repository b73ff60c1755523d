"""Label context: sets that tell what a label is are used, others are not, and it is the served vector that changes."""

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
from ramen.training.heldout import HeldOut, split_held_out
from ramen.training.labels.context import PARSIMONY, PRIOR, choose_share, compare_context_shares
from ramen.training.labels.selection import FEWEST, SelectionSample
from ramen.training.trainer import Trainer

from training_recipe import changed, train

WORDS = [
    "apple", "bridge", "cloud", "desk", "engine", "forest", "glass", "harbor",
    "island", "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil",
]  # fmt: skip


@pytest.fixture
def coded(tmp_path: Path) -> dict[str, Path]:
    """Labels with code names; anchor set `told` says what they are about, `noise` is drawn at random."""
    rng = np.random.default_rng(0)
    labels = Texts([f"l{i}" for i in range(16)], [f"x{i * 37 % 101}q" for i in range(16)])
    topic = rng.integers(0, 16, 200)
    texts = [f"{WORDS[t]} {WORDS[t]} shop" for t in topic]
    y = sp.csr_matrix((np.ones(200, np.float32), (np.arange(200), topic)), shape=(200, 16))
    empty = sp.csr_matrix((200, 16), dtype=np.float32)
    anchors = Texts([f"a{i}" for i in range(16)], [f"about {word}" for word in WORDS])
    told = AnchorSet(anchors, sp.csr_matrix((200, 16), dtype=np.float32), sp.identity(16, np.float32, "csr"))
    shuffled = sp.csr_matrix((np.ones(16, np.float32), (np.arange(16), rng.permutation(16))), shape=(16, 16))
    noise = replace(told, texts=Texts([f"n{i}" for i in range(16)], anchors.texts), labels=shuffled)
    problem = Dataset(
        Texts([f"d{i}" for i in range(200)], texts), Texts(["t0"], ["apple shop"]), labels, y, y[:1], empty, empty[:1],
        {"noise": noise, "told": told},
    )  # fmt: skip
    return on_disk(problem, tmp_path)


RECIPE = changed(
    encoder={"name": "minilm"},
    objective={"label_context": "anchors"},
    base={"random_labels": 0.5},  # held-out documents are copies of 16, so noise may look like a gain: not so here
    training={"lr": 1e-6, "epochs": 2, "validation_fraction": 0.4},
    pruning={"rule": "none"},
)


def test_the_set_that_tells_is_used_and_noise_is_not(coded: dict[str, Path], tmp_path: Path) -> None:
    metrics = train(coded, tmp_path / "out", RECIPE)
    assert metrics["context/told"] > 0 and metrics["context/noise"] == 0
    model = tmp_path / "out" / "model"
    assert has_context_or_classifier(model)
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    alone = encode_labels(encoder, model, [f"x{i * 37 % 101}q" for i in range(16)])
    whole = fuse_label_vectors(model, alone)
    expected = alone + metrics["context/told"] * encoder.encode([f"about {word}" for word in WORDS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    queries = encoder.encode([f"{word} shop" for word in WORDS])
    right = [float(((queries @ vectors.T).argmax(1) == np.arange(16)).mean()) for vectors in (alone, whole)]
    assert right[0] < 0.3 and right[1] > 0.9


@pytest.mark.parametrize(
    "off",
    [
        {"objective": {"label_context": "none"}},
        {"objective": {"graphs": False}},
        {"training": {"validation_fraction": 0.0}},
        {"objective": {"anchor_sets": ["noise"]}},
        {"objective": {"label_context": "both"}, "training": {"validation_fraction": 0.0}},
    ],
)
def test_without_evidence_or_when_off_there_is_none(
    coded: dict[str, Path], tmp_path: Path, off: dict[str, dict[str, object]]
) -> None:
    sections = {name: {**values, **off.get(name, {})} for name, values in RECIPE.items()}
    train(coded, tmp_path / "out", sections)
    assert not has_context_or_classifier(tmp_path / "out" / "model")


@pytest.mark.parametrize("labelled", [0, 1, FEWEST - 1, FEWEST])
def test_few_held_out_documents_with_a_label_choose_nothing_and_it_is_said(
    coded: dict[str, Path], tmp_path: Path, labelled: int, capfd: pytest.CaptureFixture[str]
) -> None:
    problem = Dataset.read(coded["dataset"])
    held_out, _ = split_held_out(problem, TrainingConfig.model_validate(RECIPE["training"]))
    y = problem.y_train.tolil()
    y[held_out[labelled:]] = 0
    artifacts = on_disk(replace(problem, y_train=y.tocsr()), tmp_path / "few")
    ngame = {"base": {"name": "ngame", "random_labels": 0.5}, "classifier": {"epochs": 1}}
    metrics = train(artifacts, tmp_path / "out", RECIPE | ngame)
    said = capfd.readouterr().err
    few = f": {labelled} held-out documents have a label, {FEWEST} are needed; raise training.valid"
    enough = labelled == FEWEST
    assert ("warning: no label context" + few in said) == (not enough)
    assert ("warning: the classifiers' share is 0.5" + few in said) == (not enough)
    assert (metrics.get("context/told", 0) > 0) == enough
    assert enough or metrics["classifier/share"] == 0.5


@pytest.mark.parametrize("graphs", [True, False])
def test_training_documents_tell_what_a_label_is_about_too(
    coded: dict[str, Path], tmp_path: Path, graphs: bool
) -> None:
    sections = RECIPE | {"objective": {"label_context": "documents", "graphs": graphs}}
    metrics = train(coded, tmp_path / "out", sections)
    assert metrics["context/training_documents"] > 0 and "context/told" not in metrics
    model = tmp_path / "out" / "model"
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    alone = encode_labels(encoder, model, [f"x{i * 37 % 101}q" for i in range(16)])
    # a label's documents all read alike, so their mean is any of them; it counts the more, the more they are
    count = np.asarray(Dataset.read(coded["dataset"]).y_train.sum(0)).reshape(-1, 1)
    assert count.min() < count.max()
    share = metrics["context/training_documents"] * count / (count + PRIOR)
    expected = alone + share * encoder.encode([f"{word} {word} shop" for word in WORDS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(fuse_label_vectors(model, alone), expected, atol=1e-4)


def test_a_graph_that_says_what_the_documents_say_is_left_out(coded: dict[str, Path], tmp_path: Path) -> None:
    metrics = train(coded, tmp_path / "out", RECIPE | {"objective": {"label_context": "both"}})
    assert metrics["context/training_documents"] > 0 and metrics["context/told"] == metrics["context/noise"] == 0


def test_of_shares_as_good_as_the_best_the_smallest_is_chosen_and_none_that_wins_by_chance() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.05, (3, 400))
    noise -= noise.mean(1, keepdims=True)  # so that the means are those that are written here
    plain = rng.random(400)
    half, best, lucky = plain + 0.1 + noise[0], plain + 0.101 + noise[1], plain + 0.002 + noise[2]
    assert ttest_rel(best, half).pvalue > 0.3 and ttest_rel(lucky, plain).pvalue > 0.3
    gain = np.stack([plain, half, best])
    assert choose_share(gain, -gain, PARSIMONY) == 1 and choose_share(gain, -gain, 0.0) == 2
    gain = np.stack([plain, lucky])
    assert choose_share(gain, -gain, 0.0) == choose_share(gain, -gain, PARSIMONY) == 0
    gain = np.stack([plain, half])
    assert choose_share(gain, np.zeros_like(gain), PARSIMONY) == 0, "the whole ranking must gain too"


def test_what_judges_a_classifier_is_not_in_the_labels_it_judges(
    coded: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def classify(trainer: Trainer, *rest: np.ndarray) -> None:
        seen.append((trainer.inputs.held_out.rows, rest[-1]))

    monkeypatch.setattr("ramen.training.stage.train_classifiers", classify)
    sections = RECIPE | {"objective": {"label_context": "documents", "graphs": False}}
    metrics = train(coded, tmp_path / "out", sections)
    ((held_out, unseen),) = seen
    model = tmp_path / "out" / "model"
    encoder = load_encoder(model, EncoderConfig(precision="fp32"))
    y = Dataset.read(coded["dataset"]).y_train
    count = np.asarray(y.sum(0) - y[held_out].sum(0)).reshape(-1, 1)
    share = metrics["context/training_documents"] * count / (count + PRIOR)
    expected = encode_labels(encoder, model, [f"x{i * 37 % 101}q" for i in range(16)])
    expected = expected + share * encoder.encode([f"{word} {word} shop" for word in WORDS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert share.min() > 0
    np.testing.assert_allclose(unseen, expected, atol=1e-4)


@pytest.mark.parametrize(("each", "unseen"), [(2, []), (2, [8, 11]), (300, [])])
def test_gains_are_scipys_among_the_wrong_labels_that_training_may_see(each: int, unseen: list[int]) -> None:
    rng, width = np.random.default_rng(1), 6 * each
    documents, labels, mean = (rng.standard_normal((n, 8)).astype(np.float32) for n in (5, width, width))
    y = sp.csr_matrix(sum(np.eye(5, width, k=3 * i, dtype=np.float32) for i in range(each)))
    ignored = sp.csr_matrix(np.eye(5, width, k=1, dtype=np.float32))
    held_out = HeldOut(np.arange(5), y, ignored, np.array(unseen, np.int64))
    gain, log_rank = compare_context_shares(SelectionSample(held_out, documents), labels, mean, (0.0, 0.5))
    for number, share in enumerate((0.0, 0.5)):
        vectors = labels + share * mean
        scores = documents @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T
        for i in range(5):
            true, left = np.flatnonzero(y.toarray()[i]), np.flatnonzero(ignored.toarray()[i])
            wrong = np.setdiff1d(np.arange(width), [*true, *left, *unseen])
            ranks = [rankdata(-np.append(scores[i, wrong], scores[i, label]))[-1] for label in true]
            assert log_rank[number, i] == pytest.approx(np.mean(np.log2(ranks)))
            assert gain[number, i] == pytest.approx(np.mean(1 / np.log2(1 + np.array(ranks))))


def test_a_mean_that_only_flattens_the_scores_gains_nothing() -> None:
    """What is the same for all labels changes no ranking, though it lifts the likelihood at a fixed temperature."""
    rng = np.random.default_rng(2)
    documents, labels = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.standard_normal((2, 40, 4)))
    both = np.zeros((40, 5), np.float32)
    common = np.tile(np.eye(5, dtype=np.float32)[4], (40, 1))
    x, z = both.copy(), both.copy()
    x[:, :4], z[:, :4] = documents, labels
    y = sp.identity(40, np.float32, "csr")
    held_out = HeldOut(np.arange(40), y, sp.csr_matrix((40, 40), dtype=np.float32), np.zeros(0, np.int64))
    gain, log_rank = compare_context_shares(SelectionSample(held_out, x), z, common, (0.0, 1.0))
    np.testing.assert_allclose(gain[0], gain[1])
    np.testing.assert_allclose(log_rank[0], log_rank[1])
