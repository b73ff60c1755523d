"""Damaged files of artifacts, checkpoints, tasks and journals: reading succeeds or fails with one error line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_disk import graphs_of

from ramen.artifacts import MANIFEST, create_drafts, foreign_content, list_files, open_artifact
from ramen.data.dataset import Dataset, Texts
from ramen.encoder.label_vectors import (
    encode_labels,
    fuse_label_vectors,
    write_classifier,
    write_context,
    write_offsets,
)
from ramen.errors import ArtifactError, RamenError
from ramen.evaluation.per_document import read_contributions
from ramen.evaluation.predictions import Ranking, write_predictions
from ramen.evaluation.report_data import read_history
from ramen.evaluation.uncertainty import PerDocument
from ramen.files import read_json, sha256, write_json
from ramen.graph.metadata import read_graphs, write_graphs
from ramen.index.retriever import read_facts
from ramen.processes import environment
from ramen.tracking.journal import Journal
from ramen.training.checkpoint import SUMS_FILE, Checkpoints, TrainingState
from ramen.workdir import inputs_in_use, record_task


class Encoder:
    """Encodes every text as the same vector."""

    def encode(self, texts: list[str]) -> np.ndarray[Any, Any]:
        return np.full((len(texts), 4), 0.5, np.float32)


def write_model(problem: Dataset, folder: Path) -> None:
    write_offsets(folder, np.zeros((3, 4), np.float32), np.zeros(30, np.int64))
    write_context(folder, np.zeros((30, 4), np.float32))
    write_classifier(folder, np.zeros((30, 4), np.float32), 0.5)
    write_json(
        folder / "history.json", [{"epoch": 1, "phase": "warmup", "round": 0, "loss": 0.5, "lambda": {"a": 1.0}}]
    )


def write_evaluation(problem: Dataset, folder: Path) -> None:
    indices = np.tile(np.arange(30), (20, 1))
    ranking = Ranking(np.pad(indices, ((0, 0), (0, 70)), constant_values=30), np.zeros((20, 100), np.float32))
    write_predictions(folder / "predictions.parquet", problem, ranking, 100)
    write_json(folder / "propensity.json", {"a": 0.55, "b": 1.5, "N": 60})
    write_json(folder / "metrics.json", {"p_at_1": 1.0})
    read_contributions(problem, folder).write(folder / "per_document.parquet")


def write_retriever(problem: Dataset, folder: Path) -> None:
    facts = {"bytes": 1, "sha256": "0" * 64}
    files = {"index.faiss": facts, "labels.parquet": facts}
    write_json(folder / "retriever.json", {"format": 1, "index": {"kind": "flat"}, "files": files, "encoder": {}})
    write_json(folder / "receipt.json", {"registered": None})


WRITE: dict[str, Callable[[Dataset, Path], object]] = {
    "dataset": Dataset.write,
    "graph": lambda problem, folder: write_graphs(folder, graphs_of(problem)),
    "model": write_model,
    "evaluation": write_evaluation,
    "retriever": write_retriever,
}


def read_model(problem: Dataset, folder: Path) -> None:
    encoder: Any = Encoder()
    fuse_label_vectors(folder, encode_labels(encoder, folder, problem.labels.texts))
    read_history(folder)


def read_evaluation(problem: Dataset, folder: Path) -> None:
    read_contributions(problem, folder)
    PerDocument.read(folder / "per_document.parquet")
    read_json(folder / "metrics.json", dict[str, float])


READ: dict[str, Callable[[Dataset, Path], object]] = {
    "dataset": lambda problem, folder: Dataset.read(folder),
    "graph": lambda problem, folder: read_graphs(folder),
    "model": read_model,
    "evaluation": read_evaluation,
    "retriever": lambda problem, folder: read_facts(folder),
}


@pytest.fixture(scope="module")
def artifacts(shared_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an artifact of every kind; tests restore the files that they change."""
    root = tmp_path_factory.mktemp("artifacts")
    with create_drafts({name: root / name for name in WRITE}, sections={}, inputs={}, work=root / "work") as made:
        for name, write in WRITE.items():
            write(shared_dataset, made[name].path)
    return root


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw arbitrary bytes, arbitrary JSON, JSON with one wrong value, or a file with bytes changed or cut off."""
    kind = draw(st.sampled_from(["bytes", "json", "keys", "flipped", "cut"]))
    if kind == "bytes" or not content:
        return draw(st.binary(max_size=64))
    if kind in ("json", "keys"):
        value = draw(JSON)
        if kind == "keys":
            try:
                tree = json.loads(content)
            except ValueError:
                tree = None
            if isinstance(tree, dict) and tree:
                value = tree | {draw(st.sampled_from(sorted(tree))): value}
        return json.dumps(value).encode()
    at = draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        return content[:at]
    return content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at + 4 :]


quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", list(WRITE))
@quick
@given(data=st.data())
def test_damaged_file_of_an_artifact_is_found(
    name: str, artifacts: Path, shared_dataset: Dataset, data: st.DataObject
) -> None:
    """The checksum finds a damaged file; without the check, the file can be read or is named in the error."""
    folder = artifacts / name
    file = folder / data.draw(st.sampled_from([MANIFEST, *list_files(folder)]))
    before = file.read_bytes()
    content = data.draw(damaged(before))
    try:
        file.write_bytes(content)
        if file.name == MANIFEST:
            with suppress(ArtifactError):
                open_artifact(folder, name)
        elif content != before:
            with pytest.raises(ArtifactError, match="differs from manifest.json"):
                open_artifact(folder, name)
            assert foreign_content(folder, name), "an edited artifact is not replaced"
        try:
            READ[name](shared_dataset, folder)
        except RamenError as error:
            assert "\n" not in str(error) and str(folder) in str(error)
    finally:
        file.write_bytes(before)


@quick
@given(content=st.data())
def test_damaged_file_of_a_checkpoint_is_one_error_line(
    content: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The checksums are updated, so that the damaged content itself is read."""
    root = tmp_path_factory.mktemp("work")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(root, {"stage": "warmup", "sections": {}, "inputs": {}, "code": "x"})
    checkpoints.save(model, optimizer, TrainingState(), {"mask": np.ones(3)})
    (folder,) = checkpoints._all()
    file = folder / content.draw(st.sampled_from(sorted(each.name for each in folder.iterdir())))
    file.write_bytes(content.draw(damaged(file.read_bytes())))
    if file.name != SUMS_FILE:
        sums = json.loads((folder / SUMS_FILE).read_text())
        (folder / SUMS_FILE).write_text(json.dumps(sums | {file.name: sha256(file)}))
    try:
        checkpoints.load(model, optimizer)
    except RamenError as error:
        assert "\n" not in str(error)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("sums", ["{}", "[]", "null", '{"weights.safetensors": 3}', '{"other": "x"}', "{"])
