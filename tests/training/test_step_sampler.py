"""Steps of training: their documents, labels and anchors, and their masks compared with scipy's indexing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import graphs_of, make_graph

from ramen.base import make_base
from ramen.base.protocol import LabelProblem
from ramen.config import BaseConfig
from ramen.data.dataset import AnchorSet, Dataset, Side, Texts
from ramen.graph.cleaning import false_negative_anchors
from ramen.graph.metadata import Graph
from ramen.objective.triplet import Triplet
from ramen.sampling import MembershipMask, RowSampler, SharedSampler, keyed_rng, sample_pools
from ramen.training.graph_negatives import GraphNegatives
from ramen.training.step_sampler import Step, StepSampler


def make_sampler(
    problem: Dataset,
    batch_size: int = 16,
    label_texts: np.ndarray | None = None,
    base: BaseConfig | None = None,
    **arguments: object,
) -> StepSampler:
    documents = np.flatnonzero(np.diff(problem.y_train.indptr))
    label_texts = np.arange(len(problem.labels)) if label_texts is None else label_texts
    document_texts = len(label_texts) + np.arange(len(problem.train))  # no document has the text of a label
    label_problem = LabelProblem(
        documents, problem.y_train, problem.filter_train, label_texts, document_texts, batch_size
    )
    algorithm = make_base(base or BaseConfig(), label_problem, Triplet())
    return StepSampler(algorithm, batch_size, 0, anchor_sampling="uniform", **arguments)  # type: ignore[arg-type]


def number_texts(problem: Dataset) -> dict[str, np.ndarray]:
    """Text number of each item by role, as in a `TextTable`."""
    texts = {"documents": problem.train.texts, "labels": problem.labels.texts}
    texts |= {f"anchors/{name}": anchors.texts.texts for name, anchors in problem.anchor_sets.items()}
    numbers: dict[str, int] = {}
    return {role: np.array([numbers.setdefault(t, len(numbers)) for t in items]) for role, items in texts.items()}


def prune_at_random(problem: Dataset, kept_share: float) -> dict[str, dict[Side, Graph]]:
    rng = np.random.default_rng(3)
    return {
        name: {side: graph.select(rng.random(graph.num_edges) < kept_share) for side, graph in sides.items()}
        for name, sides in graphs_of(problem).items()
    }


def use_graphs(sampler: StepSampler, problem: Dataset, kept_share: float = 1.0) -> StepSampler:
    """Regularise both sides with all sets of the problem, without false-negative anchors."""
    unpruned = graphs_of(problem)
    active = {name: dict.fromkeys(Side, True) for name in unpruned}
    empty = {name: {side: sp.csr_matrix(g.shape) for side, g in sides.items()} for name, sides in unpruned.items()}
    sampler.use_graphs(prune_at_random(problem, kept_share), unpruned, active, number_texts(problem), empty)
    return sampler


def items_by_side(step: Step) -> dict[Side, np.ndarray]:
    return {Side.DOCUMENT: step.documents, Side.LABEL: step.labels}


def edges_of(anchors: AnchorSet, side: Side) -> np.ndarray:
    return getattr(anchors, side.value).toarray()


def test_epoch_visits_every_document_once(tiny_dataset: Dataset) -> None:
    sampler = make_sampler(tiny_dataset)
    for epoch in range(2):
        order = sampler.epoch_order(epoch)
        seen = np.concatenate([sampler.step(order, epoch, i).documents for i in range(sampler.steps_per_epoch)])
        assert sorted(seen) == list(range(60))
    assert not np.array_equal(sampler.epoch_order(0), sampler.epoch_order(1))


def test_documents_without_labels_and_single_last_documents_are_dropped(tiny_dataset: Dataset) -> None:
    y = tiny_dataset.y_train.tolil()
    y[5] = 0
    problem = replace(tiny_dataset, y_train=y.tocsr(), anchor_sets={})
    sampler = make_sampler(problem, batch_size=29)
    assert 5 not in sampler.base.problem.documents and sampler.steps_per_epoch == 2
    assert make_sampler(problem, batch_size=58).steps_per_epoch == 1, "a single last document has no negatives"
    assert make_sampler(problem, batch_size=20).steps_per_epoch == 3


def test_positives_are_true_and_masks_contain_true_and_filtered_pairs(tiny_dataset: Dataset) -> None:
    sampler = make_sampler(tiny_dataset)
    known = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    assert (tiny_dataset.y_train.toarray()[step.documents, step.labels[step.positive]] > 0).all()
    np.testing.assert_array_equal(step.mask, known[step.documents][:, step.labels])


def test_labels_with_the_text_of_the_positive_are_masked(tiny_dataset: Dataset) -> None:
    sampler = make_sampler(tiny_dataset, label_texts=np.zeros(len(tiny_dataset.labels), np.int64))
    assert sampler.step(sampler.epoch_order(0), 0, 0).mask.all()


def test_anchors_come_from_pruned_graphs_and_masks_from_unpruned_graphs(tiny_dataset: Dataset) -> None:
    sampler = use_graphs(make_sampler(tiny_dataset), tiny_dataset, kept_share=0.5)
    pruned, order = prune_at_random(tiny_dataset, 0.5), sampler.epoch_order(0)
    for index in range(sampler.steps_per_epoch):
        step = sampler.step(order, 0, index)
        for name, batch in step.anchors.items():
            for side, items in items_by_side(step).items():
                links, graph = batch.links[side], pruned[name][side]
                rows = items[links.rows_R]
                assert (graph.csr().toarray()[rows, batch.pool[links.positive_R]] > 0).all()
                unpruned = edges_of(tiny_dataset.anchor_sets[name], side)
                np.testing.assert_array_equal(links.mask_BA, unpruned[items][:, batch.pool] > 0)
                np.testing.assert_array_equal(links.drawn_C, np.unique(links.positive_R))
                sampled = {*zip(links.rows_R.tolist(), links.positive_R.tolist(), strict=True)}
                assert sampled >= {*zip(links.row_C.tolist(), links.drawn_C.tolist(), strict=True)}
                assert set(items) - set(rows) == {i for i in items if graph.indptr[i] == graph.indptr[i + 1]}


def test_anchor_with_the_text_of_its_row_is_no_negative(tiny_dataset: Dataset) -> None:
    anchors = tiny_dataset.anchor_sets["links"]
    # anchor 2 has the text of document 7, anchor 5 that of label 4; neither has the edge, since cleaning removes it
    texts = list(anchors.texts.texts)
    texts[2], texts[5] = tiny_dataset.train.texts[7], tiny_dataset.labels.texts[4]
    edges = {side.value: getattr(anchors, side.value).tolil() for side in Side}
    edges["train"][7, 2] = edges["labels"][4, 5] = 0
    anchors = replace(
        anchors, texts=Texts(anchors.texts.uids, texts), **{side: matrix.tocsr() for side, matrix in edges.items()}
    )
    problem = replace(tiny_dataset, anchor_sets={"links": anchors})
    sampler = use_graphs(make_sampler(problem, batch_size=60), problem)
    masked_without_edge = set()
    for epoch in range(6):
        step = sampler.step(sampler.epoch_order(epoch), epoch, 0)
        batch = step.anchors["links"]
        for side, items in items_by_side(step).items():
            without_edge = batch.links[side].mask_BA & ~(edges_of(anchors, side)[items][:, batch.pool] > 0)
            for row, column in zip(*np.nonzero(without_edge), strict=True):
                masked_without_edge.add((side, int(items[row]), int(batch.pool[column])))
    assert masked_without_edge == {(Side.DOCUMENT, 7, 2), (Side.LABEL, 4, 5)}


def test_anchor_with_the_text_of_a_neighbour_is_no_negative(tiny_dataset: Dataset) -> None:
    """Its vector equals the positive's, so the loss would push the vector away as strongly as it draws it near."""
    anchors = tiny_dataset.anchor_sets["links"]
    texts = np.array(anchors.texts.texts, object)
    texts[1::2] = texts[::2][: len(texts[1::2])]  # pairs of anchors with the same text, except the last anchor
    anchors = replace(anchors, texts=Texts(anchors.texts.uids, texts.tolist()))
    problem = replace(tiny_dataset, anchor_sets={"links": anchors})
    sampler = use_graphs(make_sampler(problem, batch_size=60), problem)
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    batch, same_text = step.anchors["links"], (texts[:, None] == texts[None, :]).astype(float)
    for side, items in items_by_side(step).items():
        mask, linked = batch.links[side].mask_BA, edges_of(anchors, side)[items]
        np.testing.assert_array_equal(mask, (linked @ same_text > 0)[:, batch.pool])
        assert (mask & (linked[:, batch.pool] == 0)).any(), "an anchor is masked because of its text alone"


