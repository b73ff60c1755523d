"""Base algorithms: the interface of all, and the results of each compared with brute force and values by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from ramen.base import BASES, make_base
from ramen.base.clustering import balanced_clusters, halvings
from ramen.base.dexa import Dexa
from ramen.base.mining import mine_shortlists, sample_shortlists
from ramen.base.ngame import Ngame
from ramen.base.protocol import BaseAlgorithm, LabelProblem
from ramen.config import BaseConfig
from ramen.data.dataset import Dataset, Texts
from ramen.data.subset import hide_labels
from ramen.errors import ConfigError
from ramen.objective.softmax import decoupled_softmax
from ramen.objective.triplet import Triplet
from ramen.sampling import isin_sorted
from ramen.training.step_sampler import StepSampler

SCORES = torch.tensor([[0.8, 0.7, 0.2], [0.6, 0.5, 0.4], [0.1, 0.9, 0.3]])
KNOWN = torch.eye(3, dtype=torch.bool)
KNOWN[2, 1] = True
EARLY = {"refresh_from": 1, "refresh_every": 1, "clusters": {"double_every": 1}}


@pytest.fixture(autouse=True)
def _small_data_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.base.dexa.OFFSET_HEADS", 2)
    monkeypatch.setattr("ramen.base.mining.SHORTLIST", 5)


def label_problem(problem: Dataset, batch_size: int = 16, dimension: int = 8) -> LabelProblem:
    texts = np.unique(problem.labels.texts, return_inverse=True)[1]
    documents = np.flatnonzero(np.diff(problem.y_train.indptr))
    document_texts = len(texts) + np.arange(len(problem.train))  # no document has the text of a label
    return LabelProblem(documents, problem.y_train, problem.filter_train, texts, document_texts, batch_size, dimension)


def make(name: str, problem: Dataset, **knobs: object) -> BaseAlgorithm:
    settings = BaseConfig.model_validate({"name": name, **EARLY, **knobs})
    return make_base(settings, label_problem(problem), Triplet())


def unit(rows: int, dimension: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def refresh(base: BaseAlgorithm, problem: Dataset, epoch: int = 1) -> BaseAlgorithm:
    vectors = {"documents": unit(len(problem.train), 8, 1), "labels": unit(len(problem.labels), 8, 2)}
    base.refresh(epoch, lambda role: vectors[role])
    return base


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("is_refreshed", [True, False])
def test_every_base_visits_every_row_once_with_true_positives_and_masks_known_pairs(
    name: str, is_refreshed: bool, tiny_dataset: Dataset
) -> None:
    base = make(name, tiny_dataset)
    if is_refreshed:
        refresh(base, tiny_dataset)
    sampler = StepSampler(base, 16, seed=3)
    order = sampler.epoch_order(2)
    assert len(np.unique(order)) == len(order) == base.rows
    true, known = tiny_dataset.y_train.toarray() > 0, (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    for index in range(sampler.steps_per_epoch):
        step = sampler.step(order, 2, index)
        assert len(step.documents) == base.documents_per_row * len(order[index * 16 : index * 16 + 16])
        assert true[step.documents, step.labels[step.positive]].all()
        np.testing.assert_array_equal(step.labels, np.unique(step.labels))
        assert (step.mask >= known[step.documents][:, step.labels]).all()
        scores = torch.from_numpy(unit(len(step.documents), 8, 5) @ unit(len(step.labels), 8, 6).T).requires_grad_()
        loss = base.loss(scores, torch.from_numpy(step.positive), torch.from_numpy(step.mask))
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(scores.grad).all()
        known_pairs = torch.from_numpy(step.mask) & ~_one_hot(step.positive, scores)
        assert not scores.grad[known_pairs].any(), "known pairs get no gradient"


def _one_hot(positive: np.ndarray, scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(1, torch.from_numpy(positive)[:, None], True)


@pytest.mark.parametrize("name", BASES)
def test_restored_state_gives_the_same_steps(name: str, tiny_dataset: Dataset) -> None:
    base = refresh(make(name, tiny_dataset), tiny_dataset)
    again = make(name, tiny_dataset)
    again.restore(base.state())
    for epoch in (1, 2):
        a, b = StepSampler(base, 16, 0), StepSampler(again, 16, 0)
        np.testing.assert_array_equal(a.epoch_order(epoch), b.epoch_order(epoch))
        x, y = a.step(a.epoch_order(epoch), epoch, 0), b.step(b.epoch_order(epoch), epoch, 0)
        np.testing.assert_array_equal(x.labels, y.labels)
    encoded = torch.from_numpy(unit(30, 8, 4))
    assert torch.equal(base.label_vectors(encoded, np.arange(30)), again.label_vectors(encoded, np.arange(30)))


def test_unknown_name_suggests_the_nearest(tiny_dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"base\.name = 'ngam': unknown .*did you mean ngame\?"):
        make("ngam", tiny_dataset)


@pytest.mark.parametrize("cells", [1, 200, 1 << 22])
def test_shortlists_are_the_nearest_labels_without_true_ignored_and_same_text_labels(
    tiny_dataset: Dataset, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.base.mining.CELLS", cells)
    problem = label_problem(tiny_dataset)
    document_texts, label_texts = np.full(60, 99), np.arange(30) // 2  # pairs of labels with the same text
    document_texts[7] = 3  # the text of two labels
    same_texts = LabelProblem(problem.documents, problem.y, problem.ignore, label_texts, document_texts, 16)
    documents, labels = unit(60, 8, 1), unit(30, 8, 2)
    shortlists = mine_shortlists(same_texts, documents, labels, 5)
    known = (problem.y + problem.ignore).toarray() > 0
    for row in range(60):
        known_texts = {*label_texts[np.flatnonzero(known[row])], document_texts[row]}
        ranking = np.argsort(-documents[row] @ labels.T, kind="stable")
        expected = [label for label in ranking if label_texts[label] not in known_texts]
        assert shortlists[row].tolist() == expected[:5]
    assert mine_shortlists(problem, documents, labels, 29)[0][-1] == -1, "padded when fewer are left"


def test_ance_adds_mined_labels_only_after_mining(tiny_dataset: Dataset) -> None:
    base = make("ance", tiny_dataset, mining={"negatives": 2})
    rng = np.random.default_rng(0)
    assert not base.refresh_due(0) and base.refresh_due(1)
    assert len(base.negatives(np.arange(10), rng)) == 0
    refresh(base, tiny_dataset)
    drawn = base.negatives(np.arange(10), rng).reshape(10, 2)
    assert all(set(row) <= set(base.shortlist[i]) for i, row in enumerate(drawn))  # type: ignore[attr-defined]
    bases = (refresh(make(n, tiny_dataset, mining={"negatives": 0}), tiny_dataset) for n in ("ance", "inbatch"))
    a, b = (StepSampler(base, 16, 0) for base in bases)
    x, y = a.step(a.epoch_order(1), 1, 0), b.step(b.epoch_order(1), 1, 0)
    np.testing.assert_array_equal(x.labels, y.labels)


@pytest.mark.parametrize(("count", "size"), [(64, 8), (100, 7), (37, 5), (5, 1), (3, 10), (1, 1)])
def test_clusters_are_balanced(count: int, size: int) -> None:
    clusters = balanced_clusters(unit(count, 6, 0), halvings(count / size), np.random.default_rng(0))
    sizes = np.bincount(clusters)
    assert sizes.sum() == count and sizes.max() - sizes.min() <= 1
    assert len(sizes) & (len(sizes) - 1) == 0, "a power of two"


def test_clusters_find_planted_groups() -> None:
    groups = np.arange(64) % 8
    vectors = unit(8, 16, 0)[groups] + 0.05 * unit(64, 16, 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    clusters = balanced_clusters(vectors.astype(np.float32), 3, np.random.default_rng(0))
    purity = np.mean([np.bincount(groups[clusters == c]).max() / 8 for c in range(8)])
    assert purity > 0.85


def test_ngame_puts_similar_documents_in_a_step_and_doubles_its_clusters(tiny_dataset: Dataset) -> None:
    base = make("ngame", tiny_dataset, clusters={"size": 4, "double_every": 1})
    assert isinstance(base, Ngame)
    assert [base.cluster_size(epoch) for epoch in (1, 2, 3, 9)] == [4, 8, 16, 16]
    vectors = unit(60, 8, 1)
    refresh(base, tiny_dataset, epoch=3)
    order = base.order(np.random.default_rng(0))
    assert sorted(order) == list(range(60))

    def mean_similarity(rows: np.ndarray) -> float:
        blocks = [rows[i : i + 15] for i in range(0, 60, 15)]
        return float(np.mean([(vectors[b] @ vectors[b].T).mean() for b in blocks]))

    shuffled = np.mean([mean_similarity(np.random.default_rng(i).permutation(60)) for i in range(20)])
    assert mean_similarity(order) > shuffled + 0.05


def test_dexa_starts_as_ngame_and_labels_of_a_cluster_share_an_offset(tiny_dataset: Dataset) -> None:
    base = refresh(make("dexa", tiny_dataset, dexa={"labels_per_offset": 3}), tiny_dataset)
    assert isinstance(base, Dexa)
    encoded = torch.from_numpy(unit(30, 8, 4))
    assert torch.allclose(base.label_vectors(encoded, np.arange(30)), encoded, atol=1e-6)
    rows = base.offsets.row_of.numpy()
    heads = np.argsort(-np.asarray(tiny_dataset.y_train.sum(0)).ravel(), kind="stable")[:2]
    assert all((rows == rows[head]).sum() == 1 for head in heads)
    assert base.offsets.table.shape == (8 + 2, 8) and len(np.unique(rows)) < 30
    sharing = np.flatnonzero(rows == np.bincount(rows).argmax())[:2]
    base.offsets.table.data += 1
    moved = base.label_vectors(encoded, np.arange(30))
    assert rows[sharing[0]] == rows[sharing[1]]
    torch.testing.assert_close(moved[sharing], torch.nn.functional.normalize(encoded[sharing] + 1, dim=1))


@pytest.mark.parametrize("labels", [*range(1, 70), 5900, 11_721])
def test_frequent_labels_of_dexa_have_separate_offsets(labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(labels)
    y = sp.csr_matrix((np.ones(labels, np.float32), (np.arange(labels), rng.permutation(labels))))
    numbers, ignored = np.arange(labels), sp.csr_matrix(y.shape, dtype=np.float32)
    problem = LabelProblem(numbers, y, ignored, numbers, labels + numbers, 16, 4)
    monkeypatch.setattr("ramen.base.dexa.OFFSET_HEADS", min(1000, labels // 4))
    base = make_base(BaseConfig(name="dexa"), problem, Triplet())
    assert isinstance(base, Dexa)
    base.refresh(0, lambda role: unit(labels, 4, 0))
    rows, heads = base.offsets.row_of.numpy(), min(1000, labels // 4)
    assert rows.max() < len(base.offsets.table)
    used_rows, counts = np.unique(rows, return_counts=True)
    of_heads = used_rows >= len(base.offsets.table) - heads
    assert (counts[of_heads] == 1).all()
    assert of_heads.sum() == heads


@pytest.mark.parametrize("name", BASES)
def test_no_step_contains_an_unseen_label(name: str, tiny_dataset: Dataset) -> None:
    hidden = hide_labels(tiny_dataset, 0.4, seed=1)
    unseen = hidden.candidates
    base = make_base(
        BaseConfig.model_validate({"name": name, **EARLY, "mining": {"negatives": 3}, "random_labels": 2.0}),
        replace(label_problem(hidden), unseen=unseen), Triplet(),
    )  # fmt: skip
    refresh(base, hidden)
    sampler = StepSampler(base, 16, seed=3)
    labels: set[int] = set()
    for epoch in (1, 2):
        order = sampler.epoch_order(epoch)
        for index in range(sampler.steps_per_epoch):
            labels |= set(sampler.step(order, epoch, index).labels.tolist())
    assert unseen is not None and len(unseen) >= 5
    assert labels == set(range(30)) - set(unseen.tolist())


def test_decoupled_softmax_matches_values_computed_by_hand() -> None:
    rows = [float(decoupled_softmax(SCORES[i : i + 1], KNOWN[i : i + 1], KNOWN[i : i + 1], 0.5)) for i in range(3)]
    assert rows == pytest.approx([0.751381, 1.111901, 0.348458], abs=1e-6)
    assert float(decoupled_softmax(SCORES, KNOWN, KNOWN, 0.5)) == pytest.approx(0.737247, abs=1e-6)


def test_decoupled_softmax_is_cross_entropy_for_one_positive_and_stays_finite() -> None:
    positives = torch.eye(3, dtype=torch.bool)
    expected = torch.nn.functional.cross_entropy(SCORES / 0.5, torch.arange(3))
    assert float(decoupled_softmax(SCORES, positives, positives, 0.5)) == pytest.approx(float(expected), abs=1e-6)
    steep = (SCORES * 2 - 1).requires_grad_()
    loss = decoupled_softmax(steep, positives, KNOWN, 1e-3)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(steep.grad).all()
    assert float(decoupled_softmax(SCORES, torch.ones(3, 3, dtype=torch.bool), KNOWN, 0.5)) == 0


def test_among_equals_numpy_isin() -> None:
    rng = np.random.default_rng(0)
    ascending = np.unique(rng.integers(0, 1 << 40, 1000))
    values = rng.permutation(np.concatenate([ascending[::7], ascending[::5] + 1, [-1, 1 << 41]]))[:300].reshape(20, 15)
    np.testing.assert_array_equal(isin_sorted(ascending, values), np.isin(values, ascending))
    assert not isin_sorted(ascending[:0], values).any()


def test_siamesexml_loss_matches_values_computed_by_hand() -> None:
    """p = 0.9 e^(1.5 (s - 1)) that a pair of cosine s is true; the hardest documents of other labels are negatives."""
    base = make("siamesexml", make_two_pairs())
    first = torch.tensor([[0.8, 0.1], [0.3, 0.6]])
    second = torch.tensor([[0.5, 0.2], [0.4, 0.7]])
    mask = torch.zeros(4, 2, dtype=torch.bool)

    def p(cosine: float) -> float:
        return 0.9 * math.exp(1.5 * (cosine - 1))

    def expected(s: torch.Tensor) -> float:
        positive_loss = -math.log(p(s[0, 0])) - math.log(p(s[1, 1]))
        negative_loss = -math.log(1 - p(s[1, 0])) - math.log(1 - p(s[0, 1]))
        return (positive_loss + negative_loss / 2) / 2  # per label, over two documents including its own

    loss = base.loss(torch.cat([first, second]), torch.tensor([0, 1, 0, 1]), mask)
    assert float(loss) == pytest.approx(0.7 * expected(first) + 0.3 * expected(second), abs=1e-6)


def make_two_pairs() -> Dataset:
    y = sp.identity(2, format="csr", dtype=np.float32)
    none = sp.csr_matrix((2, 2), dtype=np.float32)
    texts = Texts(["a", "b"], ["one", "two"])
    return Dataset(texts, texts.select([]), Texts(["c", "d"], ["three", "four"]), y, y[:0], none, none[:0])


def test_dexml_uses_its_temperature(tiny_dataset: Dataset) -> None:
    eye = torch.eye(3, dtype=torch.bool)
    for tau in (0.5, 0.1):
        loss = float(make("dexml", tiny_dataset, dexml={"temperature": tau}).loss(SCORES, torch.arange(3), eye))
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(SCORES / tau, torch.arange(3))), abs=1e-6)


@pytest.mark.parametrize("name", ["ance", "dexml", "ngame"])
def test_refresh_is_due_periodically(name: str, tiny_dataset: Dataset) -> None:
    base = make(name, tiny_dataset, refresh_from=1, refresh_every=2)
    due = [epoch for epoch in range(8) if base.refresh_due(epoch)]
    assert due == [1, 3, 5, 7]


@pytest.mark.parametrize("name", ["ance", "dexml"])
def test_zero_mined_negatives_disables_mining(name: str, tiny_dataset: Dataset) -> None:
    assert not any(make(name, tiny_dataset, mining={"negatives": 0}).refresh_due(epoch) for epoch in range(8))


def test_labels_are_sampled_from_the_filled_part_of_a_shortlist() -> None:
    shortlist = np.array([[4, 2, -1, -1], [-1, -1, -1, -1], [7, 5, 3, 1]], np.int32)
    sampled = sample_shortlists(shortlist, np.random.default_rng(0).random((3, 200)))
    assert [set(row) for row in sampled.tolist()] == [{4, 2}, {-1}, {7, 5, 3, 1}]
    assert 70 < (sampled[0] == 4).sum() < 130
