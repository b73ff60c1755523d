"""Publishing a retriever: registered versions, the gate, answers, and files of queries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ramen.artifacts import Artifact, create_drafts, open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fuse_label_vectors
from ramen.encoder.loading import load_encoder
from ramen.errors import ArtifactError, DataError, GateRefused, RamenError
from ramen.files import write_texts
from ramen.index.retriever import INDEX_FILE, Retriever
from ramen.publishing import publish as publish_module
from ramen.publishing.gate import gate, promote, rollback
from ramen.publishing.publish import requirements
from ramen.publishing.registry import load_version, resolve_version
from ramen.publishing.stage import publish_index
from ramen.serving.query import COLUMNS, answer, answer_file
from ramen.tracking import NullTracker, Tracker

Publish = Callable[..., tuple[Artifact, dict[str, float]]]


@pytest.fixture
def publish(artifacts: dict[str, Artifact], tmp_path: Path) -> Publish:
    """Return a function that runs the stage with the given index knobs and writes `artifacts/retriever`."""

    def run(track: Tracker, **knobs: Any) -> tuple[Artifact, dict[str, float]]:
        settings, folder = IndexConfig(**{"kind": "hnsw", **knobs}), tmp_path / "artifacts" / "retriever"
        with create_drafts({"retriever": folder}, sections={}, inputs=artifacts, work=tmp_path / "work") as written:
            metrics = publish_index(**artifacts, **written, encoder=EncoderConfig(), index=settings, track=track)
        return open_artifact(folder, "retriever"), metrics

    return run


@pytest.fixture
def client(store: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{store}")


def _read_receipt(retriever: Artifact) -> dict[str, Any]:
    return json.loads((retriever.path / "receipt.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_published_version_answers_like_exact_retrieval(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact], tiny_dataset: Dataset
) -> None:
    client.set_tag(track.run_id, "mlflow.source.git.commit", "c0ffee")
    retriever, metrics = publish(track)
    text = tiny_dataset.test.texts[4]
    hits = answer(text, k=4, version="1")

    encoder = load_encoder(artifacts["model"].path, EncoderConfig())
    scores = (encoder.encode([text]) @ encoder.encode(tiny_dataset.labels.texts).T)[0]
    best = np.argsort(-scores)[:4]
    assert [hit.uid for hit in hits] == [tiny_dataset.labels.uids[i] for i in best]
    assert [hit.score for hit in hits] == pytest.approx(scores[best], abs=1e-5)
    assert hits == Retriever.load(artifacts["model"].path, retriever.path).query([text], 4)[0]
    assert metrics["ann_recall_at_10"] == 1.0 and metrics["version"] == 1 and metrics["promoted"] == 1
    assert metrics["index_bytes"] == (retriever.path / INDEX_FILE).stat().st_size
    assert track.logged["query_ms"] > 0

    version = client.get_model_version_by_alias("ramen", "champion")
    assert int(version.version) == 1 and version.run_id == track.run_id and version.status == "READY"
    expected = {
        "ann_recall": "1.0",
        "dataset": artifacts["dataset"].digest,
        "model": artifacts["model"].digest,
        "index": "hnsw",
        "git": "c0ffee",
        "psp_at_5": "30.0",
        "tail/p_at_1": "10.0",
        "labels": "30",
        "smoke": "passed",
        "gate": "passed",
        "gate.against": "none",
        "alias.champion.before": "none",
    }
    assert expected.items() <= version.tags.items() and float(version.tags["query_ms"]) > 0
    assert int(version.tags["bytes"]) > metrics["index_bytes"]
    receipt = _read_receipt(retriever)
    assert receipt["registered"] == {"name": "ramen", "version": 1, "alias": "champion", "refused": None, "note": None}
    assert (receipt["labels"], receipt["dimension"], receipt["m"]) == (30, 32, 32)


@pytest.mark.labelled
def test_index_holds_fused_label_vectors_and_version_holds_only_the_encoder(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact], tiny_dataset: Dataset, tmp_path: Path
) -> None:
    publish(track)
    model = artifacts["model"].path
    encoder = load_encoder(model, EncoderConfig())
    labels_LD = fuse_label_vectors(model, encode_labels(encoder, model, tiny_dataset.labels.texts))
    scores = (encoder.encode(["pepper soup"]) @ labels_LD.T)[0]
    best = np.argsort(-scores)[:5]
    hits = answer("pepper soup", k=5, version="1")
    assert [hit.uid for hit in hits] == [tiny_dataset.labels.uids[i] for i in best]
    assert [hit.score for hit in hits] == pytest.approx(scores[best], abs=1e-5)
    import mlflow

    logged = Path(mlflow.artifacts.download_artifacts("models:/ramen/1", dst_path=str(tmp_path / "down")))
    assert list(logged.rglob("model.safetensors")) and not list(logged.rglob("label_context*"))
    assert not list(logged.rglob("classifier.safetensors"))


@pytest.mark.slow
def test_logged_model_loads_from_its_own_code_without_pickle(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    script = """
import json, sys, mlflow
model = mlflow.pyfunc.load_model("models:/ramen@champion")
import ramen
answers = model.predict(["pepper soup", "rook"], params={"k": 2})
print(json.dumps({"code": ramen.__file__, "answers": [dict(answer) for answer in answers],
                  "params": model.metadata.get_params_schema().to_dict(), "default": len(model.predict(["x"])[0].ids)}))