def test_anchor_that_is_the_row_or_a_true_partner_is_no_negative(tiny_dataset: Dataset) -> None:
    """The anchors are the labels and the documents, recognised by their uids; the edges are arbitrary."""
    documents, labels = (
        Texts([f"{kind} {uid}" for uid in items.uids], items.texts)
        for kind, items in (("document", tiny_dataset.train), ("label", tiny_dataset.labels))
    )
    uids = [*labels.uids, *documents.uids]
    edges = sp.csr_matrix((np.ones(60, np.float32), (np.arange(60), (np.arange(60) * 7) % len(uids))), (60, len(uids)))
    no_edges = sp.csr_matrix((len(labels), len(uids)), dtype=np.float32)
    anchors = AnchorSet(Texts(uids, [f"page {uid}" for uid in uids]), edges, no_edges)
    problem = replace(tiny_dataset, train=documents, labels=labels, anchor_sets={"pages": anchors})
    y, identity = problem.y_train, sp.identity(60, format="csr")
    expected = {
        Side.DOCUMENT: sp.hstack([y, identity]).toarray() > 0,
        Side.LABEL: sp.hstack([sp.identity(len(labels)), y.T]).toarray() > 0,
    }
    false_negatives = {
        Side.DOCUMENT: false_negative_anchors(documents, labels, y, anchors.texts),
        Side.LABEL: false_negative_anchors(labels, documents, sp.csr_matrix(y.T), anchors.texts),
    }
    for side in Side:
        np.testing.assert_array_equal(false_negatives[side].toarray() > 0, expected[side])
    sampler, graphs = make_sampler(problem, batch_size=60), graphs_of(problem)
    active = {"pages": {Side.DOCUMENT: True, Side.LABEL: False}}
    sampler.use_graphs(graphs, graphs, active, number_texts(problem), {"pages": false_negatives})
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    batch = step.anchors["pages"]
    mask, linked = batch.links[Side.DOCUMENT].mask_BA, edges.toarray()[step.documents][:, batch.pool] > 0
    np.testing.assert_array_equal(mask, linked | expected[Side.DOCUMENT][step.documents][:, batch.pool])
    assert (mask & ~linked).any()


