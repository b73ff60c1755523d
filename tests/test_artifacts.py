"""Artifacts: complete or absent on disk, checked when opened, never written over foreign files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from ramen.artifacts import DRAFT_MARKER, MANIFEST, Artifact, create_drafts, open_artifact
from ramen.errors import ArtifactError
from ramen.files import describe_io_error, read_csr, read_texts, write_csr, write_json, write_texts


def write_graph(place: Path, content: str = "hello", *, name: str = "graph", **sections: int) -> Artifact:
    """Write and open an artifact with one file."""
    with create_drafts({name: place}, sections={"walk": sections}, inputs={}, work=place.parent / "work") as made:
        folder = made[name].path / "inner"
        folder.mkdir()
        (folder / "file.txt").write_text(content)
        made[name].counts["letters"] = len(content)
    return open_artifact(place, name)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_artifact_round_trip(tmp_path: Path) -> None:
    artifact = write_graph(tmp_path / "graph", walk=3)
    assert (artifact.path / "inner" / "file.txt").read_text() == "hello"
    assert artifact.counts == {"letters": 5}
    assert artifact.manifest["sections"] == {"walk": {"walk": 3}}
    assert list_names(tmp_path) == ["graph"]


def test_digest_depends_on_content_and_sections_not_on_the_path(tmp_path: Path) -> None:
    first, second = write_graph(tmp_path / "a"), write_graph(tmp_path / "b")
    assert first.digest == second.digest
    assert first.digest != write_graph(tmp_path / "c", "other").digest
    assert first.digest != write_graph(tmp_path / "d", walk=4).digest


def test_manifest_records_digests_of_inputs(tmp_path: Path) -> None:
    dataset = write_graph(tmp_path / "dataset", name="dataset")
    with create_drafts(
        {"graph": tmp_path / "graph"}, sections={}, inputs={"dataset": dataset}, work=tmp_path / "work"
    ) as made:
        (made["graph"].path / "file.txt").write_text("x")
    assert open_artifact(tmp_path / "graph", "graph").manifest["inputs"] == {"dataset": dataset.digest}


def test_changed_file_is_refused(tmp_path: Path) -> None:
    file = write_graph(tmp_path / "graph").path / "inner" / "file.txt"
    content = bytearray(file.read_bytes())
    content[2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="file.txt: differs from manifest.json"):
        open_artifact(tmp_path / "graph", "graph")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    (write_graph(tmp_path / "graph").path / "inner" / "file.txt").unlink()
    with pytest.raises(ArtifactError, match="file.txt: missing"):
        open_artifact(tmp_path / "graph", "graph")


def test_unfinished_or_missing_artifact_is_refused(tmp_path: Path) -> None:
    (write_graph(tmp_path / "graph").path / MANIFEST).unlink()
    for place in ("graph", "nowhere"):
        with pytest.raises(ArtifactError, match="not a finished graph"):
            open_artifact(tmp_path / place, "graph")


def test_artifact_of_another_kind_or_format_is_refused(tmp_path: Path) -> None:
    artifact = write_graph(tmp_path / "graph")
    with pytest.raises(ArtifactError, match="is a graph, expected a model"):
        open_artifact(artifact.path, "warm_model")
    open_artifact(artifact.path, "pruned_graph")  # another name of the same kind
    manifest = json.loads((artifact.path / MANIFEST).read_text())
    (artifact.path / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ArtifactError, match="format 99, this version reads 1"):
        open_artifact(artifact.path, "graph")
    (artifact.path / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON"):
        open_artifact(artifact.path, "graph")


def test_failure_keeps_the_old_artifact_and_leaves_no_draft(tmp_path: Path) -> None:
    before = write_graph(tmp_path / "graph").digest
    outputs = {"graph": tmp_path / "graph", "model": tmp_path / "model"}
    with pytest.raises(RuntimeError), create_drafts(outputs, sections={}, inputs={}, work=tmp_path / "work") as made:
        (made["graph"].path / "half").write_text("half")
        raise RuntimeError
    assert open_artifact(tmp_path / "graph", "graph").digest == before
    assert list_names(tmp_path) == ["graph"]


def test_only_an_older_artifact_of_the_kind_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_graph(tmp_path / "graph")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.raw.txt").write_text("years of work")
    (tmp_path / "notes.txt").write_text("more of it")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def write(path: Path, name: str = "dataset", **inputs: Artifact) -> None:
        with create_drafts({name: path}, sections={}, inputs=inputs, work=tmp_path / "work"):
            pass

    for path in (mine, tmp_path / "notes.txt", tmp_path / "graph", tmp_path, Path()):
        with pytest.raises(ArtifactError, match="refusing to overwrite: .*; choose another --dataset, or move it away"):
            write(path)
    graph = open_artifact(tmp_path / "graph", "graph")
    with pytest.raises(
        ArtifactError, match="overlaps the directory of graph; give pruned_graph another --pruned-graph"
    ):
        write(tmp_path / "graph", "pruned_graph", graph=graph)
    both = {"model": tmp_path / "same", "pruned_graph": tmp_path / "same" / "graph"}
    refused = pytest.raises(ArtifactError, match="overlaps the directory of model; give pruned_graph another")
    with refused, create_drafts(both, sections={}, inputs={}, work=tmp_path / "work"):
        pass
    assert (mine / "train.raw.txt").read_text() == "years of work"
    assert list_names(tmp_path) == ["empty", "graph", "mine", "notes.txt"]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty")
    write(tmp_path / "graph", "graph")


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "not JSON",
        "[]",
        "null",
        '{"kind": "graph"}',
        '{"format": 1, "kind": "graph"}',
        '{"format": true, "kind": "graph", "counts": {}, "sections": {}, "inputs": {}, "files": {}}',
        '{"format": 1, "kind": "graph", "counts": {}, "sections": {}, "inputs": {}, "files": []}',
        '{"format": 1, "kind": "graph", "counts": {}, "sections": {}, "inputs": {}, "files": {"../x": 1}}',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass"),
    ],
)
def test_directory_with_a_foreign_manifest_is_not_replaced(manifest: str | bytes, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / MANIFEST).write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    for notes in (False, True):
        if notes:
            (thesis / "chapter.txt").write_text("years of work")
        before = {path: path.read_bytes() for path in thesis.rglob("*")}
        with pytest.raises(ArtifactError, match="thesis: refusing to overwrite: .*; choose another --graph") as caught:
            write_graph(thesis)
        assert "\n" not in str(caught.value)
        assert {path: path.read_bytes() for path in thesis.rglob("*")} == before
        assert list_names(tmp_path) == ["thesis"]


@pytest.mark.parametrize("added", ["notes.txt", ".notes", "inner/notes.txt", "more/deep/notes", "link", "folder-link"])
def test_artifact_with_a_file_that_ramen_did_not_write_is_not_replaced(added: str, tmp_path: Path) -> None:
    artifact = write_graph(tmp_path / "graph")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    note = artifact.path / added
    note.parent.mkdir(parents=True, exist_ok=True)
    if "link" in added:
        note.symlink_to(tmp_path / "elsewhere" / ("" if added.startswith("folder") else "mine"))
    else:
        note.write_text("mine")
    with pytest.raises(ArtifactError, match=f"graph: refusing to overwrite: {added} is not listed in its manifest"):
        write_graph(artifact.path)
    assert os.path.lexists(note) and open_artifact(artifact.path, "graph").digest == artifact.digest
    note.unlink()
    write_graph(artifact.path, "new")
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"


def test_edited_artifact_is_not_replaced_but_a_half_deleted_one_is(tmp_path: Path) -> None:
    file = write_graph(tmp_path / "graph").path / "inner" / "file.txt"
    file.write_text("jello")
    with pytest.raises(ArtifactError, match="inner/file.txt differs from its manifest.json"):
        write_graph(tmp_path / "graph", "new")
    assert file.read_text() == "jello"
    file.unlink()
    assert (write_graph(tmp_path / "graph", "new").path / "inner" / "file.txt").read_text() == "new"


def test_link_is_replaced_only_if_it_points_to_an_artifact_of_the_kind(tmp_path: Path) -> None:
    write_graph(tmp_path / "real")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "notes").write_text("mine")
    for name, why in (("thesis", "missing"), ("nowhere", "which is missing"), ("thesis/notes", "cannot be")):
        place = tmp_path / f"to-{Path(name).name}"
        place.symlink_to(tmp_path / name)
        with pytest.raises(ArtifactError, match=f"refusing to overwrite: .*{why}"):
            write_graph(place)
        assert place.is_symlink()
    place = tmp_path / "graph"
    place.symlink_to("real")
    write_graph(place, "new")
    assert not place.is_symlink() and (tmp_path / "real" / "inner" / "file.txt").read_text() == "hello"


def test_files_added_while_a_stage_runs_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_graph(tmp_path / "graph", "old")
    with create_drafts({"graph": tmp_path / "graph"}, sections={}, inputs={}, work=tmp_path / "work") as made:
        (made["graph"].path / "file").write_text("new")
        (tmp_path / "graph" / "notes.txt").write_text("mine")
    open_artifact(tmp_path / "graph", "graph")
    assert not (tmp_path / "graph" / "notes.txt").exists()
    (kept,) = tmp_path.glob("graph.replaced-*")
    assert (kept / "notes.txt").read_text() == "mine" and str(kept) in capsys.readouterr().err
    assert list_names(tmp_path) == ["graph", kept.name]


def test_foreign_directories_named_like_a_replaced_output_are_kept(tmp_path: Path) -> None:
    write_graph(tmp_path / "graph")
    kept = [tmp_path / ".graph.backup.old", tmp_path / ".graph.0123abcd.old"]
    for folder in kept:
        (folder / "it").mkdir(parents=True)
        (folder / "it" / "notes").write_text("mine")
        os.utime(folder, (0, 0))
    write_graph(tmp_path / "graph", "new")
    assert all((folder / "it" / "notes").read_text() == "mine" for folder in kept)


def test_failure_removes_folders_created_for_the_outputs(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    places = {"dataset": tmp_path / "mine" / "new" / "dataset", "graph": tmp_path / "mine" / "new" / "in" / "graph"}
    with pytest.raises(RuntimeError), create_drafts(places, sections={}, inputs={}, work=tmp_path / "work"):
        raise RuntimeError
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/data/.dataset.k3j2h_0a.tmp", "/data/dataset"),
        ("/data/.dataset.k3j2h_0a.tmp/train.parquet", "/data/dataset/train.parquet"),
        ("/data/.metrics.json.k3j2h_0a", "/data/metrics.json"),
        ("/data/.hidden.folder/file.parquet", "/data/.hidden.folder/file.parquet"),
    ],
)
def test_failed_write_names_the_output_instead_of_the_temporary_file(path: str, named: str) -> None:
    assert describe_io_error(PermissionError(13, "Permission denied", path)) == f"{named}: Permission denied"


def test_older_artifact_is_replaced_on_success(tmp_path: Path) -> None:
    write_graph(tmp_path / "graph", "old")
    write_graph(tmp_path / "graph", "new")
    assert (tmp_path / "graph" / "inner" / "file.txt").read_text() == "new"
    assert list_names(tmp_path) == ["graph"]


def test_output_is_restored_after_a_kill_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = write_graph(tmp_path / "graph", "old").digest, os.rename

    def rename_until_killed(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "graph":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_until_killed)
    with pytest.raises(KeyboardInterrupt):
        write_graph(tmp_path / "graph", "new")
    monkeypatch.undo()
    assert not (tmp_path / "graph").exists()
    for leftover in tmp_path.glob(".graph.*"):
        os.utime(leftover, (0, 0))
    with (
        pytest.raises(RuntimeError),
        create_drafts({"graph": tmp_path / "graph"}, sections={}, inputs={}, work=tmp_path / "work"),
    ):
        raise RuntimeError
    assert open_artifact(tmp_path / "graph", "graph").digest == before
    assert list_names(tmp_path) == ["graph"]


def test_texts_round_trip_with_empty_and_non_ascii_rows(tmp_path: Path) -> None:
    uids, texts = ["a", "b", "c"], ["", "καλημέρα -> κόσμε", "tab\there"]
    write_texts(tmp_path / "t.parquet", uids, texts)
    assert read_texts(tmp_path / "t.parquet") == (uids, texts)


def test_written_matrix_is_canonical(tmp_path: Path) -> None:
    messy = sp.csr_matrix((np.array([1.0, 2.0, 3.0, 0.0]), np.array([2, 0, 2, 1]), np.array([0, 0, 4, 4])), (3, 4))
    write_csr(tmp_path / "m.npz", messy)
    matrix = read_csr(tmp_path / "m.npz")
    assert matrix.shape == (3, 4)
    assert matrix.indices.tolist() == [0, 2] and matrix.data.tolist() == [2.0, 4.0]
    assert matrix.indptr.tolist() == [0, 0, 2, 2]
    assert messy.nnz == 4, "the caller's matrix is not changed"


def test_next_run_removes_drafts_of_killed_processes_only(tmp_path: Path) -> None:
    place = {"dataset": tmp_path / "dataset"}
    dead, fresh, other = (
        tmp_path / name for name in (".dataset.0000000a.tmp", ".dataset.0000000b.tmp", ".graph.0000000c.tmp")
    )
    mine = [tmp_path / ".dataset.20240101.tmp", tmp_path / ".dataset.backup.tmp"]
    for folder in (dead, fresh, other, *mine):
        (folder / "texts").mkdir(parents=True)
        (folder / ("notes" if folder in mine else DRAFT_MARKER)).touch()
    for folder in (dead, other, *mine):
        os.utime(folder, (0, 0))
    with create_drafts(place, sections={}, inputs={}, work=tmp_path) as made:
        os.utime(made["dataset"].path, (0, 0))
        with create_drafts(place, sections={}, inputs={}, work=tmp_path):  # a second run while the first one is writing
            pass
        assert made["dataset"].path.is_dir()
    assert not dead.exists() and fresh.exists() and other.exists()
    assert all((folder / "notes").exists() for folder in mine), "named like a draft, but without the marker"


@pytest.fixture(params=[0o022, 0o077], ids=["umask-022", "umask-077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def wrong_modes(root: Path, umask: int) -> dict[str, str]:
    """Return the paths under a folder whose permissions differ from those of the umask."""
    return {
        str(path): oct(path.stat().st_mode & 0o777)
        for path in [root, *root.rglob("*")]
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask
    }


@pytest.mark.slow
def test_stage_outputs_follow_the_umask(
    umask: int, tiny_xc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramen.stages import run_stage

    monkeypatch.chdir(tmp_path)
    sections = {
        "data": {"source": "xc", "path": str(tiny_xc_folder)},
        "walk": {"hops": 5},
        "encoder": {"name": "tiny", "precision": "fp32"},
        "training": {"batch_size": 16, "epochs": 1, "warmup_epochs": 1, "threads": 1},
    }
    for name in ("ingest", "build-graph", "warmup"):
        run_stage(name, sections=sections)
    assert Path("artifacts/warm_model/model.safetensors").is_file()
    assert not wrong_modes(Path("artifacts"), umask)
    write_json(Path("artifacts/replaced.json"), {})
    write_json(Path("artifacts/replaced.json"), {})
    assert not wrong_modes(Path("artifacts"), umask)


def test_checkpoints_follow_the_umask(umask: int, tmp_path: Path) -> None:
    import torch

    from ramen.training.checkpoint import Checkpoints, TrainingState

    model = torch.nn.Linear(2, 2)
    Checkpoints(tmp_path / "work", {}).save(model, torch.optim.SGD(model.parameters()), TrainingState())
    assert list((tmp_path / "work").rglob("weights.safetensors"))
    assert not wrong_modes(tmp_path / "work", umask)


def test_manifest_without_files_is_refused(tmp_path: Path) -> None:
    manifest = {"format": 1, "kind": "dataset", "counts": {}, "sections": {}, "inputs": {}, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="files: expected the artifact's files, found none"):
        open_artifact(tmp_path, "dataset")
