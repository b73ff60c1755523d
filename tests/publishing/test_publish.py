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

from ramen.artifacts import Artifact, drafts, open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Dataset
from ramen.encoder.label_vectors import encode_labels, fused_labels
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
    """Run the stage into `artifacts/retriever` with index knobs given by keyword."""

    def run(track: Tracker, **knobs: Any) -> tuple[Artifact, dict[str, float]]:
        settings, place = IndexConfig(**{"kind": "hnsw", **knobs}), tmp_path / "artifacts" / "retriever"
        with drafts({"retriever": place}, sections={}, inputs=artifacts, work=tmp_path / "work") as made:
            metrics = publish_index(**artifacts, **made, encoder=EncoderConfig(), index=settings, track=track)
        return open_artifact(place, "retriever"), metrics

    return run


@pytest.fixture
def client(store: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{store}")


def _receipt(retriever: Artifact) -> dict[str, Any]:
    return json.loads((retriever.path / "receipt.json").read_text())  # type: ignore[no-any-return]


def test_published_version_answers_like_exact_retrieval(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact], tiny_problem: Dataset
) -> None:
    client.set_tag(track.run_id, "mlflow.source.git.commit", "c0ffee")
    retriever, metrics = publish(track)
    text = tiny_problem.test.texts[4]
    hits = answer(text, k=4, version="1")

    encoder = load_encoder(artifacts["model"].path, EncoderConfig())
    scores = (encoder.encode([text]) @ encoder.encode(tiny_problem.labels.texts).T)[0]
    best = np.argsort(-scores)[:4]
    assert [hit.uid for hit in hits] == [tiny_problem.labels.uids[i] for i in best]
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
    receipt = _receipt(retriever)
    assert receipt["registered"] == {"name": "ramen", "version": 1, "alias": "champion", "refused": None, "note": None}
    assert (receipt["labels"], receipt["dimension"], receipt["m"]) == (30, 32, 32)


@pytest.mark.labelled
def test_labels_are_ranked_by_all_the_model_knows_and_the_version_carries_the_encoder_alone(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact], tiny_problem: Dataset, tmp_path: Path
) -> None:
    publish(track)
    model = artifacts["model"].path
    encoder = load_encoder(model, EncoderConfig())
    whole = fused_labels(model, encode_labels(encoder, model, tiny_problem.labels.texts))
    scores = (encoder.encode(["pepper soup"]) @ whole.T)[0]
    best = np.argsort(-scores)[:5]
    hits = answer("pepper soup", k=5, version="1")
    assert [hit.uid for hit in hits] == [tiny_problem.labels.uids[i] for i in best]
    assert [hit.score for hit in hits] == pytest.approx(scores[best], abs=1e-5)
    import mlflow

    logged = Path(mlflow.artifacts.download_artifacts("models:/ramen/1", dst_path=str(tmp_path / "down")))
    assert list(logged.rglob("model.safetensors")) and not list(logged.rglob("label_context*"))
    assert not list(logged.rglob("classifier.safetensors"))


def test_logged_model_serves_from_its_own_files_without_pickle(publish: Publish, track: Any, tmp_path: Path) -> None:
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
    seen = json.loads(done.stdout.splitlines()[-1])
    assert Path(seen["code"]).is_relative_to(tmp_path), "the model must bring its own code"
    local = load_version("ramen", "champion").query(["pepper soup", "rook"], 2)
    assert [row["ids"] for row in seen["answers"]] == [[hit.uid for hit in hits] for hits in local]
    assert [row["texts"] for row in seen["answers"]] == [[hit.text for hit in hits] for hits in local]
    assert all(set(row) == {"ids", "texts", "scores"} and len(row["scores"]) == 2 for row in seen["answers"])
    assert seen["params"][0]["name"] == "k" and seen["default"] == 10
    assert not list(tmp_path.rglob("*.pkl"))