def test_graphs_change_neither_documents_nor_labels_of_a_step(tiny_dataset: Dataset) -> None:
    samplers = make_sampler(tiny_dataset), use_graphs(make_sampler(tiny_dataset), tiny_dataset)
    without, with_graphs = (sampler.step(sampler.epoch_order(4), 4, 1) for sampler in samplers)
    np.testing.assert_array_equal(without.documents, with_graphs.documents)
    np.testing.assert_array_equal(without.labels, with_graphs.labels)
    np.testing.assert_array_equal(without.positive, with_graphs.positive)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 3.0, 1.0, 1.0, 2.0])])
def test_row_sampler_follows_the_weights(weights: np.ndarray | None) -> None:
    indptr, indices = np.array([0, 2, 2, 5]), np.array([7, 8, 1, 2, 3], np.int32)
    sampler = RowSampler(indptr, indices, weights)
    rows = np.tile([0, 1, 2], 20_000)
    kept, drawn = sampler.draw(rows, keyed_rng(0, "test"))
    assert (rows[kept] != 1).all()
    expected = {7: 1, 8: 1, 1: 1, 2: 1, 3: 1} if weights is None else {7: 1, 8: 3, 1: 1, 2: 1, 3: 2}
    for column, weight in expected.items():
        share = weight / sum(w for c, w in expected.items() if (c >= 7) == (column >= 7))
        assert (drawn == column).sum() / 20_000 == pytest.approx(share, abs=0.02)


