"""Training through the library: its artifacts equal those of the stages; attributes and methods of a run."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_disk import on_disk
from safetensors.numpy import load_file

import ramen
from ramen.errors import ArtifactError, ConfigError, RamenError
from ramen.graph.metadata import read_graphs
from ramen.stages import run_stage

QUERIES = ["notes about soil", "anchor and rope"]


def assert_close(a: ramen.Retriever, b: ramen.Retriever) -> None:
    """Same labels, and same scores up to the rounding of bf16, which published encoders use where it is fast."""
    assert a.uids == b.uids and a.texts == b.texts
    for hits, expected_hits in zip(a.query(QUERIES, k=30), b.query(QUERIES, k=30), strict=True):
        expected = {hit.uid: hit.score for hit in expected_hits}
        assert {hit.uid: hit.score for hit in hits} == pytest.approx(expected, abs=1e-2)


def test_run_equals_the_stages_on_the_same_dataset(
    finished_run: ramen.Run, shared_dataset: ramen.Dataset, sections: dict[str, Any], tmp_path: Path
) -> None:
    paths = on_disk(shared_dataset, tmp_path) | {
        name: tmp_path / name for name in ("warm_model", "model", "pruned_graph")
    }
    for stage, reads, writes in (
        ("warmup", ("dataset", "graph"), ("warm_model",)),
        ("prune-retrain", ("dataset", "graph", "warm_model"), ("model", "pruned_graph")),
    ):
        inputs, outputs = ({name: paths[name] for name in names} for names in (reads, writes))
        run_stage(stage, sections=sections, inputs=inputs, outputs=outputs)
    weights, expected = (
        load_file(folder / "model.safetensors") for folder in (finished_run.folder / "model", tmp_path / "model")
    )
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in weights)
    assert finished_run.history == json.loads((tmp_path / "model" / "history.json").read_text())
    pruned = read_graphs(tmp_path / "pruned_graph")
    for name, sides in finished_run.graphs.items():
        np.testing.assert_array_equal(sides["documents"].toarray() > 0, pruned[name]["train"].csr().toarray() > 0)


def test_run_has_metrics_history_and_report(finished_run: ramen.Run) -> None:
    assert 0 <= finished_run.metrics["p_at_1"] <= 100
    assert [record["phase"] for record in finished_run.history] == ["warmup", "retrain"]
    assert "<html" in finished_run.report.read_text()


def test_run_is_opened_from_its_folder(finished_run: ramen.Run, tmp_path: Path) -> None:
    again = ramen.Run.from_path(finished_run.folder)
    assert again.metrics.keys() == finished_run.metrics.keys()
    np.testing.assert_array_equal(again.model.encode(QUERIES), finished_run.model.encode(QUERIES))
    with pytest.raises(ArtifactError, match="not a finished dataset"):
        ramen.Run.from_path(tmp_path)


def test_query_ranks_labels_by_the_inner_product(finished_run: ramen.Run, shared_dataset: ramen.Dataset) -> None:
    model = finished_run.model
    scores = model.encode(QUERIES) @ model.encode(shared_dataset.labels.texts).T
    for hits, row in zip(model.query(QUERIES, k=3), scores, strict=True):
        assert [hit.text for hit in hits] == [shared_dataset.labels.texts[i] for i in np.argsort(-row)[:3]]
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(row)[::-1][:3], atol=1e-5)
    with pytest.raises(RamenError, match="expected a list of texts"):
        model.query("notes about soil")


@pytest.mark.slow
def test_temporary_run_is_deleted_with_its_object(shared_dataset: ramen.Dataset, sections: dict[str, Any]) -> None:
    run = ramen.train(shared_dataset, **sections)
    folder, model = run.folder, run.model
    assert folder.is_dir()
    del run
    gc.collect()
    assert not folder.exists()
    assert len(model.query(QUERIES, k=2)) == 2


def test_unregistered_retriever_is_opened_from_the_folder(finished_run: ramen.Run, tmp_path: Path) -> None:
    exact = ramen.Retriever.from_path(finished_run.folder)
    run = ramen.Run.from_path(shutil.copytree(finished_run.folder, tmp_path / "run"))
    metrics = run.publish(model="", kind="hnsw")
    assert metrics["ann_recall_at_10"] > 0.9 and "version" not in metrics
    published = ramen.Retriever.from_path(run.folder)
    assert_close(published, exact)
    with pytest.raises(ArtifactError, match="manifest.json"):
        ramen.Retriever.from_path(tmp_path)


@pytest.mark.slow
def test_tracked_run_is_registered_and_opened_from_the_registry(
    store: Path, shared_dataset: ramen.Dataset, sections: dict[str, Any], tmp_path: Path
) -> None:
    from ramen.tracking import list_pipeline_runs

    run = ramen.train(shared_dataset, out=tmp_path / "run", track=True, **sections)
    (tracked,) = list_pipeline_runs()
    assert tracked.status == "FINISHED" and tracked.params["training.epochs"] == "2"
    assert tracked.metrics["p_at_1"] == pytest.approx(run.metrics["p_at_1"])
    assert run.publish(model="toy")["promoted"] == 1
    retriever = ramen.Retriever.from_registry("toy")
    assert_close(retriever, run.model)
    assert len(ramen.Retriever.from_registry("toy", version=1)) == len(shared_dataset.labels)


def test_saved_encoder_loads_in_sentence_transformers(finished_run: ramen.Run, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    finished_run.save(tmp_path / "encoder")
    encoder = SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    np.testing.assert_allclose(encoder.encode(QUERIES), finished_run.model.encode(QUERIES), atol=1e-5)
    with pytest.raises(ArtifactError, match="refusing to overwrite"):
        finished_run.save(tmp_path / "encoder")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"trainig": {}}, "trainig: unknown section; did you mean training?"),
        ({"training": {"epoch": 3}}, "training.epoch: unknown; did you mean epochs?"),
        ({"training": {"lr": -1}}, "training.lr = -1"),
        ({"training": 3}, "training: expected a mapping of knobs, as training={...}, found 3"),
        ({"data": {"seed": 1}}, "data: no section of training; pass its knobs to ramen.load_dataset"),
        ({"index": {"kind": "flat"}}, "index: no section of training; pass its knobs to run.publish"),
        ({"preset": "dmeo"}, "preset 'dmeo': unknown; did you mean demo?"),
    ],
)
def test_unknown_sections_and_invalid_knobs_are_refused(
    arguments: dict[str, Any], expected: str, shared_dataset: ramen.Dataset
) -> None:
    with pytest.raises(ConfigError) as error:
        ramen.train(shared_dataset, **arguments)
    assert expected in str(error.value)


def test_sections_override_a_preset() -> None:
    from ramen.api.runs import _configured
    from ramen.config import resolve

    preset, changed = resolve(preset="demo"), _configured("demo", {"training": {"lr": 0.5}})
    assert changed.training.lr == 0.5
    assert changed.training.model_copy(update={"lr": preset.training.lr}) == preset.training
    assert changed.encoder == preset.encoder


def test_build_graph_equals_the_stage(shared_dataset: ramen.Dataset, tmp_path: Path) -> None:
    graphs = ramen.build_graph(shared_dataset, hub_cap=5)
    paths = on_disk(shared_dataset, tmp_path)
    run_stage("build-graph", sections={"walk": {"hub_cap": 5}}, inputs={"dataset": paths["dataset"]},
              outputs={"graph": tmp_path / "capped"})  # fmt: skip
    stored = read_graphs(tmp_path / "capped")
    assert graphs.keys() == stored.keys()
    for name, sides in graphs.items():
        for side, other in (("documents", stored[name]["train"]), ("labels", stored[name]["labels"])):
            assert sides[side].shape == other.shape
            np.testing.assert_array_equal(sides[side].indices, other.indices)
            np.testing.assert_array_equal(sides[side].data, other.weight)
