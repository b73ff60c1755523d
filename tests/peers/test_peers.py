"""Peers compared with independent references, with the filters and candidates of a trained model."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from ramen.config import EncoderConfig, ScoringConfig, TrainingConfig
from ramen.data.dataset import Dataset
from ramen.errors import RamenError
from ramen.peers import PEERS, Task, libpecos, tfidf
from ramen.peers.evaluation import rank_test_documents
from ramen.peers.sparse import search_sparse

has_trainer = all(importlib.util.find_spec(name) for name in ("sentence_transformers", "datasets", "accelerate"))
ENCODER = EncoderConfig(name="tiny", max_length=16, precision="fp32")


def make_task(problem: Dataset, work: Path, seconds: float = 0.0) -> Task:
    work.mkdir(exist_ok=True)
    training = TrainingConfig(batch_size=16, threads=1, validation_fraction=0.1, lr_warmup_steps=2)
    return Task(problem, ENCODER, training, ScoringConfig(), work, seconds)


def rank_dense(scores: np.ndarray, problem: Dataset) -> np.ndarray:
    """Rank labels by score, ties by label id, without filtered pairs and labels that are not candidates."""
    scores = scores.copy()
    scores[problem.filter_test.toarray() > 0] = -np.inf
    if problem.candidates is not None:
        scores[:, np.setdiff1d(np.arange(scores.shape[1]), problem.candidates)] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.where(np.take_along_axis(scores, order, 1) > -np.inf, order, scores.shape[1])


def make_zero_shot(problem: Dataset) -> Dataset:
    """Make the last six labels the only candidates and remove their training pairs."""
    unseen = np.arange(24, 30)
    y_train = problem.y_train.tolil()
    y_train[:, unseen] = 0
    return replace(problem, y_train=sp.csr_matrix(y_train), candidates=unseen)


@pytest.mark.parametrize("candidates", [None, np.array([1, 4, 5, 9, 20, 33])])
@pytest.mark.parametrize("k", [3, 40, 60])
def test_search_sparse_matches_dense_product(k: int, candidates: np.ndarray | None) -> None:
    rng = np.random.default_rng(0)
    documents, labels = (sp.random(n, 25, 0.15, "csr", random_state=rng) for n in (17, 40))
    for matrix in (documents, labels):
        matrix.data = np.round(matrix.data * 3) + 1  # integers: exact sums, many ties
    found, scores = search_sparse(documents, labels, k, candidates)
    full = (documents @ labels.T).toarray()
    competing = np.arange(40) if candidates is None else candidates
    for row, line in enumerate(full):
        best = [label for label in sorted(competing, key=lambda label: (-line[label], label)) if line[label] > 0][:k]
        assert found[row, : len(best)].tolist() == best and (found[row, len(best) :] == 40).all()
        assert scores[row, : len(best)].tolist() == line[best].tolist()
        assert (scores[row, len(best) :] == -np.inf).all()


@pytest.mark.parametrize("make", [lambda problem: problem, make_zero_shot])
def test_tfidf_matches_scikit_learn_reference(make: object, tiny_dataset: Dataset, tmp_path: Path) -> None:
    problem = make(tiny_dataset)  # type: ignore[operator]
    task = make_task(problem, tmp_path)
    ranking = rank_test_documents(task, PEERS["tfidf"].fit(task))

    vectors = {"train": [], "labels": [], "test": []}  # type: ignore[var-annotated]
    for kind in ({}, {"analyzer": "char_wb", "ngram_range": (3, 5)}):
        vectoriser = TfidfVectorizer(sublinear_tf=True, **kind).fit([*problem.train.texts, *problem.labels.texts])
        for part in vectors:
            vectors[part].append(vectoriser.transform(getattr(problem, part).texts).toarray() / np.sqrt(2))
    train, labels, test = (np.hstack(vectors[part]) for part in ("train", "labels", "test"))
    for label in range(len(labels)):
        for document in problem.positives[:, [label]].nonzero()[0]:
            labels[label] = labels[label] + train[document]
    scores = test @ normalize(labels).T
    expected = rank_dense(np.where(scores > 0, scores, -np.inf), problem)
    assert (ranking.indices[:, :3] == expected[:, :3]).all()
    assert (np.sort(ranking.indices[:, :30]) == np.sort(expected)).all()


def test_tfidf_uses_only_words_for_full_text() -> None:
    short, full = tfidf.make_vectoriser(["a few words"] * 3), tfidf.make_vectoriser(["many words " * 50] * 3)
    assert [name for name, _ in short.transformer_list] == ["words", "characters"]
    assert [name for name, _ in full.transformer_list] == ["words"]


def test_tfidf_keeps_heaviest_terms_of_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfidf, "TERMS", 2)
    rows = sp.csr_matrix(np.array([[0.1, 0.5, 0.4], [0.3, 0, 0.2]]))
    assert tfidf._keep_heaviest(rows).toarray().tolist() == [[0, 0.5, 0.4], [0.3, 0, 0.2]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda problem: problem, make_zero_shot])
def test_untrained_matches_cosine_of_sentence_transformers(make: object, tiny_dataset: Dataset, tmp_path: Path) -> None:
    reference = pytest.importorskip("sentence_transformers")
    from ramen.encoder.loading import load_encoder

    problem = make(tiny_dataset)  # type: ignore[operator]
    load_encoder("tiny", ENCODER).save(tmp_path / "tiny")
    model = reference.SentenceTransformer(str(tmp_path / "tiny"), device="cpu")
    documents, labels = (
        model.encode(texts.texts, normalize_embeddings=True) for texts in (problem.test, problem.labels)
    )
    task = make_task(problem, tmp_path / "work")
    ranking = rank_test_documents(task, PEERS["untrained"].fit(task))
    scores = documents @ labels.T
    expected = rank_dense(scores, problem)
    count = int((expected < 30).sum(1).min())
    ours = np.take_along_axis(scores, ranking.indices[:, :count], 1)
    assert np.allclose(ours, np.take_along_axis(scores, expected[:, :count], 1), atol=1e-5)
    assert not (problem.filter_test.toarray() > 0)[np.arange(20)[:, None], ranking.indices[:, :count]].any()


@pytest.mark.slow
@pytest.mark.skipif(not has_trainer, reason="needs ramen[peers]")
def test_sentence_transformers_trains_on_kept_documents_until_time_limit(tiny_dataset: Dataset, tmp_path: Path) -> None:
    from ramen.peers.sentence_transformers_trainer import Clock, training_pairs
    from ramen.training.heldout import split_held_out

    problem, task = make_zero_shot(tiny_dataset), make_task(make_zero_shot(tiny_dataset), tmp_path, seconds=3)
    held_out, kept = split_held_out(problem, task.training)
    pairs = training_pairs(problem, kept)
    positives = problem.positives.toarray()
    expected = [
        (problem.train.texts[i], problem.labels.texts[j]) for i in kept for j in np.flatnonzero(positives[i]) if j < 24
    ]
    assert sorted(zip(pairs["anchor"], pairs["positive"], strict=True)) == sorted(expected) and len(held_out)

    rank = PEERS["sentence-transformers"].fit(task)
    indices = rank_test_documents(task, rank).indices
    assert set(np.unique(indices)) <= {*range(24, 30), 30}

    clock = Clock(10, warmup=4)
    clock.start = clock.deadline - 10
    assert clock.learning_rate(0) == pytest.approx(0.2) and clock.learning_rate(9) == pytest.approx(1, abs=0.1)
    clock.deadline -= 10
    clock.start -= 10
    assert clock.learning_rate(9) == 0, "the rate is 0 at the time limit"
    control = SimpleNamespace(should_training_stop=False)
    clock.on_step_end(None, None, control)
    assert control.should_training_stop


def test_xr_linear_writes_matrices_and_maps_labels_back(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub replaces libpecos and scores the test documents."""
    steps = []

    def run(step: str, folder: Path) -> None:
        steps.append(step)
        x, y = (sp.load_npz(folder / f"{name}_train.npz") for name in "xy")
        assert x.shape[0] == y.shape[0] and (np.bincount(y.indices, minlength=y.shape[1]) > 0).all()
        assert json.loads((folder / "plan.json").read_text())["method"] == "xr-linear"
        scores = np.tile(np.arange(1.0, y.shape[1] + 1), (20, 1))
        sp.save_npz(folder / "scores.npz", sp.csr_matrix(scores))

    monkeypatch.setattr(libpecos, "_run", run)
    task = make_task(tiny_dataset, tmp_path)
    ranking = rank_test_documents(task, PEERS["xr-linear"].fit(task))
    known = np.flatnonzero(tiny_dataset.positives.sum(0))
    assert len(known) < 30, "a label without a training document is not ranked"
    scores = np.full((20, 30), -np.inf)
    scores[:, known] = np.arange(len(known))
    assert (ranking.indices[:, :30] == rank_dense(scores, tiny_dataset)).all() and steps == ["train", "predict"]
    with pytest.raises(RamenError, match="no label has a training document"):
        PEERS["xr-linear"].fit(replace(task, problem=replace(tiny_dataset, candidates=np.arange(30))))


def test_xr_linear_ranks_labels_with_training_documents(tiny_dataset: Dataset, tmp_path: Path) -> None:
    if obstacle := libpecos.obstacle():
        pytest.skip(obstacle)
    task = make_task(tiny_dataset, tmp_path)
    indices = rank_test_documents(task, PEERS["xr-linear"].fit(task)).indices
    hits = [tiny_dataset.y_test[row, label] for row, label in enumerate(indices[:, 0])]
    assert np.mean(hits) > 0.3 and 29 not in indices, "label 29 has no training document"


def test_obstacle_names_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    libpecos.obstacle.cache_clear()
    monkeypatch.setenv(libpecos.VARIABLE, "/nowhere/python")
    assert (
        "no such interpreter); run `make pecos` to install it, or set RAMEN_PECOS_PYTHON"
        in PEERS["xr-linear"].obstacle()
    )
    libpecos.obstacle.cache_clear()
    peer = replace(PEERS["sentence-transformers"], packages=("surely_not_installed",))
    assert peer.obstacle() == "surely_not_installed is not installed: pip install 'ramen[peers]'"
    assert not PEERS["tfidf"].obstacle() and not PEERS["untrained"].obstacle()