def test_membership_mask_equals_scipy_indexing() -> None:
    matrix = sp.random(50, 40, 0.1, format="csr", random_state=0)
    rows, columns = np.array([3, 3, 0, 49, 20]), np.array([39, 0, 7, 21, 5])
    mask = MembershipMask(matrix.indptr, matrix.indices, 40)
    for _ in range(2):  # the second call reuses the scratch memory of the first
        np.testing.assert_array_equal(mask(rows, columns), matrix.toarray()[rows][:, columns] != 0)


def test_anchors_of_a_set_do_not_depend_on_other_sets(tiny_dataset: Dataset) -> None:
    one_set = replace(tiny_dataset, anchor_sets={"links": tiny_dataset.anchor_sets["links"]})
    samplers = [use_graphs(make_sampler(problem), problem) for problem in (tiny_dataset, one_set)]
    pools = [sampler.step(sampler.epoch_order(0), 0, 0).anchors["links"].pool for sampler in samplers]
    np.testing.assert_array_equal(*pools)


@pytest.mark.parametrize("weights", [None, np.array([9.0, 1.0, 1.0, 2.0, 9.0, 9.0, 9.0, 1.0, 3.0])])
def test_shared_sampler_follows_the_weights_of_each_row(weights: np.ndarray | None) -> None:
    indptr, indices = np.array([0, 2, 2, 5]), np.array([7, 8, 1, 2, 3], np.int32)
    sampler = SharedSampler(indptr, indices, weights)
    draws = []
    for key in range(8000):
        kept, drawn = sampler.draw(np.array([0, 1, 2]), key * 7919)
        assert kept.tolist() == [0, 2]
        draws += drawn.tolist()
    for column, row in ((7, [7, 8]), (8, [7, 8]), (1, [1, 2, 3]), (2, [1, 2, 3]), (3, [1, 2, 3])):
        expected = 1 / len(row) if weights is None else weights[column] / weights[row].sum()
        assert draws.count(column) / 8000 == pytest.approx(expected, abs=0.025)


def test_shared_draws_of_two_rows_agree_with_the_jaccard_similarity() -> None:
    rows = [{1, 2, 3, 4}, {3, 4, 5, 6}, {3, 4}, {8}]
    indptr = np.cumsum([0, *map(len, rows)])
    sampler = SharedSampler(indptr, np.concatenate([sorted(r) for r in rows]).astype(np.int32))
    draws = np.array([sampler.draw(np.arange(4), key * 104729)[1] for key in range(6000)])
    for i in range(4):
        for j in range(4):
            jaccard = len(rows[i] & rows[j]) / len(rows[i] | rows[j])
            assert (draws[:, i] == draws[:, j]).mean() == pytest.approx(jaccard, abs=0.025)


