"""What is on disk: names, manifest, checks, write-beside-and-rename.

An artifact is a directory with a `manifest.json` that is written last. It holds content facts only (format,
kind, counts, section values, hashes of the inputs, size and sha256 of each file), so that the same content
always has the same digest; times, run ids and git revisions belong to the tracker.

This is the only module that makes or opens an artifact; nothing here loads a pickle.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramen.errors import ArtifactError, StateRemoved

FORMAT = 1
FRESH = 120.0
"""Seconds for which a draft is left alone, though nobody seems to hold it: someone may be about to."""
ASIDE = "it"
"""An output that is being replaced, in a folder `.NAME.*.old` beside it."""
MANIFEST = "manifest.json"
DISPOSABLE = frozenset({"training_state.safetensors", "oracle_documents.npy", "oracle_labels.npy"})
"""Files of a warm model that only `prune-retrain` reads. `ramen gc` may delete them: the manifest, and so the digest,
stays the same, and the artifact stays valid for every other reader."""
ROWS = 1 << 17
"""Texts that are written at a time."""

KINDS: dict[str, str] = {
    "dataset": "dataset",
    "graph": "graph",
    "pruned_graph": "graph",
    "warm_model": "model",
    "model": "model",
    "evaluation": "evaluation",
    "retriever": "retriever",
}
"""Artifact name -> kind; artifacts of one kind have the same form on disk."""


WRITERS = ("safetensors", "safetensors_rust", "pyarrow")
"""Libraries with error classes of their own for a failed read or write."""
BESIDE = re.compile(r"(?<=/)\.([^/]+)\.\w{8}(?:\.tmp)?(?=[/'\"]|$)")
"""The name of a draft or of a file that is being written, in a path; its group is the name it will have."""


@dataclass(frozen=True)
class Artifact:
    """A finished, checked artifact: `path` to read from, `manifest` as written."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """sha256 of the manifest, hence of the whole content."""
        return sha256(self.path / MANIFEST)

    @property
    def counts(self) -> Mapping[str, Any]:
        """Facts the writing stage recorded about the content."""
        return self.manifest["counts"]  # type: ignore[no-any-return]


@dataclass
class Draft:
    """An artifact being written: put files under `path` and facts into `counts`.

    `work` is the stage's work directory: it outlives a failed attempt (checkpoints go there) and is removed after
    success. `task` is what was asked for: stage, sections, digests of the inputs, version of the code.
    """

    path: Path
    work: Path
    task: Mapping[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


def open_artifact(path: str | os.PathLike[str], name: str, *, complete: bool = False) -> Artifact:
    """Open a finished artifact and check every file against its manifest.

    Args:
        path: the artifact's directory.
        name: what it is expected to be (a key of `KINDS`).
        complete: whether `DISPOSABLE` files must be there too.

    Raises:
        ArtifactError: missing, unfinished, of another kind or format, or a file that differs.
        StateRemoved: a disposable file is missing, and `complete` is set.
    """
    path = Path(path)
    manifest = read_manifest(path, name)
    for relative, facts in manifest["files"].items():
        file = path / relative
        if relative in DISPOSABLE and not file.exists():
            if complete:
                raise StateRemoved(
                    f"{path}: the training state was removed by `ramen gc`; run `ramen warmup` again ({relative})"
                )
            continue
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, though listed in {MANIFEST}; run the stage that writes {name} again")
        if file.stat().st_size != facts["bytes"] or sha256(file) != facts["sha256"]:
            raise ArtifactError(f"{file}: differs from {MANIFEST}: damaged or edited; run its stage again")
    return Artifact(path, manifest)


def read_manifest(path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Read the manifest of a finished artifact without checking its files.

    Args:
        path: the artifact's directory.
        name: what it is expected to be (a key of `KINDS`).

    Raises:
        ArtifactError: missing, unfinished, or of another kind or format.
    """
    path = Path(path)
    kind = KINDS[name]
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: no {MANIFEST}: not a finished {name}; run the stage that writes it (`ramen --help`)"
        ) from None
    except (ValueError, UnicodeDecodeError):
        raise ArtifactError(f"{path / MANIFEST}: not valid JSON; run the stage that writes {name} again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ArtifactError(
            f"{path}: format {found}, this version reads {FORMAT}; run the stage that writes {name} again"
        )
    if manifest.get("kind") != kind:
        raise ArtifactError(f"{path}: is a {manifest.get('kind')}, expected a {kind}")
    return manifest


