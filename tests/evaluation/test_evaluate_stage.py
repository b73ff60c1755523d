"""Stage `evaluate` on a small dataset with a randomly initialised encoder."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
from on_disk import graphs_of

from ramen.artifacts import create_drafts, open_artifact
from ramen.cli import tables
from ramen.config import EncoderConfig
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.encoder.loading import load_encoder
from ramen.errors import ArtifactError, DataError
from ramen.evaluation.report import COLUMNS
from ramen.graph.metadata import write_graphs
from ramen.stages import run_stage
from ramen.tracking import NullTracker

ENCODER = EncoderConfig(name="tiny", max_length=16, precision="fp32")
HISTORY = [
    {"epoch": 1, "phase": "warmup", "round": 0, "loss": 0.9, "val_p_at_1": 10.0},
    {"epoch": 2, "phase": "retrain", "round": 1, "loss": 0.8, "val_p_at_1": 12.0, "edges_kept": {"links.label": 0.9}},
]


class RecordingTracker(NullTracker):
    def __init__(self) -> None:
        self.headlines: dict[str, float] = {}
        self.files: list[str] = []

    def headline(self, metrics: Mapping[str, float]) -> None:
        self.headlines |= metrics

    def artifact(self, path: Path, folder: str = "") -> None:
        assert path.exists()
        self.files.append(path.name)


def write_inputs(problem: Dataset, folder: Path, history: Any = HISTORY) -> dict[str, Path]:
    paths = {name: folder / name for name in ("dataset", "pruned_graph", "model")}
    with create_drafts(paths, sections={}, inputs={}, work=folder / "work") as made:
        problem.write(made["dataset"].path)
        write_graphs(made["pruned_graph"].path, graphs_of(problem))
        load_encoder("tiny", ENCODER).save(made["model"].path)
        if history is not None:
            (made["model"].path / "history.json").write_text(json.dumps(history))
    return paths


def run_evaluate(inputs: dict[str, Path], out: Path, track: Any = None, **scoring: Any) -> dict[str, float]:
    sections = {"encoder": ENCODER.model_dump(), "scoring": {"peers": [], **scoring}}
    return run_stage("evaluate", sections=sections, inputs=inputs, outputs={"evaluation": out}, track=track)


@pytest.fixture(autouse=True)
def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMEN_WORK", str(tmp_path / "work"))


@pytest.fixture
def inputs(tiny_dataset: Dataset, tmp_path: Path) -> dict[str, Path]:
    return write_inputs(tiny_dataset, tmp_path)


@pytest.mark.slow
def test_link_prediction_uses_all_raw_edges_regardless_of_pruning(tiny_dataset: Dataset, tmp_path: Path) -> None:
    # more anchors than the depth of 100, so that the recall can be below 100 %
    links = tiny_dataset.anchor_sets["links"]
    extra_texts = [f"page of {i}" for i in range(300)]
    texts = Texts([*links.texts.uids, *(f"extra-{i}" for i in range(300))], [*links.texts.texts, *extra_texts])
    train = sp.hstack([links.train, sp.random(60, 300, 0.02, "csr", np.float32, random_state=0).sign()], "csr")
    wide = AnchorSet(texts, train, sp.csr_matrix((30, train.shape[1]), dtype=np.float32))
    problem = replace(tiny_dataset, anchor_sets={"links": wide})
    inputs = write_inputs(problem, tmp_path / "whole")
    metrics = run_evaluate(inputs, tmp_path / "a", links=True)
    encoder = load_encoder(inputs["model"], ENCODER)
    scores = encoder.encode(problem.train.texts) @ encoder.encode(texts.texts).T
    true = train.toarray() > 0
    true[:, links.texts.uids.index("test-0")] = False
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    recall = np.take_along_axis(true, nearest, axis=1).sum(1) / np.maximum(true.sum(1), 1)
    assert metrics["links/links_r_at_100"] == pytest.approx(100 * recall[true.any(1)].mean()) and recall.mean() < 0.9
    pruned = replace(wide, train=sp.csr_matrix(wide.train.shape, dtype=np.float32))
    with create_drafts({"pruned_graph": tmp_path / "p"}, sections={}, inputs={}, work=tmp_path / "work") as made:
        write_graphs(made["pruned_graph"].path, graphs_of(replace(problem, anchor_sets={"links": pruned})))
    repeated = run_evaluate({**inputs, "pruned_graph": tmp_path / "p"}, tmp_path / "b", links=True)
    assert repeated["links/links_r_at_100"] == metrics["links/links_r_at_100"]


def test_metrics_and_predictions_match_brute_force(
    inputs: dict[str, Path], tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.evaluation.predictions.ROW_GROUP", 7)
    out, track = tmp_path / "evaluation", RecordingTracker()
    metrics = run_evaluate(inputs, out, track)
    encoder = load_encoder(inputs["model"], ENCODER)
    scores = encoder.encode(tiny_dataset.test.texts) @ encoder.encode(tiny_dataset.labels.texts).T
    scores[tiny_dataset.filter_test.toarray() > 0] = -np.inf
    best = np.argsort(-scores, axis=1, kind="stable")
    hit = [tiny_dataset.y_test[i, best[i, 0]] for i in range(len(best))]
    assert metrics["p_at_1"] == pytest.approx(100 * np.mean(hit))

    table = pq.read_table(out / "predictions.parquet")
    assert table.column_names == ["document", "rank", "label", "label_index", "score"]
    rows = table.slice(0, 29).to_pylist()  # document 0: 30 labels, one of them filtered
    assert [row["label_index"] for row in rows] == best[0, :29].tolist()
    assert [row["rank"] for row in rows] == list(range(1, 30))
    assert {row["document"] for row in rows} == {"test-0"}
    assert rows[3]["label"] == tiny_dataset.labels.uids[best[0, 3]]
    assert table.num_rows == 20 * 30 - 1
    assert np.isfinite(table["score"].to_numpy()).all()

    stored = json.loads((out / "metrics.json").read_text())
    assert stored == metrics and list(stored) == sorted(stored)
    assert track.headlines == metrics
    assert set(track.files) == {"report.html", "metrics.json", "figures", "per_document.parquet"}


def test_slices_sum_to_the_metric_and_counts_are_recorded(inputs: dict[str, Path], tmp_path: Path) -> None:
    metrics = run_evaluate(inputs, tmp_path / "evaluation", propensity_a=0.6, propensity_b=2.6)
    for key in ("p_at_1", "n_at_5", "psp_at_5", "psn_at_3", "r_at_10", "fn_at_100"):
        assert sum(metrics[f"{part}/{key}"] for part in ("head", "torso", "tail")) == pytest.approx(metrics[key])
    assert 0 <= metrics["tail/label_r_at_10"] <= 100
    counts = open_artifact(tmp_path / "evaluation", "evaluation").counts
    assert counts["test_documents"] == 20 and counts["labels"] == 30
    assert counts["head_labels"] + counts["torso_labels"] + counts["tail_labels"] == 30
    assert (counts["propensity_a"], counts["propensity_b"]) == (0.6, 2.6)
    assert json.loads((tmp_path / "evaluation/propensity.json").read_text()) == {"a": 0.6, "b": 2.6, "N": 60}


def test_quantile_tables_sum_to_the_metrics(inputs: dict[str, Path], tmp_path: Path) -> None:
    metrics = run_evaluate(inputs, tmp_path / "evaluation")
    with (tmp_path / "evaluation/quantiles.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["labels"]) for row in rows) == 30
    assert sum(float(row["p_at_5"]) for row in rows) == pytest.approx(metrics["p_at_5"])
    with (tmp_path / "evaluation/plots/quantiles.csv").open() as stream:
        long = [row for row in csv.DictReader(stream) if row["metric"] == "p_at_5"]
    assert [row["value"] for row in long] == [row["p_at_5"] for row in rows]


def test_figures_and_report_are_written(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.evaluation.report_data.SAMPLES", 3)
    run_evaluate(inputs, tmp_path / "evaluation")
    stems = {file.stem for file in (tmp_path / "evaluation/figures").glob("*.png")}
    assert stems == {"quantiles", "training", "edges"}
    html = (tmp_path / "evaluation/report.html").read_text()
    assert html.count('class="sample"') == 3
    assert "A = 0.55, B = 1.5, N = 60" in html


@pytest.mark.parametrize("history", [None, [{"phase": "warmup"}]])
def test_model_without_training_values_is_evaluated(tiny_dataset: Dataset, tmp_path: Path, history: Any) -> None:
    run_evaluate(write_inputs(tiny_dataset, tmp_path, history), tmp_path / "evaluation")
    assert [file.stem for file in (tmp_path / "evaluation/figures").glob("*.png")] == ["quantiles"]


@pytest.mark.parametrize("history", [{"not": "a list"}, [3], [{"loss": "much"}], [{"lambda": [1]}]])
def test_damaged_history_is_refused(tiny_dataset: Dataset, tmp_path: Path, history: Any) -> None:
    with pytest.raises(ArtifactError, match="model/history.json: .*; run the stage that wrote it again"):
        run_evaluate(write_inputs(tiny_dataset, tmp_path, history), tmp_path / "evaluation")


@pytest.mark.slow
def test_base_is_compared_with_the_run(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.evaluation.report_data.SAMPLES", 2)
    base = run_evaluate(inputs, tmp_path / "base")
    metrics = run_evaluate(inputs, tmp_path / "evaluation", base=str(tmp_path / "base"))
    stored = json.loads((tmp_path / "evaluation/metrics.json").read_text())
    assert {key.removeprefix("base/"): value for key, value in stored.items() if key.startswith("base/")} == base
    assert {key: value for key, value in metrics.items() if not key.startswith("gain")} == base
    assert metrics["gain/tail/p_at_1"] == metrics["gain_se/tail/p_at_1"] == 0
    html = (tmp_path / "evaluation/report.html").read_text()
    assert html.count("<h3>BASE</h3>") == 2 and '<span class="delta even">+0.00 ±0.00</span>' in html
    repeated = run_evaluate(inputs, tmp_path / "third", base=str(tmp_path / "evaluation"))
    assert repeated == metrics
    stored = json.loads((tmp_path / "third/metrics.json").read_text())
    assert not any(key.startswith(("base/base/", "base/gain")) for key in stored), "the base of the base is not copied"


def test_gains_have_standard_errors_clustered_by_group(tiny_dataset: Dataset, tmp_path: Path) -> None:
    groups = np.repeat(np.arange(7), [6, 4, 3, 3, 2, 1, 1])
    inputs = write_inputs(replace(tiny_dataset, test_groups=groups), tmp_path)
    base = run_evaluate(inputs, tmp_path / "base")
    with create_drafts({"model": tmp_path / "other"}, sections={}, inputs={}, work=tmp_path / "work") as made:
        encoder = load_encoder("tiny", ENCODER)
        rng = np.random.default_rng(0)
        for weight in encoder.parameters():
            noise = rng.standard_normal(tuple(weight.shape), np.float32)
            weight.data += 0.3 * weight.data.std(correction=0) * weight.data.new_tensor(noise)
        encoder.save(made["model"].path)
    track = RecordingTracker()
    metrics = run_evaluate(
        {**inputs, "model": tmp_path / "other"}, tmp_path / "out", track, base=str(tmp_path / "base")
    )
    first = {}
    for name in ("out", "base"):
        table = pq.read_table(tmp_path / name / "predictions.parquet", filters=[("rank", "=", 1)]).to_pylist()
        best = {row["document"]: row["label_index"] for row in table}
        first[name] = np.array([100 * tiny_dataset.y_test[i, best[f"test-{i}"]] for i in range(20)])
    differences = first["out"] - first["base"]
    assert metrics["gain/p_at_1"] == pytest.approx(differences.mean()) == metrics["p_at_1"] - base["p_at_1"]
    sums = [(differences - differences.mean())[groups == group].sum() for group in range(7)]
    assert metrics["gain_se/p_at_1"] == pytest.approx(np.sqrt(7 / 6 * np.square(sums).sum()) / 20) and differences.any()
    for key in (*tables.COLUMNS.values(), *COLUMNS.values()):
        for part in ("", "head/", "torso/", "tail/"):
            gain = metrics[f"{part}{key}"] - base[f"{part}{key}"]
            assert metrics[f"gain/{part}{key}"] == pytest.approx(gain, abs=1e-9) and f"gain_se/{part}{key}" in metrics
    assert track.headlines == metrics
    assert open_artifact(tmp_path / "out", "evaluation").counts["test_groups"] == 7
    html = (tmp_path / "out/report.html").read_text()
    assert "clustered by their 7 groups" in html and f" ±{metrics['gain_se/p_at_1']:.2f}</span>" in html


def test_gains_of_one_group_have_no_standard_errors(tiny_dataset: Dataset, tmp_path: Path) -> None:
    inputs = write_inputs(replace(tiny_dataset, test_groups=np.zeros(20, np.int64)), tmp_path)
    run_evaluate(inputs, tmp_path / "base")
    metrics = run_evaluate(inputs, tmp_path / "evaluation", base=str(tmp_path / "base"))
    assert metrics["gain/p_at_1"] == 0 and not any(key.startswith("gain_se/") for key in metrics)


def test_peers_are_evaluated_on_the_same_documents(inputs: dict[str, Path], tmp_path: Path) -> None:
    metrics = run_evaluate(inputs, tmp_path / "evaluation", peers=["tfidf", "untrained"])
    assert metrics["peers/untrained/p_at_1"] == metrics["p_at_1"], "the model in this test is the untrained encoder"
    assert metrics["peers/tfidf/p_at_1"] > metrics["p_at_1"] and "peers/tfidf/tail/p_at_1" not in metrics
    assert json.loads((tmp_path / "evaluation/metrics.json").read_text()) == metrics
    html = (tmp_path / "evaluation/report.html").read_text()
    assert html.count('class="peer"') == 2 and "Untrained encoder" in html
    run_evaluate(inputs, tmp_path / "other", base=str(tmp_path / "evaluation"))
    stored = json.loads((tmp_path / "other/metrics.json").read_text())
    assert not any("peers/" in key for key in stored), "the peers of the base are not copied"


def test_peer_that_cannot_run_is_skipped_with_a_warning(
    inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"encoder": {**ENCODER.model_dump(), "name": str(tmp_path / "nowhere")}, "scoring": {}}
    metrics = run_stage("evaluate", sections=sections, inputs=inputs, outputs={"evaluation": tmp_path / "evaluation"})
    assert "peers/tfidf/p_at_1" in metrics and not any("untrained" in key for key in metrics)
    assert "warning: peer untrained is left out of the evaluation: encoder" in capsys.readouterr().err


def test_base_of_another_dataset_or_propensity_is_refused(
    inputs: dict[str, Path], tiny_dataset: Dataset, tmp_path: Path
) -> None:
    run_evaluate(inputs, tmp_path / "base")
    with pytest.raises(ArtifactError, match="a=0.55, b=1.5, expected a=0.6"):
        run_evaluate(inputs, tmp_path / "evaluation", base=str(tmp_path / "base"), propensity_a=0.6)
    other = write_inputs(replace(tiny_dataset, y_test=tiny_dataset.y_test[::-1].tocsr()), tmp_path / "other")
    with pytest.raises(ArtifactError, match="another dataset"):
        run_evaluate(other, tmp_path / "evaluation", base=str(tmp_path / "base"))
    assert not (tmp_path / "evaluation").exists()


def test_test_set_without_labels_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    empty = replace(tiny_dataset, y_test=sp.csr_matrix(tiny_dataset.y_test.shape, dtype=np.float32))
    with pytest.raises(DataError, match="at least one test document with a label"):
        run_evaluate(write_inputs(empty, tmp_path), tmp_path / "evaluation")


def test_model_with_non_finite_vectors_is_refused(tiny_dataset: Dataset, tmp_path: Path) -> None:
    paths = write_inputs(tiny_dataset, tmp_path)
    broken = load_encoder("tiny", ENCODER)
    for weight in broken.parameters():
        weight.data.fill_(float("nan"))
    with create_drafts({"model": paths["model"]}, sections={}, inputs={}, work=tmp_path / "work") as made:
        broken.save(made["model"].path)
    with pytest.raises(ArtifactError, match="not finite"):
        run_evaluate(paths, tmp_path / "evaluation")


def test_equal_inputs_give_equal_artifacts(inputs: dict[str, Path], tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        run_evaluate(inputs, tmp_path / name)
        digests.append(open_artifact(tmp_path / name, "evaluation").digest)
    assert digests[0] == digests[1]