def test_anchor_budget_keeps_every_anchor_with_the_same_probability() -> None:
    pools = {"a": np.arange(30), "b": np.arange(100, 110)}
    counts: dict[int, int] = {}
    for key in range(3000):
        kept = sample_pools(pools, {"a": key, "b": 10_000 + key}, 10)
        assert sum(map(len, kept.values())) == 10
        for anchors in kept.values():
            for anchor in anchors.tolist():
                counts[anchor] = counts.get(anchor, 0) + 1
    np.testing.assert_allclose([counts[a] / 3000 for a in (*range(30), *range(100, 110))], 0.25, atol=0.05)
    unlimited = sample_pools(pools, {"a": 0, "b": 1}, 40)
    assert {name: pool.tolist() for name, pool in unlimited.items()} == {k: v.tolist() for k, v in pools.items()}


def test_step_respects_the_anchor_budget_and_links_are_edges(tiny_dataset: Dataset) -> None:
    without_graphs = make_sampler(tiny_dataset)
    sampler = use_graphs(make_sampler(tiny_dataset, shared_draws=True, anchor_budget=0.2), tiny_dataset)
    order = sampler.epoch_order(0)
    sampled = set()
    for index in range(sampler.steps_per_epoch):
        step, expected = sampler.step(order, 0, index), without_graphs.step(order, 0, index)
        np.testing.assert_array_equal(step.labels, expected.labels)
        assert sum(len(b.pool) for b in step.anchors.values()) <= 0.2 * (len(step.documents) + len(step.labels))
        for name, batch in step.anchors.items():
            for side, items in items_by_side(step).items():
                links, edges = batch.links[side], edges_of(tiny_dataset.anchor_sets[name], side)
                assert len(links.rows_R) == len(links.positive_R)
                assert (edges[items[links.rows_R], batch.pool[links.positive_R]] > 0).all()
                sampled |= {(name, anchor) for anchor in batch.pool.tolist()}
    assert len(sampled) > 5, "the anchors within the budget change from step to step"


def share_an_anchor(problem: Dataset) -> np.ndarray:
    """Bool [N, L]: documents and labels that share an anchor."""
    return sum((a.train @ a.labels.T).toarray() for a in problem.anchor_sets.values()) > 0  # type: ignore[return-value]


@pytest.mark.parametrize("sampling", ["uniform", "inverse_sqrt_degree"])
def test_graph_negatives_share_an_anchor_with_a_document(tiny_dataset: Dataset, sampling: str) -> None:
    graphs = graphs_of(tiny_dataset)
    reachable = share_an_anchor(tiny_dataset)
    unlimited = GraphNegatives(graphs, sampling, 1.0)  # type: ignore[arg-type]
    for document in range(60):
        draws = [unlimited.draw(np.array([document]), 1000, np.random.default_rng(k)) for k in range(200)]
        assert all(len(labels) <= len(graphs) for labels in draws)
        np.testing.assert_array_equal(np.unique(np.concatenate(draws)), np.flatnonzero(reachable[document]))
    limited = GraphNegatives(graphs, sampling, 0.5)  # type: ignore[arg-type]
    labels = limited.draw(np.arange(60), 10, np.random.default_rng(0))
    assert len(labels) == 5 == len(set(labels.tolist()))


def test_graph_negatives_draw_an_anchor_by_weight_and_then_a_label_uniformly() -> None:
    # the document has a rare anchor (2 edges, label 0) and a common one (8 edges, labels 1 to 7)
    edges = {Side.DOCUMENT: np.ones((1, 2), np.float32), Side.LABEL: np.array([[1, 0]] + [[0, 1]] * 7, np.float32)}
    graphs = {"links": {side: make_graph(sp.csr_matrix(matrix)) for side, matrix in edges.items()}}
    for sampling, rare in (("uniform", 0.5), ("inverse_sqrt_degree", 8**0.5 / (8**0.5 + 2**0.5))):
        sampler = GraphNegatives(graphs, sampling, 1.0)  # type: ignore[arg-type]
        drawn = np.concatenate([sampler.draw(np.array([0]), 10, np.random.default_rng(k)) for k in range(8000)])
        shares = np.bincount(drawn, minlength=8) / 8000
        np.testing.assert_allclose(shares, [rare] + [(1 - rare) / 7] * 7, atol=0.02)