def test_checkpoint_with_incomplete_checksums_is_damaged(sums: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(model, optimizer, TrainingState())
    (folder,) = checkpoints._all()
    (folder / SUMS_FILE).write_text(sums)
    with pytest.raises(ArtifactError, match=f"{SUMS_FILE}.*there is no older one; delete it to start over: rm -r"):
        checkpoints.load(model, optimizer)


def test_foreign_directory_next_to_checkpoints_is_kept(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, {})
    (checkpoints.folder / "000-notes").mkdir(parents=True)
    for step in range(4):
        checkpoints.save(model, torch.optim.SGD(model.parameters()), TrainingState(global_step=step))
    assert len(checkpoints._all()) == 2 and (checkpoints.folder / "000-notes").is_dir()


@quick
@given(data=st.data())
def test_damaged_task_of_another_run_is_one_error_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("work")
    task = {"stage": "warmup", "sections": {"walk": {"hops": 1}}, "inputs": {"dataset": "x"}, "code": "y"}
    (root / "warmup-1" / "checkpoints" / "1").mkdir(parents=True)
    (root / "warmup-2").mkdir()
    content = json.dumps({**task, "outputs": {"warm_model": "elsewhere"}}).encode()
    (root / "warmup-1" / "task.json").write_bytes(data.draw(damaged(content)))
    try:
        with environment({"RAMEN_WORK": str(root)}):
            record_task(root / "warmup-2", task, {"warm_model": "artifacts/warm_model"})
            try:
                inputs_in_use()
            except ArtifactError as error:
                assert "\n" not in str(error)
    finally:
        shutil.rmtree(root)


class Client:
    """An MLflow client that accepts every write."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@quick
@given(data=st.data())
def test_damaged_file_of_a_journal_is_one_error_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "one"
    folder.mkdir()
    rows = [{"write": "tags", "run": "a", "values": {"values": {"k": "v"}}}, {"write": "end", "run": "a", "values": {}}]
    files = {
        "writes.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "sent.json": json.dumps({"sent": 1, "ids": {"a": "b"}, "later": []}).encode(),
    }
    name = data.draw(st.sampled_from(sorted(files)))
    for each, content in files.items():
        (folder / each).write_bytes(data.draw(damaged(content)) if each == name else content)
    try:
        journal = Journal.reopen(Client(), folder)
        assert journal is not None
        journal.flush()
        journal.unlock()
    except RamenError as error:
        assert "\n" not in str(error) and str(folder) in str(error)
        assert (folder / name).exists(), "entries that cannot be sent are kept"
    finally:
        shutil.rmtree(folder.parent)


def test_row_of_a_journal_cannot_send_a_file_outside_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "spool" / "one"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    row = {"write": "artifact", "run": "a", "values": {"folder": ""}, "file": "../../secret"}
    (folder / "writes.jsonl").write_text(json.dumps(row) + "\n")
    sent: list[str] = []
    client: Any = Client()
    client.log_artifact = lambda run, path, folder: sent.append(path)
    journal = Journal.reopen(client, folder)
    assert journal is not None and journal.flush() and not sent
    assert f"{folder / 'writes.jsonl'}:1: damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dataset", "graph"])
def test_foreign_folder_is_not_read_as_an_anchor_set(name: str, artifacts: Path, shared_dataset: Dataset) -> None:
    stray = artifacts / name / ("anchors" if name == "dataset" else "") / ".ipynb_checkpoints"
    stray.mkdir()
    Texts(["a"], ["b"]).write(stray / "texts.parquet")
    try:
        found = READ[name](shared_dataset, open_artifact(artifacts / name, name).path)
        sets = found.anchor_sets if isinstance(found, Dataset) else found
        assert sorted(sets) == ["category", "links"]  # type: ignore[call-overload]
    finally:
        shutil.rmtree(stray)