def test_alias_stays_when_the_new_version_does_not_answer(
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
    with pytest.raises(RamenError, match="ramen version 2 does not answer .*damaged.*alias 'champion' stays"):
        publish(track, ef_search=99)
    assert resolve_version("ramen", "champion") == 1
    assert client.get_model_version("ramen", "2").tags["smoke"] == "failed"
    with pytest.raises(ArtifactError, match=r"index\.faiss: differs from retriever\.json"):
        load_version("ramen", "2")
    with pytest.raises(RamenError, match="version 2 never answered"):
        promote("ramen", "champion", "2")


def test_worse_version_is_registered_but_the_alias_stays_until_it_is_moved_by_hand(
    publish: Publish, track: Any, client: Any, artifacts: dict[str, Artifact]
) -> None:
    publish(track)
    metrics_file = artifacts["evaluation"].path / "metrics.json"
    metrics_file.write_text(json.dumps({"psp_at_5": 29.0}))
    retriever, metrics = publish(track)
    assert (metrics["version"], metrics["promoted"]) == (2, 0)
    assert "psp_at_5 29.00 is worse than the 30.00" in _receipt(retriever)["registered"]["refused"]
    assert resolve_version("ramen", "champion") == 1

    with pytest.raises(GateRefused, match="psp_at_5 29.00 is worse"):
        promote("ramen", "champion", "2", IndexConfig())
    assert promote("ramen", "champion", "2") == (2, 1)
    assert resolve_version("ramen", "champion") == 2
    assert promote("ramen", "champion", "1", IndexConfig()) == (1, 2)
    assert resolve_version("ramen", "champion") == 1


def test_unchanged_contents_are_no_new_version(publish: Publish, track: Any, client: Any) -> None:
    publish(track)
    before = client.get_model_version("ramen", "1").tags
    retriever, metrics = publish(track)
    assert (metrics["version"], metrics["promoted"]) == (1, 1)
    assert _receipt(retriever)["registered"]["note"] == "unchanged since it was registered"
    assert client.get_model_version("ramen", "1").tags == before, "a rollback still finds what held the alias before"
    assert publish(track, alias="")[1]["version"] == 1
    assert publish(track, alias="canary")[1]["version"] == resolve_version("ramen", "canary") == 1
    assert publish(track, ef_search=99)[1]["version"] == 2, "another index is another version"
    assert rollback("ramen", "champion") == (2, 1)


def test_unchanged_contents_try_again_for_the_alias_unless_a_person_took_it(
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
    assert "taken from by hand; `ramen promote 2`" in _receipt(retriever)["registered"]["refused"]
    promote("ramen", "champion", "2")
    metrics_file.write_text(better)
    retriever, metrics = publish(track)
    assert metrics["promoted"] == 0 and "`ramen promote 1`" in _receipt(retriever)["registered"]["refused"]


def test_a_version_whose_files_are_gone_is_published_anew(publish: Publish, track: Any, tmp_path: Path) -> None:
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
def test_gate(candidate: dict[str, str], champion: dict[str, str] | None, knobs: dict[str, Any], refused: str) -> None:
    tags = {"dataset": "d", "ann_recall": "0.99", "psp_at_5": "30.0"} | candidate
    reason = gate(tags, champion, IndexConfig(**knobs)).refused
    assert re.search(refused, reason) and bool(refused) == bool(reason)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".csv", ".tsv"])
def test_a_file_of_queries_is_answered_as_each_of_them_is(
    publish: Publish, track: Any, tiny_problem: Dataset, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(track)
    monkeypatch.setattr("ramen.serving.query.BLOCK", 2)
    texts, file, out = tiny_problem.test.texts[:5], tmp_path / f"queries{suffix}", tmp_path / "new" / "answers.parquet"
    uids = [str(i) for i in (1, 2, 4, 5, 6)] if suffix == ".txt" else [f"q{i}" for i in range(5)]
    if suffix == ".txt":  # a line that is empty is no query
        file.write_text("\n".join([*texts[:2], "", *texts[2:]]) + "\n")
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps({"uid": u, "text": t}) + "\n" for u, t in zip(uids, texts, strict=True)))
    elif suffix == ".parquet":
        write_texts(file, uids, texts)
    else:
        pd.DataFrame({"uid": uids, "text": texts}).to_csv(file, sep="," if suffix == ".csv" else "\t", index=False)
    assert answer_file(file, out, k=3) == 5
    found = pd.read_parquet(out)
    assert list(found.columns) == list(COLUMNS) and not [*out.parent.glob(".*")]
    for uid, text in zip(uids, texts, strict=True):
        rows, hits = found[found["query"] == uid], answer(text, k=3)
        assert rows["label"].tolist() == [hit.uid for hit in hits] and rows["rank"].tolist() == [1, 2, 3]
        assert rows["score"].tolist() == pytest.approx([hit.score for hit in hits], abs=1e-6)