@pytest.mark.parametrize("name", ["inbatch", "ngame", "siamesexml"])
def test_graph_negatives_replace_random_labels_and_are_not_regularised(tiny_dataset: Dataset, name: str) -> None:
    negatives = GraphNegatives(graphs_of(tiny_dataset), "uniform", 0.5)
    without_random, without_negatives, sampler = (
        use_graphs(
            make_sampler(tiny_dataset, base=BaseConfig(name=name, random_labels=count), graph_negatives=drawn),
            tiny_dataset,
        )
        for count, drawn in ((0.0, None), (0.5, None), (0.5, negatives))
    )
    known = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    shared = share_an_anchor(tiny_dataset)
    added = removed = 0
    for epoch in range(50):
        least, before, step = (s.step(s.epoch_order(0), epoch, 0) for s in (without_random, without_negatives, sampler))
        np.testing.assert_array_equal(step.documents, before.documents)
        np.testing.assert_array_equal(step.labels[step.positive], before.labels[before.positive])
        np.testing.assert_array_equal(step.mask, known[step.documents][:, step.labels])
        assert set(least.labels) <= set(step.labels) and len(step.labels) <= len(least.labels) + 8
        new_labels = np.setdiff1d(step.labels, before.labels)
        assert shared[step.documents][:, new_labels].any(0).all() and len(new_labels) <= 4
        added, removed = added + len(new_labels), removed + len(np.setdiff1d(before.labels, step.labels))
        links = step.anchors["links"].links[Side.LABEL]
        assert not set(new_labels) & set(step.labels[links.rows_R]), "graph negatives are not regularised"
    assert added > 30 and removed > 30


@pytest.mark.parametrize("name", ["inbatch", "ngame"])
def test_random_labels_are_negatives_and_regularised_and_change_nothing_else(tiny_dataset: Dataset, name: str) -> None:
    sampler, without_random = (
        use_graphs(make_sampler(tiny_dataset, base=BaseConfig(name=name, random_labels=count)), tiny_dataset)
        for count in (0.5, 0)
    )
    known = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    counts = np.zeros(30, int)
    for epoch in range(300):
        step, before = (s.step(s.epoch_order(0), epoch, 0) for s in (sampler, without_random))
        np.testing.assert_array_equal(step.labels[step.positive], before.labels[before.positive])
        assert set(before.labels) <= set(step.labels) and len(step.labels) <= len(before.labels) + 8
        np.testing.assert_array_equal(step.mask, known[step.documents][:, step.labels])
        random_labels = np.setdiff1d(step.labels, before.labels)
        links = step.anchors["links"].links[Side.LABEL]
        assert set(random_labels) <= set(step.labels[links.rows_R])
        counts[random_labels] += 1
    assert counts[29] == pytest.approx(300 * 8 / 30, abs=35), (
        "the last label has no document: it is only drawn randomly"
    )


def test_label_with_the_text_of_a_known_label_or_of_the_document_is_no_negative() -> None:
    """Document 0 has labels 0 and 1, and label 2 has the text of label 1. Document 1 has the text of label 3. Label 4
    is ignored for document 2 and has the text of label 5."""
    y = sp.csr_matrix(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]], np.float32))
    ignored = sp.csr_matrix((np.ones(1, np.float32), ([2], [4])), shape=y.shape)
    problem = LabelProblem(np.arange(3), y, ignored, np.array([0, 1, 1, 2, 3, 3]), np.array([7, 2, 8]), 3)
    sampler = StepSampler(make_base(BaseConfig(random_labels=2.0), problem, Triplet()), 3, 0)
    expected = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]], bool)
    for epoch in range(20):
        step = sampler.step(sampler.epoch_order(epoch), epoch, 0)
        np.testing.assert_array_equal(step.mask, expected[step.documents][:, step.labels])
        assert len(step.labels) == 6
