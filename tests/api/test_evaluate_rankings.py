"""`ramen.evaluate` compared with scikit-learn, and with each kind of argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.metrics import ndcg_score, precision_score, recall_score

import ramen
from ramen.errors import RamenError


@pytest.fixture
def unfiltered(shared_dataset: ramen.Dataset) -> ramen.Dataset:
    empty = sp.csr_matrix(shared_dataset.filter_test.shape, dtype=np.float32)
    return replace(shared_dataset, filter_test=empty)


@pytest.fixture
def scores(shared_dataset: ramen.Dataset) -> np.ndarray:
    """Random scores without ties, higher for true labels."""
    noise = np.random.default_rng(0).random(shared_dataset.y_test.shape)
    return noise + 0.3 * shared_dataset.y_test.toarray()


def test_metrics_equal_those_of_scikit_learn(unfiltered: ramen.Dataset, scores: np.ndarray) -> None:
    metrics, truth = ramen.evaluate(scores, unfiltered), unfiltered.y_test.toarray()
    for k in (1, 3, 5):
        assert metrics[f"n_at_{k}"] == pytest.approx(100 * ndcg_score(truth, scores, k=k))
        top = scores >= -np.partition(-scores, k - 1, axis=1)[:, [k - 1]]
        assert metrics[f"p_at_{k}"] == pytest.approx(100 * precision_score(truth, top, average="samples"))
    top = scores >= -np.partition(-scores, 9, axis=1)[:, [9]]
    assert metrics["r_at_10"] == pytest.approx(100 * recall_score(truth, top, average="samples"))


def test_dense_sparse_and_ranked_labels_give_the_same_metrics(
    shared_dataset: ramen.Dataset, scores: np.ndarray
) -> None:
    expected = ramen.evaluate(scores, shared_dataset)
    ranking = np.argsort(-scores, axis=1)
    padded = np.hstack([ranking, np.full((len(ranking), 3), -1)])
    for ranking_or_scores in (sp.csr_matrix(scores), sp.coo_matrix(scores), ranking, padded):
        assert ramen.evaluate(ranking_or_scores, shared_dataset) == pytest.approx(expected, nan_ok=True)


def test_filtered_pairs_do_not_count(shared_dataset: ramen.Dataset, scores: np.ndarray) -> None:
    rows, columns = shared_dataset.filter_test.nonzero()
    lowered, raised = scores.copy(), scores.copy()
    lowered[rows, columns], raised[rows, columns] = -1, 9
    assert ramen.evaluate(raised, shared_dataset)["p_at_5"] == ramen.evaluate(lowered, shared_dataset)["p_at_5"]


def test_only_candidates_are_ranked(unfiltered: ramen.Dataset, scores: np.ndarray) -> None:
    candidates = np.arange(0, scores.shape[1], 2)
    others = np.setdiff1d(np.arange(scores.shape[1]), candidates)
    lowered = scores.copy()
    lowered[:, others] = -5
    expected = ramen.evaluate(lowered, unfiltered)
    zero_shot = replace(unfiltered, candidates=candidates)
    for ranking_or_scores in (scores, sp.csr_matrix(scores), np.argsort(-scores, axis=1)):
        assert ramen.evaluate(ranking_or_scores, zero_shot)["p_at_5"] == pytest.approx(expected["p_at_5"])


def test_propensity_knobs_change_only_propensity_scored_metrics(
    shared_dataset: ramen.Dataset, scores: np.ndarray
) -> None:
    default = ramen.evaluate(scores, shared_dataset)
    amazon = ramen.evaluate(scores, shared_dataset, propensity_a=0.6, propensity_b=2.6)
    assert default["p_at_5"] == amazon["p_at_5"] and default["psp_at_5"] != amazon["psp_at_5"]


def test_run_and_retriever_have_the_metrics_of_the_evaluation(
    finished_run: ramen.Run, shared_dataset: ramen.Dataset
) -> None:
    for model in (finished_run, finished_run.model):
        metrics = ramen.evaluate(model, shared_dataset)
        np.testing.assert_equal(metrics, {name: finished_run.metrics[name] for name in metrics})


def test_encoder_is_evaluated_by_cosine(finished_run: ramen.Run, shared_dataset: ramen.Dataset) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(finished_run.folder / "model"), device="cpu")
    metrics, expected = ramen.evaluate(encoder, shared_dataset), ramen.evaluate(finished_run, shared_dataset)
    assert metrics["p_at_5"] == pytest.approx(expected["p_at_5"], abs=1.0)  # rounding may swap labels

    class Doubled:
        def encode(self, texts: list[str]) -> np.ndarray:
            return 2 * encoder.encode(texts)

    assert ramen.evaluate(Doubled(), shared_dataset) == pytest.approx(metrics, nan_ok=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda scores: scores[:5], "scores of shape (5, 30), expected test documents x labels (20, 30)"),
        (lambda scores: np.zeros((5, 3), int), "a ranking of 5 documents; the dataset has 20"),
        (lambda scores: np.zeros((20, 3), int), "row 0 ranks label 0 twice"),
        (lambda scores: np.full((20, 1), 31), "label 31, but the dataset has 30 labels"),
        (lambda scores: "artifacts/ramen", "found str; expected a run, a retriever, an encoder"),
    ],
)
def test_scores_that_do_not_match_the_dataset_are_refused(
    make: Any, expected: str, shared_dataset: ramen.Dataset, scores: np.ndarray
) -> None:
    with pytest.raises(RamenError) as error:
        ramen.evaluate(make(scores), shared_dataset)
    assert expected in str(error.value)