@contextmanager
def drafts(
    outputs: Mapping[str, str | os.PathLike[str]],
    *,
    sections: Mapping[str, Any],
    inputs: Mapping[str, Artifact],
    work: Path,
    task: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Draft]]:
    """Write artifacts beside their places; on success finish the manifests and rename all, else remove all.

    Args:
        outputs: artifact name -> final directory (an older artifact of its kind there is replaced at the end).
        sections: validated section values of the stage, recorded in the manifest.
        inputs: opened inputs, whose digests are recorded in the manifest.
        work, task: the stage's work directory and what was asked for, handed to each draft.

    Raises:
        ArtifactError: an output's place holds something else than an older artifact of its kind, or an input.
    """
    _spare(outputs, inputs)
    made: dict[str, Draft] = {}
    held: list[int] = []
    fresh: list[Path] = []
    try:
        for name, place in outputs.items():
            parent = Path(place).absolute().parent
            fresh += [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            _sweep(parent, Path(place).name)
            beside = _beside(parent / Path(place).name, ".tmp")
            beside.mkdir()
            made[name] = Draft(beside, work, task or {})
            held.append(os.open(beside, os.O_RDONLY))
            _lock(held[-1])
        yield made
        for name, draft in made.items():
            _write_manifest(draft, name, sections, inputs)
            apply_umask(draft.path)
        for name, draft in made.items():
            _replace(draft.path, Path(outputs[name]))
    finally:
        for draft in made.values():
            shutil.rmtree(draft.path, ignore_errors=True)
        for handle in held:
            os.close(handle)
        for folder in sorted(fresh, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # in use, as it should be
                folder.rmdir()


def _spare(outputs: Mapping[str, str | os.PathLike[str]], inputs: Mapping[str, Artifact]) -> None:
    """Refuse places where an artifact would replace what is not an older one of its kind, a user's data for one."""
    taken = {artifact.path.resolve(): name for name, artifact in inputs.items()}
    for name, place in outputs.items():
        whole, option = Path(place).resolve(), f"--{name.replace('_', '-')}"
        for other, its in taken.items():
            if whole.is_relative_to(other) or other.is_relative_to(whole):
                raise ArtifactError(f"{place}: is the place of {its} too; give {name} another {option}")
        if not _replaceable(Path(place), KINDS[name]) or Path.cwd().is_relative_to(whole):
            raise ArtifactError(
                f"{place}: {name} is written there in place of what there is, which is no {KINDS[name]} of ramen's; "
                f"give another {option}, or move it away"
            )
        taken[whole] = name


def _replaceable(place: Path, kind: str) -> bool:
    """Whether nothing is lost there: no folder, an empty one, a link, or an artifact of the kind, be it damaged."""
    if place.is_symlink() or not place.exists():
        return True
    if not place.is_dir():
        return False
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return not any(place.iterdir())
    except ValueError:
        return True
    return isinstance(manifest, dict) and manifest.get("kind") == kind


def abandoned_drafts(parent: Path, names: Sequence[str]) -> list[Path]:
    """Drafts of artifacts that killed processes left in a folder: minutes old and held by nobody."""
    return [left for name in names for left in sorted(parent.glob(f".{glob.escape(name)}.*.tmp")) if _abandoned(left)]


def _abandoned(draft: Path) -> bool:
    with suppress(OSError):  # gone meanwhile
        if time.time() - draft.stat().st_mtime < FRESH:
            return False
        handle = os.open(draft, os.O_RDONLY)
        try:
            return _lock(handle)
        finally:
            os.close(handle)
    return False


def _sweep(parent: Path, name: str) -> None:
    """Remove drafts of an output that killed processes left: those that are minutes old and that nobody holds.

    An output that was moved aside by a process killed before it had put the new one there is put back.
    """
    for left in parent.glob(f".{glob.escape(name)}.*.old"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < FRESH:
                continue
            if not (parent / name).exists() and (left / ASIDE).is_dir():
                os.rename(left / ASIDE, parent / name)
            shutil.rmtree(left, ignore_errors=True)
    for left in abandoned_drafts(parent, [name]):
        shutil.rmtree(left, ignore_errors=True)


def _lock(handle: int) -> bool:
    """Whether a folder is now this process's; False too where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_manifest(draft: Draft, name: str, sections: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> None:
    files = {
        str(file.relative_to(draft.path)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(draft.path.rglob("*"))
        if file.is_file()
    }
    manifest = {
        "format": FORMAT,
        "kind": KINDS[name],
        "counts": draft.counts,
        "sections": dict(sections),
        "inputs": {key: value.digest for key, value in inputs.items()},
        "files": files,
    }
    write_json(draft.path / MANIFEST, manifest)


def _replace(source: Path, target: Path) -> None:
    """Rename a directory into place; an older one is moved aside first (rename cannot replace a full directory)."""
    target = target.absolute()
    if target.is_symlink() or target.is_file():
        target.unlink()
    if target.exists():
        aside = _beside(target, ".old")
        aside.mkdir()
        os.rename(target, aside / ASIDE)
        os.rename(source, target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(source, target)


def failed_io(error: BaseException) -> str:
    """One line about an error of the file system (no space, read-only, missing), empty for any other error.

    It names what was to be written, not the file beside it.
    """
    if isinstance(error, OSError) and (error.filename or error.errno):
        return BESIDE.sub(r"\1", str(error))
    if type(error).__module__.partition(".")[0] in WRITERS:
        return BESIDE.sub(r"\1", str(error).strip().splitlines()[0])
    return ""


def _beside(path: Path, suffix: str = "") -> Path:
    """An unused hidden name in the same folder. Unlike `tempfile`, it leaves the permissions to the umask."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def apply_umask(folder: Path) -> None:
    """Give every file under a folder that this process made the permissions that the umask gave the folder.

    safetensors writes its files with mode 0600, which other users of a shared disk cannot read.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def flush(folder: Path) -> None:
    """Apply the umask to everything under a folder and write all of it to the disk, before the folder gets its name."""
    apply_umask(folder)
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, renamed to it when all is written and on the disk; removed if anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    beside.touch(exist_ok=False)
    mode = beside.stat().st_mode & 0o777
    try:
        yield beside
        with beside.open("rb") as stream:
            os.fsync(stream.fileno())
        beside.chmod(mode)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically: a temporary file beside it, fsync, rename."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys sorted, so that equal content gives equal bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_sha256(path: Path) -> str:
    """Hex sha256 of a folder's files, by path and bytes."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\0".encode())
    return digest.hexdigest()


# --- columnar and sparse files -------------------------------------------------------------------------------


def write_texts(path: Path, uids: Sequence[str], texts: Sequence[str], titles: Sequence[str] | None = None) -> None:
    """Write `uid: str, text: str` rows, and `title: str` if given, as Parquet; row i is item i."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"uid": uids, "text": texts} | ({} if titles is None else {"title": titles})
    schema = pa.schema([(name, pa.string()) for name in columns])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, max(len(uids), 1), ROWS):  # full texts are tens of gigabytes: no second copy of them all
            part = [pa.array(values[start : start + ROWS], pa.string()) for values in columns.values()]
            writer.write_table(pa.Table.from_arrays(part, schema=schema))


def read_texts(path: Path) -> tuple[list[str], list[str]]:
    """Read (uids, texts) written by `write_texts`."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["uid", "text"])
    return table["uid"].to_pylist(), table["text"].to_pylist()


def read_titles(path: Path) -> list[str] | None:
    """Read the titles written by `write_texts`, None if there are none."""
    import pyarrow.parquet as pq

    if "title" not in pq.read_schema(path).names:
        return None
    titles: list[str] = pq.read_table(path, columns=["title"])["title"].to_pylist()
    return titles


def write_csr(path: Path, matrix: Any) -> None:
    """Write a scipy CSR matrix as .npz: sorted int32 indices, no duplicates, no explicit zeros."""
    import numpy as np
    import scipy.sparse as sp

    path.parent.mkdir(parents=True, exist_ok=True)
    matrix = sp.csr_matrix(matrix, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.indices = matrix.indices.astype(np.int32)
    sp.save_npz(path, matrix, compressed=False)


def read_csr(path: Path) -> Any:
    """Read a scipy CSR matrix (`scipy.sparse.csr_matrix`) written by `write_csr`."""
    import scipy.sparse as sp

    return sp.csr_matrix(sp.load_npz(path))
