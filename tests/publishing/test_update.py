"""Labels added to and removed from a published retriever, without training."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from ramen.artifacts import Artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.encoder.loading import load_encoder
from ramen.errors import DataError, RamenError
from ramen.files import write_texts
from ramen.index.build import ann_recall, build_index, update_index
from ramen.index.retriever import write_retriever
from ramen.publishing.publish import publish
from ramen.publishing.registry import list_versions, load_version, resolve_version
from ramen.publishing.update import Changes, publish_update, read_changes
from ramen.retrieval import search

pytestmark = pytest.mark.slow


@pytest.fixture
def published(artifacts: dict[str, Artifact], track: Any, tmp_path: Path) -> Callable[..., list[str]]:
    """Publish a retriever of 30 labels; return their uids."""

    def run(kind: str = "flat") -> list[str]:
        model, folder = artifacts["model"], tmp_path / "retriever"
        folder.mkdir()
        uids = [f"l{i}" for i in range(30)]
        texts = [f"label number {i} about {i % 7}" for i in range(30)]
        vectors = load_encoder(model.path, EncoderConfig()).encode(texts)
        settings = IndexConfig(kind=kind)
        write_retriever(
            folder, build_index(vectors, settings), uids, texts, encoder_files=model.manifest["files"],
            facts={"kind": kind, "dimension": vectors.shape[1]},
        )  # fmt: skip
        tags = {"dataset": "d", "model": "m", "ann_recall": "1.0", "psp_at_5": "30.0"}
        publish(folder, model.path, run_id=track.run_id, settings=settings, tags=tags, sample=["rook"])
        return uids

    return run


def read_labels(version: str) -> dict[str, str]:
    return {hit.uid: hit.text for hit in load_version("ramen", version).query(["x"], 1000)[0]}


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_update_publishes_new_version_with_changed_labels(published: Callable[..., list[str]], kind: str) -> None:
    uids = published(kind)
    before = read_labels("champion")
    changes = Changes({"new": "a label nobody trained on", "l3": "another text"}, frozenset({"l0", "l29"}))
    update = publish_update("champion", changes, IndexConfig(kind=kind))
    assert (update.version, update.alias, update.refused) == (2, "champion", "")
    after = read_labels("champion")
    kept = {uid: text for uid, text in before.items() if uid not in {"l0", "l29", "l3"}}
    assert after == kept | {"new": "a label nobody trained on", "l3": "another text"}
    assert len(after) == len(uids) - 1
    retriever = load_version("ramen", "2")
    hit = retriever.query(["a label nobody trained on"], 1)[0][0]
    assert hit.uid == "new" and hit.score == pytest.approx(1.0, abs=1e-3)
    old = {hit.uid: hit.score for hit in load_version("ramen", "1").query(["rook"], 30)[0]}
    for hit in retriever.query(["rook"], 29)[0]:
        assert hit.uid in {"new", "l3"} or hit.score == pytest.approx(old[hit.uid], abs=1e-5)
    tags = list_versions("ramen")[0].tags
    assert tags["updated_from"] == "1" and tags["labels"] == "29" and tags["dataset"].startswith("d+")
    assert "psp_at_5" not in tags, "metrics of the old labels do not describe the update"
    assert (tags["origin.psp_at_5"], tags["origin.dataset"]) == ("30.0", "d"), (
        "the gate reads the metrics of the original version"
    )
    assert set(read_labels("1")) == set(before), "the original version is unchanged"


def test_update_recall_is_at_most_that_of_original_version(published: Callable[..., list[str]], store: Path) -> None:
    from mlflow import MlflowClient

    published()
    client = MlflowClient(f"sqlite:///{store}")
    client.set_model_version_tag("ramen", "1", "ann_recall", "0.4")  # as for codes that compress too much
    update = publish_update("champion", Changes({"new": "a label"}, frozenset()), IndexConfig(kind="flat"))
    assert list_versions("ramen")[0].tags["ann_recall"] == "0.4" and "below index.min_recall" in update.refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (Changes({}, frozenset({"nobody"})), "no label 'nobody' to remove"),
        (Changes({"l3": "label number 3 about 3"}, frozenset()), "already has exactly these labels"),
        (Changes({}, frozenset(f"l{i}" for i in range(30))), "would remove every label"),
    ],
)
def test_invalid_update_registers_nothing(published: Callable[..., list[str]], changes: Changes, message: str) -> None:
    published()
    with pytest.raises(RamenError, match=message):
        publish_update("champion", changes, IndexConfig())
    assert resolve_version("ramen", "champion") == 1 and len(list_versions("ramen")) == 1


def test_broken_parquet_labels_are_refused(tmp_path: Path) -> None:
    add = tmp_path / "add.parquet"
    for broken, message in (
        ({"uid": ["a"], "text": [None]}, r"add\.parquet:1: not a label"),
        ({"uid": [1], "text": ["eins"]}, r"add\.parquet:1: not a label"),
        ({"id": ["a"], "text": ["eins"]}, r"add\.parquet:1: expected the columns uid and text, found 'id', 'text'"),
    ):
        pq.write_table(pa.table(broken), add)
        with pytest.raises(DataError, match=message):
            read_changes(add, None)
    add.write_text("no parquet")
    with pytest.raises(DataError, match=r"add\.parquet: cannot be read"):
        read_changes(add, None)
    pq.write_table(pa.table({"uid": ["a"], "text": ["eins"]}), add)
    assert read_changes(add, None).added == {"a": "eins"}


def test_changes_are_read_and_errors_name_the_line(tmp_path: Path) -> None:
    add, remove = tmp_path / "add.jsonl", tmp_path / "gone.txt"
    add.write_text('{"uid": "a", "text": "eins"}\n\n{"uid": "b", "text": "zwei"}\n')
    remove.write_text("c\nd\n\n")
    assert read_changes(add, remove) == Changes({"a": "eins", "b": "zwei"}, frozenset({"c", "d"}))
    add.write_bytes(codecs.BOM_UTF8 + '{"uid": "a", "text": "eins\u2028zwei"}\r\n'.encode())
    assert read_changes(add, None).added == {"a": "eins\u2028zwei"}
    write_texts(tmp_path / "add.parquet", ["a"], ["eins"])
    assert read_changes(tmp_path / "add.parquet", None) == Changes({"a": "eins"}, frozenset())
    for text, message in [
        ('{"uid": "a", "text": "eins"}\n{"uid": "a"}\n', r"add\.jsonl:2: not a label"),
        ('{"uid": "a", "text": " "}\n', r"add\.jsonl:1: not a label"),
        ('{"uid": "a", "text": "x"}\n{"uid": "a", "text": "y"}\n', r"add\.jsonl:2: label 'a' is listed twice"),
        ('{"uid": "c", "text": "x"}\n', r"gone\.txt: label 'c' is also in"),
    ]:
        add.write_text(text)
        with pytest.raises(DataError, match=message):
            read_changes(add, remove)
    with pytest.raises(DataError, match="nowhere.jsonl: cannot be read"):
        read_changes(tmp_path / "nowhere.jsonl", None)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf", "IVF32,PQ6x4", "PCA16,IVF16,Flat"])
def test_updated_index_has_recall_of_rebuilt_index(kind: str, unit_rows: NDArray[np.float32]) -> None:
    settings = IndexConfig(kind=kind, nprobe=16)
    old, new = unit_rows[:2000], unit_rows[2000:]
    keep = np.flatnonzero(np.arange(2000) % 5 != 0)
    index = update_index(build_index(old, settings), keep, new)
    rows = np.concatenate([old[keep], new])
    truth = search(unit_rows[::7].copy(), rows, 5)[0]
    rebuilt_recall = ann_recall(build_index(rows, settings), unit_rows[::7].copy(), truth, 5)
    assert index.ntotal == len(rows)
    assert ann_recall(index, unit_rows[::7].copy(), truth, 5) > rebuilt_recall - 0.05


@pytest.fixture
def unit_rows() -> NDArray[np.float32]:
    """3,000 unit vectors in 60 clusters: float32 [3000, 24]."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(60, 24))[rng.integers(60, size=3000)] + 0.5 * rng.normal(size=(3000, 24))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_update_promote_and_rollback_commands(published: Callable[..., list[str]], tmp_path: Path) -> None:
    from click.testing import CliRunner

    from ramen.cli import cli

    published()
    run = CliRunner().invoke
    (tmp_path / "new.jsonl").write_text('{"uid": "new", "text": "fresh"}\n')
    done = run(cli, ["index-update", "--add", str(tmp_path / "new.jsonl")])
    assert done.exit_code == 0 and "ramen version 2; alias champion" in done.output, done.output
    done = run(cli, ["rollback"])
    assert done.exit_code == 0 and "champion is version 1, was 2" in done.output, done.output
    done = run(cli, ["promote", "2", "--set", "index.min_recall=1.0", "--set", "index.max_query_ms=0.0001"])
    assert done.exit_code == 5 and "more than index.max_query_ms" in done.output and "--force" in done.output
    done = run(cli, ["promote", "2", "--force"])
    assert done.exit_code == 0 and "champion is version 2, was 1" in done.output
    table = run(cli, ["registry"]).output
    assert "champion" in table and "30.00" in table and "30" in table
    listed = json.loads(run(cli, ["registry", "--json"]).output)
    assert [(one["number"], one["aliases"]) for one in listed] == [(2, ["champion"]), (1, [])]
    assert listed[0]["tags"]["gate"] == "refused" and "max_query_ms" in listed[0]["tags"]["gate.reason"]
    done = run(cli, ["index-update"])
    assert done.exit_code == 2 and "--add FILE" in done.output
