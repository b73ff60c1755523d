"""Steps: who is in them, and what the masks say, against scipy's own indexing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import graph_of, graphs_of

from ramen.base import make_base
from ramen.base.protocol import LabelProblem
from ramen.config import BaseConfig
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.graph.cleaning import false_negative_anchors
from ramen.objective.triplet import Triplet
from ramen.sampling import MembershipMask, RowSampler, SharedSampler, keyed_rng, sample_pools
from ramen.training.graph_negatives import GraphNegatives
from ramen.training.step_sampler import StepSampler


def sampler_of(
    problem: Dataset,
    batch_size: int = 16,
    seed: int = 0,
    texts: np.ndarray | None = None,
    base: BaseConfig | None = None,
    **budget: object,
) -> StepSampler:
    documents = np.flatnonzero(np.diff(problem.y_train.indptr))
    texts = np.arange(len(problem.labels)) if texts is None else texts
    own = len(texts) + np.arange(len(problem.train))  # no document reads as a label does
    told = LabelProblem(documents, problem.y_train, problem.filter_train, texts, own, batch_size, seed=seed)
    return StepSampler(make_base(base or BaseConfig(), told, Triplet()), batch_size, seed, **budget)  # type: ignore[arg-type]


def numbered(problem: Dataset) -> dict[str, np.ndarray]:
    """Text numbers of every role, as `TextTable` gives them."""
    texts = {"documents": problem.train.texts, "labels": problem.labels.texts}
    texts |= {f"anchors/{name}": anchors.texts.texts for name, anchors in problem.anchor_sets.items()}
    numbers: dict[str, int] = {}
    return {role: np.array([numbers.setdefault(t, len(numbers)) for t in items]) for role, items in texts.items()}


def with_graphs(sampler: StepSampler, problem: Dataset, keep: float = 1.0, sampling: str = "uniform") -> StepSampler:
    whole = graphs_of(problem)
    rng = np.random.default_rng(3)
    pruned = {n: {s: g.select(rng.random(g.num_edges) < keep) for s, g in sides.items()} for n, sides in whole.items()}
    on = {name: {"train": True, "labels": True} for name in whole}
    none = {name: {side: sp.csr_matrix(g.shape) for side, g in sides.items()} for name, sides in whole.items()}
    sampler.use_graphs(pruned, whole, on, sampling, numbered(problem), none)  # type: ignore[arg-type]
    sampler.pruned = pruned  # type: ignore[attr-defined]
    return sampler


def test_an_epoch_visits_every_document_once(tiny_dataset: Dataset) -> None:
    sampler = sampler_of(tiny_dataset)
    for epoch in range(2):
        order = sampler.epoch_order(epoch)
        seen = np.concatenate([sampler.step(order, epoch, i).documents for i in range(sampler.steps_per_epoch)])
        assert sorted(seen) == list(range(60))
    assert not np.array_equal(sampler.epoch_order(0), sampler.epoch_order(1))


def test_documents_without_labels_and_lonely_last_documents_make_no_step(tiny_dataset: Dataset) -> None:
    y = tiny_dataset.y_train.tolil()
    y[5] = 0
    problem = Dataset(
        tiny_dataset.train,
        tiny_dataset.test,
        tiny_dataset.labels,
        y.tocsr(),
        tiny_dataset.y_test,
        tiny_dataset.filter_train,
        tiny_dataset.filter_test,
    )
    sampler = sampler_of(problem, batch_size=29)
    assert 5 not in sampler.base.problem.documents and sampler.steps_per_epoch == 2
    assert sampler_of(problem, batch_size=58).steps_per_epoch == 1, "a single document left over has no negatives"
    assert sampler_of(problem, batch_size=20).steps_per_epoch == 3


def test_positives_are_true_and_masks_cover_every_true_or_filtered_pair(tiny_dataset: Dataset) -> None:
    sampler = sampler_of(tiny_dataset)
    allowed = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    assert (tiny_dataset.y_train.toarray()[step.documents, step.labels[step.positive]] > 0).all()
    np.testing.assert_array_equal(step.mask, allowed[step.documents][:, step.labels])


def test_labels_with_the_positives_very_text_are_masked(tiny_dataset: Dataset) -> None:
    same = np.zeros(len(tiny_dataset.labels), np.int64)  # as if all labels had one text
    sampler = sampler_of(tiny_dataset, texts=same)
    assert sampler.step(sampler.epoch_order(0), 0, 0).mask.all()


def test_anchors_come_from_the_pruned_graph_and_masks_from_the_unpruned(tiny_dataset: Dataset) -> None:
    sampler = with_graphs(sampler_of(tiny_dataset), tiny_dataset, keep=0.5)
    order = sampler.epoch_order(0)
    for index in range(sampler.steps_per_epoch):
        step = sampler.step(order, 0, index)
        for name, batch in step.anchors.items():
            anchors = tiny_dataset.anchor_sets[name]
            sides = (
                ("train", step.documents, batch.document, anchors.train),
                ("labels", step.labels, batch.label, anchors.labels),
            )
            for side, items, links, unpruned in sides:
                assert links is not None
                kept = sampler.pruned[name][side]  # type: ignore[attr-defined]
                rows = items[links.rows]
                assert (kept.csr().toarray()[rows, batch.pool[links.positive]] > 0).all()
                np.testing.assert_array_equal(links.mask, unpruned.toarray()[items][:, batch.pool] > 0)
                np.testing.assert_array_equal(links.drawn, np.unique(links.positive))
                drew = {*zip(links.rows.tolist(), links.positive.tolist(), strict=True)}
                assert drew >= {*zip(links.row.tolist(), links.drawn.tolist(), strict=True)}
                assert set(items) - set(rows) == {i for i in items if kept.indptr[i] == kept.indptr[i + 1]}


def test_an_anchor_that_reads_as_its_row_is_no_negative(tiny_dataset: Dataset) -> None:
    links = tiny_dataset.anchor_sets["links"]
    # anchor 2 is document 7, anchor 5 is label 4, neither by an edge: cleaning takes those away
    texts = list(links.texts.texts)
    texts[2], texts[5] = tiny_dataset.train.texts[7], tiny_dataset.labels.texts[4]
    edges = {side: getattr(links, side).tolil() for side in ("train", "labels")}
    edges["train"][7, 2] = edges["labels"][4, 5] = 0
    anchors = replace(links, texts=Texts(links.texts.uids, texts), **{s: e.tocsr() for s, e in edges.items()})
    problem = replace(tiny_dataset, anchor_sets={"links": anchors})
    sampler = with_graphs(sampler_of(problem, batch_size=60), problem)
    found = set()
    for epoch in range(6):
        step = sampler.step(sampler.epoch_order(epoch), epoch, 0)
        batch = step.anchors["links"]
        for side, items, links_of in (("train", step.documents, batch.document), ("labels", step.labels, batch.label)):
            assert links_of is not None
            extra = links_of.mask & ~(getattr(anchors, side).toarray()[items][:, batch.pool] > 0)
            rows, columns = np.nonzero(extra)
            found |= {
                (side, int(items[row]), int(batch.pool[column])) for row, column in zip(rows, columns, strict=True)
            }
    assert found == {("train", 7, 2), ("labels", 4, 5)}


def test_an_anchor_that_reads_as_one_the_row_is_linked_to_is_no_negative(tiny_dataset: Dataset) -> None:
    """It has the very vector of the positive: pushed away as hard as that is pulled, and nothing would move."""
    links = tiny_dataset.anchor_sets["links"]
    texts = np.array(links.texts.texts, object)
    texts[1::2] = texts[::2][: len(texts[1::2])]  # every anchor but the last has a twin
    anchors = replace(links, texts=Texts(links.texts.uids, texts.tolist()))
    problem = replace(tiny_dataset, anchor_sets={"links": anchors})
    sampler = with_graphs(sampler_of(problem, batch_size=60), problem)
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    batch, twins = step.anchors["links"], (texts[:, None] == texts[None, :]).astype(float)
    for side, items, found in (("train", step.documents, batch.document), ("labels", step.labels, batch.label)):
        assert found is not None
        linked = getattr(anchors, side).toarray()[items]
        np.testing.assert_array_equal(found.mask, (linked @ twins > 0)[:, batch.pool])
        assert (found.mask & (linked[:, batch.pool] == 0)).any(), "a twin that is not linked itself was in the step"


def test_an_anchor_that_is_the_row_or_a_true_partner_is_no_negative(tiny_dataset: Dataset) -> None:
    """Anchors are the labels and the documents, by their uids alone, whatever the edges are."""
    documents, labels = (
        Texts([f"{kind} {uid}" for uid in each.uids], each.texts)
        for kind, each in (("document", tiny_dataset.train), ("label", tiny_dataset.labels))
    )
    uids = [*labels.uids, *documents.uids]
    drawn = sp.csr_matrix((np.ones(60, np.float32), (np.arange(60), (np.arange(60) * 7) % len(uids))), (60, len(uids)))
    none = sp.csr_matrix((len(labels), len(uids)), dtype=np.float32)
    anchors = AnchorSet(Texts(uids, [f"page {uid}" for uid in uids]), drawn, none)
    problem = replace(tiny_dataset, train=documents, labels=labels, anchor_sets={"pages": anchors})
    y, eye = problem.y_train, sp.identity(60, format="csr")
    own = {
        "train": sp.hstack([y, eye]).toarray() > 0,
        "labels": sp.hstack([sp.identity(len(labels)), y.T]).toarray() > 0,
    }
    relatives = {
        "train": false_negative_anchors(documents, labels, y, anchors.texts),
        "labels": false_negative_anchors(labels, documents, sp.csr_matrix(y.T), anchors.texts),
    }
    for side, expected in own.items():
        np.testing.assert_array_equal(relatives[side].toarray() > 0, expected)
    sampler = sampler_of(problem, batch_size=60)
    graphs = graphs_of(problem)
    on = {"pages": {"train": True, "labels": False}}
    sampler.use_graphs(graphs, graphs, on, "uniform", numbered(problem), {"pages": relatives})
    step = sampler.step(sampler.epoch_order(0), 0, 0)
    links = step.anchors["pages"].document
    assert links is not None
    pool = step.anchors["pages"].pool
    edges = drawn.toarray()[step.documents][:, pool] > 0
    np.testing.assert_array_equal(links.mask, edges | own["train"][step.documents][:, pool])
    assert (links.mask & ~edges).any()


def test_graphs_change_neither_documents_nor_labels_of_a_step(tiny_dataset: Dataset) -> None:
    plain, graphs = sampler_of(tiny_dataset), with_graphs(sampler_of(tiny_dataset), tiny_dataset)
    a, b = (s.step(s.epoch_order(4), 4, 1) for s in (plain, graphs))
    np.testing.assert_array_equal(a.documents, b.documents)
    np.testing.assert_array_equal(a.labels, b.labels)
    np.testing.assert_array_equal(a.positive, b.positive)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 3.0, 1.0, 1.0, 2.0])])
def test_draws_follow_the_weights(weights: np.ndarray | None) -> None:
    indptr, indices = np.array([0, 2, 2, 5]), np.array([7, 8, 1, 2, 3], np.int32)
    sampler = RowSampler(indptr, indices, weights)
    rows = np.tile([0, 1, 2], 20_000)
    kept, drawn = sampler.draw(rows, keyed_rng(0, "test"))
    assert (rows[kept] != 1).all()
    expected = {7: 1, 8: 1, 1: 1, 2: 1, 3: 1} if weights is None else {7: 1, 8: 3, 1: 1, 2: 1, 3: 2}
    for column, weight in expected.items():
        share = weight / sum(w for c, w in expected.items() if (c >= 7) == (column >= 7))
        assert (drawn == column).sum() / 20_000 == pytest.approx(share, abs=0.02)


def test_membership_equals_scipys_indexing() -> None:
    matrix = sp.random(50, 40, 0.1, format="csr", random_state=0)
    rows, columns = np.array([3, 3, 0, 49, 20]), np.array([39, 0, 7, 21, 5])
    mask = MembershipMask(matrix.indptr, matrix.indices, 40)
    for _ in range(2):  # the scratch is clean again after a call
        np.testing.assert_array_equal(mask(rows, columns), matrix.toarray()[rows][:, columns] != 0)


def test_swapping_nothing_but_the_name_of_a_set_leaves_the_others_alone(tiny_dataset: Dataset) -> None:
    both = with_graphs(sampler_of(tiny_dataset), tiny_dataset)
    one = with_graphs(
        sampler_of(tiny_dataset),
        Dataset(
            **{
                k: getattr(tiny_dataset, k)
                for k in ("train", "test", "labels", "y_train", "y_test", "filter_train", "filter_test")
            },
            anchor_sets={"links": tiny_dataset.anchor_sets["links"]},
        ),
    )
    a, b = (s.step(s.epoch_order(0), 0, 0).anchors["links"] for s in (both, one))
    np.testing.assert_array_equal(a.pool, b.pool)


@pytest.mark.parametrize("weights", [None, np.array([9.0, 1.0, 1.0, 2.0, 9.0, 9.0, 9.0, 1.0, 3.0])])
def test_shared_draws_follow_each_rows_own_weights(weights: np.ndarray | None) -> None:
    indptr, indices = np.array([0, 2, 2, 5]), np.array([7, 8, 1, 2, 3], np.int32)
    sampler = SharedSampler(indptr, indices, weights)
    seen = []
    for key in range(8000):
        kept, drawn = sampler.draw(np.array([0, 1, 2]), key * 7919)
        assert kept.tolist() == [0, 2]
        seen += drawn.tolist()
    for column, row in ((7, [7, 8]), (8, [7, 8]), (1, [1, 2, 3]), (2, [1, 2, 3]), (3, [1, 2, 3])):
        expected = 1 / len(row) if weights is None else weights[column] / weights[row].sum()
        assert seen.count(column) / 8000 == pytest.approx(expected, abs=0.025)


def test_rows_agree_as_often_as_their_neighbours_overlap() -> None:
    rows = [{1, 2, 3, 4}, {3, 4, 5, 6}, {3, 4}, {8}]
    indptr = np.cumsum([0, *map(len, rows)])
    sampler = SharedSampler(indptr, np.concatenate([sorted(r) for r in rows]).astype(np.int32))
    draws = np.array([sampler.draw(np.arange(4), key * 104729)[1] for key in range(6000)])
    for i in range(4):
        for j in range(4):
            jaccard = len(rows[i] & rows[j]) / len(rows[i] | rows[j])
            assert (draws[:, i] == draws[:, j]).mean() == pytest.approx(jaccard, abs=0.025)


def test_the_budget_is_kept_and_every_anchor_has_the_same_chance() -> None:
    pools = {"a": np.arange(30), "b": np.arange(100, 110)}
    counts: dict[int, int] = {}
    for key in range(3000):
        kept = sample_pools(pools, {"a": key, "b": 10_000 + key}, 10)
        assert sum(map(len, kept.values())) == 10
        for anchors in kept.values():
            for anchor in anchors.tolist():
                counts[anchor] = counts.get(anchor, 0) + 1
    np.testing.assert_allclose([counts[a] / 3000 for a in (*range(30), *range(100, 110))], 0.25, atol=0.05)
    assert {k: v.tolist() for k, v in sample_pools(pools, {"a": 0, "b": 1}, 40).items()} == {
        k: v.tolist() for k, v in pools.items()
    }


def test_a_step_keeps_its_budget_and_its_links_stay_true(tiny_dataset: Dataset) -> None:
    plain = sampler_of(tiny_dataset)
    sampler = sampler_of(tiny_dataset, shared_draws=True, anchor_budget=0.2)
    with_graphs(sampler, tiny_dataset)
    order = sampler.epoch_order(0)
    pulled = set()
    for index in range(sampler.steps_per_epoch):
        step, bare = sampler.step(order, 0, index), plain.step(order, 0, index)
        np.testing.assert_array_equal(step.labels, bare.labels)
        assert sum(len(b.pool) for b in step.anchors.values()) <= 0.2 * (len(step.documents) + len(step.labels))
        for name, batch in step.anchors.items():
            edges = tiny_dataset.anchor_sets[name]
            for items, links, matrix in (
                (step.documents, batch.document, edges.train),
                (step.labels, batch.label, edges.labels),
            ):
                assert links is not None and len(links.rows) == len(links.positive)
                rows = items[links.rows]
                assert (matrix.toarray()[rows, batch.pool[links.positive]] > 0).all()
                pulled |= {(name, anchor) for anchor in batch.pool.tolist()}
    assert len(pulled) > 5, "which anchors are left out changes from step to step"


def two_steps_away(problem: Dataset) -> np.ndarray:
    """Bool [N, L]: documents and labels that share an anchor."""
    return sum((a.train @ a.labels.T).toarray() for a in problem.anchor_sets.values()) > 0  # type: ignore[return-value]


@pytest.mark.parametrize("sampling", ["uniform", "inverse_sqrt_degree"])
def test_graph_negatives_share_an_anchor_with_a_document(tiny_dataset: Dataset, sampling: str) -> None:
    graphs = graphs_of(tiny_dataset)
    reachable = two_steps_away(tiny_dataset)
    everyone = GraphNegatives(graphs, sampling, 1.0)  # type: ignore[arg-type]
    for document in range(60):
        alone = [everyone.draw(np.array([document]), 1000, np.random.default_rng(k)) for k in range(200)]
        assert all(len(labels) <= len(graphs) for labels in alone)
        np.testing.assert_array_equal(np.unique(np.concatenate(alone)), np.flatnonzero(reachable[document]))
    few = GraphNegatives(graphs, sampling, 0.5).draw(np.arange(60), 10, np.random.default_rng(0))  # type: ignore[arg-type]
    assert len(few) == 5 == len(set(few.tolist()))


def test_an_anchor_is_drawn_by_its_weight_and_then_a_label_uniformly() -> None:
    # the document has a rare anchor (2 edges, label 0) and a common one (8 edges, labels 1 to 7)
    edges = {"train": sp.csr_matrix(np.ones((1, 2), np.float32))}
    edges["labels"] = sp.csr_matrix(np.array([[1, 0]] + [[0, 1]] * 7, np.float32))
    graphs = {"links": {side: graph_of(matrix) for side, matrix in edges.items()}}
    for sampling, rare in (("uniform", 0.5), ("inverse_sqrt_degree", 8**0.5 / (8**0.5 + 2**0.5))):
        sampler = GraphNegatives(graphs, sampling, 1.0)  # type: ignore[arg-type]
        drawn = np.concatenate([sampler.draw(np.array([0]), 10, np.random.default_rng(k)) for k in range(8000)])
        share = np.bincount(drawn, minlength=8) / 8000
        np.testing.assert_allclose(share, [rare] + [(1 - rare) / 7] * 7, atol=0.02)


@pytest.mark.parametrize("name", ["inbatch", "ngame", "siamesexml"])
def test_graph_negatives_take_the_place_of_random_labels(tiny_dataset: Dataset, name: str) -> None:
    named = GraphNegatives(graphs_of(tiny_dataset), "uniform", 0.5)
    none, plain, sampler = (
        with_graphs(
            sampler_of(tiny_dataset, base=BaseConfig(name=name, random_labels=r), graph_negatives=g), tiny_dataset
        )
        for r, g in ((0.0, None), (0.5, None), (0.5, named))
    )
    known = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    shared = two_steps_away(tiny_dataset)
    new = gone = 0
    for epoch in range(50):
        least, bare, step = (s.step(s.epoch_order(0), epoch, 0) for s in (none, plain, sampler))
        np.testing.assert_array_equal(step.documents, bare.documents)
        np.testing.assert_array_equal(step.labels[step.positive], bare.labels[bare.positive])
        np.testing.assert_array_equal(step.mask, known[step.documents][:, step.labels])
        assert set(least.labels) <= set(step.labels) and len(step.labels) <= len(least.labels) + 8
        found = np.setdiff1d(step.labels, bare.labels)
        assert shared[step.documents][:, found].any(0).all() and len(found) <= 4
        new, gone = new + len(found), gone + len(np.setdiff1d(bare.labels, step.labels))
        links = step.anchors["links"].label
        assert links is not None and not set(found) & set(step.labels[links.rows]), "they compete, no more"
    assert new > 30 and gone > 30


@pytest.mark.parametrize("name", ["inbatch", "ngame"])
def test_random_labels_compete_are_pulled_and_change_nothing_else(tiny_dataset: Dataset, name: str) -> None:
    sampler = with_graphs(sampler_of(tiny_dataset, base=BaseConfig(name=name, random_labels=0.5)), tiny_dataset)
    plain = with_graphs(sampler_of(tiny_dataset, base=BaseConfig(name=name, random_labels=0)), tiny_dataset)
    known = (tiny_dataset.y_train + tiny_dataset.filter_train).toarray() > 0
    seen = np.zeros(30, int)
    for epoch in range(300):
        step, bare = (s.step(s.epoch_order(0), epoch, 0) for s in (sampler, plain))
        np.testing.assert_array_equal(step.labels[step.positive], bare.labels[bare.positive])
        assert set(bare.labels) <= set(step.labels) and len(step.labels) <= len(bare.labels) + 8
        np.testing.assert_array_equal(step.mask, known[step.documents][:, step.labels])
        beside = np.setdiff1d(step.labels, bare.labels)
        links = step.anchors["links"].label
        assert links is not None and set(beside) <= set(step.labels[links.rows])
        seen[beside] += 1
    assert seen[29] == pytest.approx(300 * 8 / 30, abs=35), "the last label has no document: it is drawn by chance only"


def test_a_label_that_reads_as_a_known_one_or_as_the_document_is_no_negative() -> None:
    """Document 0 has labels 0 and 1, label 2 reads as label 1 does; document 1 reads as label 3 does, and label 4,
    which is to be ignored for document 2, as label 5 does."""
    y = sp.csr_matrix(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]], np.float32))
    ignore = sp.csr_matrix((np.ones(1, np.float32), ([2], [4])), shape=y.shape)
    told = LabelProblem(np.arange(3), y, ignore, np.array([0, 1, 1, 2, 3, 3]), np.array([7, 2, 8]), 3)
    sampler = StepSampler(make_base(BaseConfig(random_labels=2.0), told, Triplet()), 3, 0)
    expected = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]], bool)
    for epoch in range(20):
        step = sampler.step(sampler.epoch_order(epoch), epoch, 0)
        np.testing.assert_array_equal(step.mask, expected[step.documents][:, step.labels])
        assert len(step.labels) == 6
