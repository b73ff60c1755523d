"""Cleaning, stage `build-graph`, the graph container and edge cosines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
import scipy.sparse as sp
from on_disk import on_disk

from ramen.artifacts import create_drafts, open_artifact
from ramen.config import WalkConfig
from ramen.data.dataset import AnchorSet, Dataset, Side, Texts
from ramen.graph.build import add_edges, build_set
from ramen.graph.cleaning import false_negative_anchors, sample_edges
from ramen.graph.metadata import Graph, read_graphs
from ramen.graph.pruning import edge_cosines, isolated_share
from ramen.stages import run_stage


def make_graph(dense: object) -> Graph:
    matrix = sp.csr_matrix(np.asarray(dense, np.float32))
    return add_edges(matrix, np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


def build_graphs(problem: Dataset, name: str, settings: WalkConfig) -> dict[str, Graph]:
    return build_set(
        problem.anchor_sets[name],
        settings,
        documents=problem.train,
        labels=problem.labels,
        test=problem.test,
        y_train=problem.y_train,
    ).graphs


def make_texts(prefix: str, count: int) -> Texts:
    return Texts([f"{prefix}{i}" for i in range(count)], [f"{prefix} text {i}" for i in range(count)])


@pytest.mark.parametrize("by", ["uid", "text"])
def test_test_documents_are_removed_before_the_walk(by: str) -> None:
    """Documents 0 and 1 share only anchor 1, which is a test document; without it 0 cannot reach anchor 2."""
    anchors = make_texts("a", 3)
    test = Texts(["a1"], ["unlike"]) if by == "uid" else Texts(["unlike"], ["a text 1"])
    edges = sp.csr_matrix(np.array([[1, 1, 0], [0, 1, 1]], np.float32))
    problem = AnchorSet(anchors, edges, sp.csr_matrix((1, 3), dtype=np.float32))
    result = build_set(
        problem,
        WalkConfig(hops=400),
        documents=make_texts("d", 2),
        labels=make_texts("l", 1),
        test=test,
        y_train=sp.csr_matrix((2, 1)),
    )
    assert result.graphs["train"].csr().toarray().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert result.counts["test_anchors"] == 1
    same_title = replace(problem, texts=Texts(anchors.uids, ["a text 0", "a text 1", "a text 1"]))
    known = {"documents": make_texts("d", 2), "labels": make_texts("l", 1), "y_train": sp.csr_matrix((2, 1))}
    both = build_set(same_title, WalkConfig(hops=0), test=Texts(["a1"], ["a text 1"]), **known)
    assert both.graphs["train"].csr().toarray().tolist() == [[1, 0, 0], [0, 0, 0]], "all anchors with its text"
    unfiltered = build_set(
        problem,
        WalkConfig(hops=400),
        documents=make_texts("d", 2),
        labels=make_texts("l", 1),
        test=make_texts("t", 1),
        y_train=sp.csr_matrix((2, 1)),
    )
    assert unfiltered.graphs["train"].csr().toarray()[0, 2] == 1, "without the test document the walk reaches anchor 2"


def test_page_with_content_matches_anchor_by_title() -> None:
    """The texts of full-text documents are "title content"; the anchors are titles."""
    test = Texts(["t0"], ["a text 1 and on it goes"], ["a text 1"])
    documents = Texts(["d0", "d1"], ["a text 0 at length", "d text 1"], ["a text 0", "d text 1"])
    edges = sp.csr_matrix(np.ones((2, 3), np.float32))
    result = build_set(
        AnchorSet(make_texts("a", 3), edges, edges[:1]),
        WalkConfig(hops=0),
        documents=documents,
        labels=Texts(["l0"], ["a text 2 explained"], ["a text 2"]),
        test=test,
        y_train=sp.csr_matrix((2, 1)),
    )
    assert result.graphs["train"].csr().toarray().tolist() == [[0, 0, 1], [1, 0, 1]]
    assert result.graphs["labels"].csr().toarray().tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("shared", [True, False])
def test_numeric_uids_match_only_if_the_tables_share_a_numbering(shared: bool) -> None:
    """Three tables with uids 0, 1, 2, ...: one numbering for all, or one per table."""
    anchors = Texts([str(i) for i in range(9)], [f"Page {i}" for i in range(9)])
    test = Texts(["7", "8"], ["page 7, renamed", "page 8"] if shared else ["page 1!", "page 2!"])
    edges = sp.csr_matrix(np.ones((1, 9), np.float32))
    result = build_set(
        AnchorSet(anchors, edges, edges),
        WalkConfig(hops=0),
        documents=Texts(["0"], ["Page 0 at length" if shared else "Page 3"]),
        labels=Texts(["1"], ["unlike"]),
        test=test,
        y_train=sp.csr_matrix((1, 1)),
    )
    assert result.counts["test_anchors"] == (2 if shared else 0)
    edges_left = result.graphs["train"].csr().toarray()[0].tolist()
    assert edges_left == ([0, 1, 1, 1, 1, 1, 1, 0, 0] if shared else [1, 1, 1, 0, 1, 1, 1, 1, 1])


def test_build_graph_warns_if_most_edges_belong_to_hubs(
    tiny_dataset: Dataset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = {"dataset": on_disk(tiny_dataset, tmp_path)["dataset"]}
    for cap, warns in ((1, True), (1000, False)):
        sections = {"walk": {"hops": 0, "hub_cap": cap}}
        run_stage("build-graph", sections=sections, inputs=inputs, outputs={"graph": tmp_path / f"graph{cap}"})
        log = capfd.readouterr().err
        assert ("warning: anchor set category: " in log and f"more than walk.hub_cap = {cap}; raise it" in log) == warns


def test_row_is_never_its_own_anchor_even_after_the_walk() -> None:
    anchors = make_texts("d", 3)
    edges = sp.csr_matrix(np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1]], np.float32))
    result = build_set(
        AnchorSet(anchors, edges, sp.csr_matrix((1, 3), dtype=np.float32)),
        WalkConfig(hops=400),
        documents=make_texts("d", 3),
        labels=make_texts("l", 1),
        test=make_texts("t", 1),
        y_train=sp.csr_matrix((3, 1)),
    )
    assert (result.graphs["train"].csr().toarray().diagonal() == 0).all()


def test_walk_keeps_all_clean_edges_and_adds_at_most_max_new(
    tiny_dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.graph.build.MAX_NEW", 3)
    for name in tiny_dataset.anchor_sets:
        clean, walked = (build_graphs(tiny_dataset, name, WalkConfig(hops=hops)) for hops in (0, 400))
        for side in ("train", "labels"):
            before, after = clean[side].csr(), walked[side].csr()
            assert (after - before).min() >= 0
            np.testing.assert_array_equal(walked[side].select(walked[side].original).indices, clean[side].indices)
            assert ((after - before).sum(1) <= 3).all()
            assert (walked[side].weight > 0).all() and (walked[side].weight[walked[side].original] == 1).all()
    assert build_graphs(tiny_dataset, "links", WalkConfig(hops=400))["train"].num_edges > clean["train"].num_edges


def test_hub_cap_removes_all_edges_of_hubs(tiny_dataset: Dataset) -> None:
    cap = 8
    graphs = build_graphs(tiny_dataset, "category", WalkConfig(hops=0, hub_cap=cap))
    raw = tiny_dataset.anchor_sets["category"]
    degree = np.asarray(raw.train.sum(0) + raw.labels.sum(0)).ravel()
    assert (degree > cap).any()
    remaining = set(graphs["train"].indices) | set(graphs["labels"].indices)
    assert remaining == set(np.flatnonzero(degree <= cap))


def test_drop_label_anchors_removes_edges_to_true_labels() -> None:
    anchors, labels = make_texts("l", 3), make_texts("l", 3)
    edges = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 1]], np.float32))
    y = sp.csr_matrix(np.array([[1, 0, 0], [1, 1, 0]], np.float32))
    for strict, expected in ((False, [[1, 1, 0], [0, 0, 1]]), (True, [[0, 1, 0], [0, 0, 1]])):
        result = build_set(
            AnchorSet(anchors, edges, sp.csr_matrix((3, 3), dtype=np.float32)),
            WalkConfig(hops=0, drop_label_anchors=strict),
            documents=make_texts("d", 2),
            labels=labels,
            test=make_texts("t", 1),
            y_train=y,
        )
        assert result.graphs["train"].csr().toarray().tolist() == expected


def test_walk_does_not_restore_edges_to_true_labels() -> None:
    """Document 0 has label a1 and reaches its anchor through anchor 0, which document 1 shares."""
    edges = sp.csr_matrix(np.array([[1, 1, 0], [1, 1, 1]], np.float32))
    walked = {
        strict: build_set(
            AnchorSet(make_texts("a", 3), edges, sp.csr_matrix((1, 3), dtype=np.float32)),
            WalkConfig(hops=400, drop_label_anchors=strict),
            documents=make_texts("d", 2),
            labels=Texts(["a1"], ["a text 1"]),
            test=make_texts("t", 1),
            y_train=sp.csr_matrix([[1], [0]], dtype=np.float32),
        ).graphs["train"].csr().toarray()
        for strict in (False, True)
    }  # fmt: skip
    assert walked[False][0].tolist() == [1, 1, 1] and walked[True][0].tolist() == [1, 0, 1]
    assert walked[True][1].tolist() == [1, 1, 1]


def write_dataset(problem: Dataset, path: Path) -> Path:
    with create_drafts({"dataset": path}, sections={}, inputs={}, work=path.parent / "work") as outputs:
        problem.write(outputs["dataset"].path)
    return path


def test_stage_output_does_not_depend_on_number_of_threads(
    tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_dataset(tiny_dataset, tmp_path / "dataset")
    digests = []
    cores = numba.config.NUMBA_NUM_THREADS
    for threads in (1, 2):
        monkeypatch.setattr("numba.config.NUMBA_NUM_THREADS", min(threads, cores))
        run_stage(
            "build-graph",
            sections={"walk": {"hops": 40}},
            inputs={"dataset": dataset},
            outputs={"graph": tmp_path / f"graph{threads}"},
        )
        digests.append(open_artifact(tmp_path / f"graph{threads}", "graph").manifest["files"])
    assert digests[0] == digests[1]
    graphs = read_graphs(tmp_path / "graph1")
    assert set(graphs) == {"category", "links"}
    leaked = len(tiny_dataset.labels)  # the anchor of set `links` that is test document 0
    assert all(leaked not in graph.indices for graph in graphs["links"].values())


def test_stage_runs_without_edges_of_test_documents(tiny_dataset: Dataset, tmp_path: Path) -> None:
    dataset = write_dataset(
        replace(tiny_dataset, anchor_sets={n: replace(a, test=None) for n, a in tiny_dataset.anchor_sets.items()}),
        tmp_path / "dataset",
    )
    assert run_stage("build-graph", sections={}, inputs={"dataset": dataset}, outputs={"graph": tmp_path / "g"})


@pytest.mark.parametrize("empty", ["first", "middle", "last", "none", "all"])
def test_select_matches_masking_a_dense_matrix(empty: str) -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((6, 5)) < 0.6).astype(np.float32)
    dense[{"first": [0], "middle": [2, 3], "last": [5], "none": [], "all": range(6)}[empty]] = 0
    graph = make_graph(dense)
    keep = rng.random(graph.num_edges) < 0.5
    expected = dense.copy()
    expected[tuple(coordinates[~keep] for coordinates in np.nonzero(dense))] = 0
    part = graph.select(keep)
    np.testing.assert_array_equal(part.csr().toarray(), expected)
    assert part.num_edges == keep.sum() and len(part.weight) == len(part.original) == part.num_edges
    assert make_graph(np.zeros((0, 4))).select(np.zeros(0, bool)).shape == (0, 4)


def test_graph_read_equals_graph_written(tmp_path: Path) -> None:
    graph = make_graph([[0, 1, 1], [0, 0, 0], [1, 0, 0]])
    graph.write(tmp_path / "g.npz")
    read = Graph.read(tmp_path / "g.npz")
    for field in ("indptr", "indices", "weight", "original", "shape"):
        np.testing.assert_array_equal(getattr(graph, field), getattr(read, field))


def test_edge_cosines_match_scikit_learn_for_any_chunk_size() -> None:
    from sklearn.metrics.pairwise import cosine_similarity

    rng = np.random.default_rng(0)
    rows, anchors = (rng.normal(size=(n, 8)).astype(np.float32) for n in (6, 9))
    rows, anchors = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (rows, anchors))
    dense = rng.random((6, 9)) < 0.4
    graph = make_graph(dense)
    for chunk in (1, 7, 1000):
        np.testing.assert_allclose(
            edge_cosines(graph, rows, anchors, chunk), cosine_similarity(rows, anchors)[dense], atol=1e-6
        )


def test_isolated_share() -> None:
    a, b = make_graph([[1, 1, 0], [0, 0, 1]]), make_graph([[1, 0, 0], [0, 0, 0]])
    assert (
        isolated_share(a, b) == 0.5
        and isolated_share(a, a) == isolated_share(make_graph([[0]]), make_graph([[0]])) == 0
    )


def test_hubs_do_not_depend_on_volume() -> None:
    edges = sp.random(60, 8, 0.3, "csr", np.float32, random_state=0).sign().tolil()
    edges[:, 0] = 1  # every document has this anchor
    anchors = AnchorSet(make_texts("a", 8), edges.tocsr(), sp.csr_matrix((2, 8), dtype=np.float32))
    known = {"documents": make_texts("d", 60), "labels": make_texts("l", 2), "test": make_texts("t", 1)}
    known["y_train"] = sp.csr_matrix((60, 2))
    kept = {
        volume: {*zip(*build_set(anchors, WalkConfig(hops=0, hub_cap=40, volume=volume), **known).graphs["train"].csr()
                      .nonzero(), strict=True)}
        for volume in (0.2, 0.5, 1.0)
    }  # fmt: skip
    assert kept[0.2] < kept[0.5] < kept[1.0] and 0 not in {column for _, column in kept[0.2]}
    assert len(kept[0.5]) / len(kept[1.0]) == pytest.approx(0.5, abs=0.12)


def test_smaller_volume_keeps_subset_of_edges() -> None:
    matrix = sp.random(200, 50, 0.2, format="csr", rng=np.random.default_rng(0), dtype=np.float32)
    kept = {
        volume: {*zip(*sample_edges(matrix, volume, np.random.default_rng(3)).nonzero(), strict=True)}
        for volume in (0.2, 0.5, 1.0)
    }
    assert kept[0.2] < kept[0.5] < kept[1.0] == {*zip(*matrix.nonzero(), strict=True)}
    assert len(kept[0.2]) / matrix.nnz == pytest.approx(0.2, abs=0.03)
    assert len(kept[0.5]) / matrix.nnz == pytest.approx(0.5, abs=0.04)


def test_all_anchors_with_an_items_title_match_the_item() -> None:
    """Two anchors and the only label are called Paris: both anchors are the label, and the document's true label."""
    same_title = Texts(["x1", "x2", "x3"], ["Paris", "Paris", "France"])
    documents, labels, test = Texts(["d"], ["capital"]), Texts(["l"], ["Paris"]), Texts(["t"], ["test"])
    edges = sp.csr_matrix(np.ones((1, 3), np.float32))
    y = sp.csr_matrix(np.ones((1, 1), np.float32))
    anchors = AnchorSet(same_title, edges, edges)
    strict = build_set(
        anchors, WalkConfig(drop_label_anchors=True), documents=documents, labels=labels, test=test, y_train=y
    )
    for side in ("train", "labels"):
        assert strict.graphs[side].csr().toarray().tolist() == [[0, 0, 1]]
    assert false_negative_anchors(documents, labels, y, same_title).toarray().tolist() == [[1, 1, 0]]
    label_as_test = build_set(anchors, WalkConfig(), documents=documents, labels=labels, test=labels, y_train=y)
    assert label_as_test.counts["test_anchors"] == 2
    # the walk does not restore such edges: documents 0 and 1 share anchor 2
    walked = build_set(
        AnchorSet(same_title, sp.csr_matrix(np.array([[0, 0, 1], [1, 1, 1]], np.float32)), sp.csr_matrix((0, 3))),
        WalkConfig(hops=400), documents=Texts(["a", "b"], ["Paris", "other"]), labels=labels.select([]), test=test,
        y_train=sp.csr_matrix((2, 0)),
    )  # fmt: skip
    assert walked.graphs["train"].csr().toarray().tolist() == [[0, 0, 1], [1, 1, 1]]


def test_volume_samples_differ_between_sets_and_sides_of_equal_shape() -> None:
    edges = sp.csr_matrix(np.ones((40, 10), np.float32))
    known = {"documents": make_texts("d", 40), "labels": make_texts("l", 40), "test": make_texts("t", 1),
             "y_train": sp.csr_matrix((40, 40))}  # fmt: skip
    anchors, settings = AnchorSet(make_texts("a", 10), edges, edges), WalkConfig(volume=0.5, hub_cap=0)
    kept = [
        {*zip(*graph.csr().nonzero(), strict=True)}
        for name in ("one", "two")
        for graph in build_set(anchors, settings, name=name, **known).graphs.values()
    ]
    overlaps = [len(a & b) for i, a in enumerate(kept) for b in kept[:i]]
    assert all(70 < overlap < 130 for overlap in overlaps), "of 200 edges each; 100 expected by chance"


def test_side_names() -> None:
    assert [str(side) for side in Side] == ["train", "labels"]
    assert [side.role for side in Side] == ["documents", "labels"]