def test_answers_hold_the_texts_in_every_format(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    queries = tmp_path / "queries.csv"
    text = 'soup, "hot"\nand pepper'
    queries.write_text(f'text\n"{text.replace(chr(34), chr(34) * 2)}"\nrook\n')
    readers = {".parquet": pd.read_parquet, ".csv": pd.read_csv, ".jsonl": partial(pd.read_json, lines=True)}
    for suffix, read in (readers | {".tsv": partial(pd.read_csv, sep="\t")}).items():
        out = tmp_path / f"answers{suffix}"
        assert answer_file(queries, out, k=2) == 2
        found = read(out)
        assert list(found.columns) == ["query", "text", "rank", "label", "label_text", "score"]
        assert found["query"].astype(str).tolist() == ["2", "2", "4", "4"], "a query without a uid is named by its line"
        assert found["text"].tolist() == [text, text, "rook", "rook"]
        hits = [hit for query in (text, "rook") for hit in answer(query, k=2)]
        assert found["label_text"].tolist() == [hit.text for hit in hits]
        assert found["score"].tolist() == pytest.approx([hit.score for hit in hits], abs=1e-5)
    with pytest.raises(RamenError, match=r"answers\.xlsx: answers cannot be written as \.xlsx; use \.parquet, \.csv"):
        answer_file(queries, tmp_path / "answers.xlsx")


def test_a_query_with_a_uid_leaves_out_its_own_label(
    publish: Publish, track: Any, tiny_problem: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(track)
    retriever = load_version("ramen", "champion")
    assert retriever.identity == "", "this dataset's documents are no labels"
    retriever.identity = "uid"
    monkeypatch.setattr("ramen.publishing.registry.load_version", lambda *_: retriever)
    labels = tiny_problem.labels
    rows = [{"uid": labels.uids[4], "text": labels.texts[4]}, {"uid": "other", "text": labels.texts[4]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer_file(tmp_path / "q.jsonl", tmp_path / "a.parquet", k=3)
    found = pd.read_parquet(tmp_path / "a.parquet").groupby("query")["label"].agg(list)
    assert found["other"][0] == labels.uids[4]
    assert labels.uids[4] not in found[labels.uids[4]] and len(found[labels.uids[4]]) == 3


def test_a_broken_query_writes_nothing(publish: Publish, track: Any, tmp_path: Path) -> None:
    publish(track)
    file, out = tmp_path / "queries.jsonl", tmp_path / "answers.parquet"
    file.write_text('{"uid": "a", "text": "one"}\n{"uid": "b"}\n')
    with pytest.raises(DataError, match=r"queries\.jsonl:2: not a query; a line is"):
        answer_file(file, out)
    file.write_text("\n")
    with pytest.raises(DataError, match="expected queries, found none"):
        answer_file(file, out)
    assert not out.exists()


def test_recall_below_the_gate_keeps_the_alias_away(publish: Publish, track: Any) -> None:
    _, metrics = publish(track, hnsw_m=2, ef_construction=8, ef_search=8, min_recall=1.0, recall_k=20)
    assert metrics["ann_recall_at_20"] < 1.0 and metrics["promoted"] == 0
    with pytest.raises(RamenError, match="no alias 'champion'; it has: none"):
        load_version("ramen", "champion")


def test_untracked_publishing_is_refused_unless_nothing_is_to_be_registered(publish: Publish, tmp_path: Path) -> None:
    with pytest.raises(RamenError, match=r"tracking is off.*index\.model"):
        publish(NullTracker())
    assert not (tmp_path / "artifacts" / "retriever").exists()
    retriever, metrics = publish(NullTracker(), model="")
    assert _receipt(retriever)["registered"] is None and "version" not in metrics
    assert retriever.counts["labels"] == 30


def test_unregistered_retriever_has_the_same_digest_every_time(publish: Publish) -> None:
    first, _ = publish(NullTracker(), model="")
    second, _ = publish(NullTracker(), model="")
    assert first.digest == second.digest


def test_what_is_not_there_is_named_with_what_is(
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


def test_publishing_leaves_the_import_path_alone(publish: Publish, track: Any) -> None:
    before = list(sys.path)
    publish(track)
    assert sys.path == before