"""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert Path(output["code"]).is_relative_to(tmp_path), "the model must contain its own code"
    local = load_version("ramen", "champion").query(["pepper soup", "rook"], 2)
    assert [row["ids"] for row in output["answers"]] == [[hit.uid for hit in hits] for hits in local]
    assert [row["texts"] for row in output["answers"]] == [[hit.text for hit in hits] for hits in local]
    assert all(set(row) == {"ids", "texts", "scores"} and len(row["scores"]) == 2 for row in output["answers"])
    assert output["params"][0]["name"] == "k" and output["default"] == 10
    assert not list(tmp_path.rglob("*.pkl"))


@pytest.mark.slow
def test_version_that_fails_its_smoke_test_is_not_promoted(
    publish: Publish, track: Any, client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(track)
    original = publish_module._create_version

    def damage(client: Any, name: str, model_id: str, *rest: Any) -> int:
        (file,) = tmp_path.glob(f"files/**/{model_id}/**/{INDEX_FILE}")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return original(client, name, model_id, *rest)

    monkeypatch.setattr(publish_module, "_create_version", damage)
    error = "ramen version 2: failed its smoke test .*damaged.*alias 'champion' has not moved"
    with pytest.raises(RamenError, match=error):
        publish(track, ef_search=99)
    assert resolve_version("ramen", "champion") == 1
    assert client.get_model_version("ramen", "2").tags["smoke"] == "failed"
    with pytest.raises(ArtifactError, match=r"index\.faiss: differs from retriever\.json"):
        load_version("ramen", "2")
    with pytest.raises(RamenError, match="version 2: did not pass its smoke test"):
        promote("ramen", "champion", "2")


@pytest.mark.slow
def test_worse_version_is_registered_and_promoted_only_by_force(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact]
) -> None:
    publish(track)
    metrics_file = artifacts["evaluation"].path / "metrics.json"
    metrics_file.write_text(json.dumps({"psp_at_5": 29.0}))
    retriever, metrics = publish(track)
    assert (metrics["version"], metrics["promoted"]) == (2, 0)
    assert "psp_at_5 29.00 is worse than the 30.00" in _read_receipt(retriever)["registered"]["refused"]
    assert resolve_version("ramen", "champion") == 1

    with pytest.raises(GateRefused, match="psp_at_5 29.00 is worse"):
        promote("ramen", "champion", "2", IndexConfig())
    assert promote("ramen", "champion", "2") == (2, 1)
    assert resolve_version("ramen", "champion") == 2
    assert promote("ramen", "champion", "1", IndexConfig()) == (1, 2)
    assert resolve_version("ramen", "champion") == 1


@pytest.mark.slow
def test_unchanged_contents_reuse_the_registered_version(publish: Publish, track: Any, client: Any) -> None:
    publish(track)
    before = client.get_model_version("ramen", "1").tags
    retriever, metrics = publish(track)
    assert (metrics["version"], metrics["promoted"]) == (1, 1)
    assert _read_receipt(retriever)["registered"]["note"] == "unchanged since it was registered"
    assert client.get_model_version("ramen", "1").tags == before, "rollback needs the tag with the previous champion"
    assert publish(track, alias="")[1]["version"] == 1
    assert publish(track, alias="canary")[1]["version"] == resolve_version("ramen", "canary") == 1
    assert publish(track, ef_search=99)[1]["version"] == 2, "another index is a new version"
    assert rollback("ramen", "champion") == (2, 1)


@pytest.mark.slow
def test_unchanged_contents_are_promoted_unless_withdrawn(
    publish: Publish, track: Any, artifacts: dict[str, Artifact]
) -> None:
    metrics_file = artifacts["evaluation"].path / "metrics.json"
    better = metrics_file.read_text()
    publish(track)
    metrics_file.write_text(json.dumps({"psp_at_5": 29.0}))
    for knobs, promoted in (({}, 0), ({}, 0), ({"gate": {}}, 1), ({"gate": {}}, 1)):
        _, metrics = publish(track, **knobs)
        assert (metrics["version"], metrics["promoted"]) == (2, promoted)
    rollback("ramen", "champion")
    retriever, metrics = publish(track, gate={})
    assert (metrics["version"], metrics["promoted"]) == (2, 0) and resolve_version("ramen", "champion") == 1
    refused = _read_receipt(retriever)["registered"]["refused"]
    assert "a user moved 'champion' away from; promote it with `ramen promote 2`" in refused
    promote("ramen", "champion", "2")
    metrics_file.write_text(better)
    retriever, metrics = publish(track)
    assert metrics["promoted"] == 0 and "`ramen promote 1`" in _read_receipt(retriever)["registered"]["refused"]


@pytest.mark.slow
def test_version_with_missing_files_is_registered_again(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    for file in tmp_path.glob(f"files/**/{INDEX_FILE}"):
        file.unlink()
    assert publish(track)[1]["version"] == 2
    assert resolve_version("ramen", "champion") == 2 and answer("rook", k=1, version="champion")


@pytest.mark.parametrize(
    ("candidate", "champion", "knobs", "refused"),
    [
        ({}, None, {}, ""),
        ({}, {"dataset": "d", "psp_at_5": "30.0"}, {}, ""),
        ({}, {"dataset": "d", "psp_at_5": "30.1"}, {}, "30.00 is worse than the 30.10"),
        ({}, {"dataset": "d", "psp_at_5": "30.1"}, {"gate": {"psp_at_5": 0.2}}, ""),
        (
            {},
            {"dataset": "d", "psp_at_5": "30.3"},
            {"gate": {"psp_at_5": 0.2}},
            "30.30 .* by more than 0.2",
        ),
        (
            {"tail/p_at_1": "9"},
            {"dataset": "d", "tail/p_at_1": "9.5"},
            {"gate": {"tail/p_at_1": 0}},
            "9.00 is",
        ),
        ({}, {"dataset": "d", "tail/p_at_1": "9.5"}, {"gate": {"tail/p_at_1": 0}}, "has no tail/p_at_1"),
        ({"query_ms": "12"}, None, {"max_query_ms": 11}, "12.0 ms, more than index.max_query_ms = 11"),
        ({"query_ms": "12"}, None, {"max_query_ms": 12}, ""),
        ({}, None, {"max_query_ms": 12}, "nan ms"),
        ({}, {"dataset": "another", "psp_at_5": "99"}, {}, ""),
        ({}, {"dataset": "d", "psp_at_5": "99"}, {"gate": {}}, ""),
        ({"ann_recall": "0.89"}, None, {}, "below index.min_recall = 0.9"),
        ({"psp_at_5": "nan"}, {"dataset": "d", "psp_at_5": "1"}, {}, "nan is worse"),
        ({"psp_at_5": "88.70089546908837"}, {"dataset": "d", "psp_at_5": "88.70089546908838"}, {}, ""),
    ],
)
def test_gate_refuses(
    candidate: dict[str, str], champion: dict[str, str] | None, knobs: dict[str, Any], refused: str
) -> None:
    tags = {"dataset": "d", "ann_recall": "0.99", "psp_at_5": "30.0"} | candidate
    reason = gate(tags, champion, IndexConfig(**knobs)).refused
    assert re.search(refused, reason) and bool(refused) == bool(reason)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".csv", ".tsv"])
def test_answer_file_gives_the_same_answers_as_single_queries(
    publish: Publish, track: Any, tiny_dataset: Dataset, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(track)
    monkeypatch.setattr("ramen.serving.query.BLOCK", 2)
    texts, file, out = tiny_dataset.test.texts[:5], tmp_path / f"queries{suffix}", tmp_path / "new" / "answers.parquet"
    uids = [str(i) for i in (1, 2, 4, 5, 6)] if suffix == ".txt" else [f"q{i}" for i in range(5)]
    if suffix == ".txt":  # empty lines are skipped
        file.write_text("\n".join([*texts[:2], "", *texts[2:]]) + "\n")
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps({"uid": u, "text": t}) + "\n" for u, t in zip(uids, texts, strict=True)))
    elif suffix == ".parquet":
        write_texts(file, uids, texts)
    else:
        pd.DataFrame({"uid": uids, "text": texts}).to_csv(file, sep="," if suffix == ".csv" else "\t", index=False)
    assert answer_file(file, out, k=3) == 5
    answers = pd.read_parquet(out)
    assert list(answers.columns) == list(COLUMNS) and not [*out.parent.glob(".*")]
    for uid, text in zip(uids, texts, strict=True):
        rows, hits = answers[answers["query"] == uid], answer(text, k=3)
        assert rows["label"].tolist() == [hit.uid for hit in hits] and rows["rank"].tolist() == [1, 2, 3]
        assert rows["score"].tolist() == pytest.approx([hit.score for hit in hits], abs=1e-6)


@pytest.mark.slow
def test_answer_file_writes_every_format(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    queries = tmp_path / "queries.csv"
    text = 'soup, "hot"\nand pepper'
    queries.write_text(f'text\n"{text.replace(chr(34), chr(34) * 2)}"\nrook\n')
    readers = {".parquet": pd.read_parquet, ".csv": pd.read_csv, ".jsonl": partial(pd.read_json, lines=True)}
    for suffix, read in (readers | {".tsv": partial(pd.read_csv, sep="\t")}).items():
        out = tmp_path / f"answers{suffix}"
        assert answer_file(queries, out, k=2) == 2
        answers = read(out)
        assert list(answers.columns) == ["query", "text", "rank", "label", "label_text", "score"]
        assert answers["query"].astype(str).tolist() == ["2", "2", "4", "4"], "the line number replaces a missing uid"
        assert answers["text"].tolist() == [text, text, "rook", "rook"]
        hits = [hit for query in (text, "rook") for hit in answer(query, k=2)]
        assert answers["label_text"].tolist() == [hit.text for hit in hits]
        assert answers["score"].tolist() == pytest.approx([hit.score for hit in hits], abs=1e-5)
    with pytest.raises(RamenError, match=r"answers\.xlsx: answers cannot be written as \.xlsx; use \.parquet, \.csv"):
        answer_file(queries, tmp_path / "answers.xlsx")


def test_query_with_a_uid_excludes_the_label_with_that_uid(
    publish: Publish, track: Any, tiny_dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(track)
    retriever = load_version("ramen", "champion")
    assert retriever.identity == "", "the documents of this dataset are not labels"
    retriever.identity = "uid"
    monkeypatch.setattr("ramen.publishing.registry.load_version", lambda *_: retriever)
    labels = tiny_dataset.labels
    rows = [{"uid": labels.uids[4], "text": labels.texts[4]}, {"uid": "other", "text": labels.texts[4]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer_file(tmp_path / "q.jsonl", tmp_path / "a.parquet", k=3)
    answers = pd.read_parquet(tmp_path / "a.parquet").groupby("query")["label"].agg(list)
    assert answers["other"][0] == labels.uids[4]
    assert labels.uids[4] not in answers[labels.uids[4]] and len(answers[labels.uids[4]]) == 3


def test_answer_file_with_a_broken_query_writes_nothing(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    file, out = tmp_path / "queries.jsonl", tmp_path / "answers.parquet"
    file.write_text('{"uid": "a", "text": "one"}\n{"uid": "b"}\n')
    with pytest.raises(DataError, match=r"queries\.jsonl:2: not a query; a line is"):
        answer_file(file, out)
    file.write_text("\n")
    with pytest.raises(DataError, match="expected queries, found none"):
        answer_file(file, out)
    assert not out.exists()


def test_version_with_low_recall_is_not_promoted(publish: Publish, track: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramen.index.build.EF_CONSTRUCTION", 8)
    monkeypatch.setattr("ramen.publishing.stage.RECALL_DEPTH", 20)
    _, metrics = publish(track, kind="HNSW2,Flat", ef_search=8, min_recall=1.0)
    assert metrics["ann_recall_at_20"] < 1.0 and metrics["promoted"] == 0
    with pytest.raises(RamenError, match="no alias 'champion'; it has: none"):
        load_version("ramen", "champion")


def test_publishing_without_tracking_needs_an_empty_model_name(publish: Publish, tmp_path: Path) -> None:
    with pytest.raises(RamenError, match=r"tracking is off.*index\.model"):
        publish(NullTracker())
    assert not (tmp_path / "artifacts" / "retriever").exists()
    retriever, metrics = publish(NullTracker(), model="")
    assert _read_receipt(retriever)["registered"] is None and "version" not in metrics
    assert retriever.counts["labels"] == 30


def test_unregistered_retriever_has_a_reproducible_digest(publish: Publish) -> None:
    first, _ = publish(NullTracker(), model="")
    second, _ = publish(NullTracker(), model="")
    assert first.digest == second.digest


def test_unknown_model_version_and_alias_are_reported_with_the_known_ones(
    publish: Publish, track: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    with pytest.raises(RamenError, match="no registered model 'ramen' in sqlite.*none yet"):
        load_version("ramen", "champion")
    publish(track)
    with pytest.raises(RamenError, match="no registered model 'ramne'.*there are: ramen"):
        load_version("ramne", "champion")
    with pytest.raises(RamenError, match="no version 7; it has: 1"):
        load_version("ramen", "7")
    with pytest.raises(RamenError, match=r"no alias 'staging'; it has: champion \(version 1\)"):
        load_version("ramen", "staging")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/elsewhere.db")
    with pytest.raises(RamenError, match=r"no tracking database at sqlite.*elsewhere\.db"):
        load_version("ramen", "champion")
    assert not (tmp_path / "elsewhere.db").exists()


def test_requirements_are_pinned_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = publish_module.metadata.version
    monkeypatch.setattr(
        publish_module.metadata, "version", lambda name: "2.13.0+cpu" if name == "torch" else installed(name)
    )
    pins = dict(line.split("==") for line in requirements())
    assert {"mlflow", "torch", "transformers", "numpy", "pyarrow", "pydantic"} <= set(pins)
    assert any(name.startswith("faiss-") for name in pins)
    assert pins["torch"] == "2.13.0"


def test_publishing_restores_the_import_path(publish: Publish, track: Any) -> None:
    before = list(sys.path)
    publish(track)
    assert sys.path == before
