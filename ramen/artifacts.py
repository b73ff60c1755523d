"""Artifacts: directories that stages write and read, with a manifest that is written last.

The manifest holds content facts only (format, kind, counts, section values, digests of the inputs, size and sha256 of
each file), so the same content always has the same digest. Times, run ids and git revisions belong to the tracker.

An artifact is written as a draft next to its final path and renamed when it is complete. Only this module creates or
opens artifacts.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ramen.console import warn
from ramen.errors import ArtifactError, StateRemoved
from ramen.files import (
    apply_umask,
    check_type,
    describe_os_error,
    read_json,
    sha256,
    shorten,
    temporary_path,
    write_json,
)

FORMAT = 1
MANIFEST = "manifest.json"
KINDS: dict[str, str] = {
    "dataset": "dataset",
    "graph": "graph",
    "pruned_graph": "graph",
    "warm_model": "model",
    "model": "model",
    "evaluation": "evaluation",
    "retriever": "retriever",
}
"""Artifact name -> kind; artifacts of one kind have the same files on disk."""
DISPOSABLE = frozenset({"training_state.safetensors", "oracle_documents.npy", "oracle_labels.npy"})
"""Files of a warm model that only `prune-retrain` reads. `ramen gc` may delete them: the manifest, and so the digest,
stays the same, and the artifact stays valid for every other reader."""
DRAFT_MARKER = ".ramen-draft"
"""Empty file in every draft: only directories that contain it are removed as leftovers of killed processes."""
DRAFT_GRACE_S = 120.0
"""Age in seconds below which an unlocked draft is kept: another process may be about to lock it."""
MOVED_ASIDE = "it"
"""Name of an output that is being replaced, inside a folder `.NAME.*.old` next to it."""
HASHED_BYTES = 64 << 20
"""Files up to this size are hashed before an artifact is replaced; of larger files only the size is compared."""


@dataclass(frozen=True)
class Artifact:
    """A finished and checked artifact.

    Attributes:
        path: its directory.
        manifest: as written.
    """

    path: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """sha256 of the manifest, which stands for the whole content."""
        return sha256(self.path / MANIFEST)

    @property
    def counts(self) -> Mapping[str, Any]:
        """Facts about the content that the stage recorded."""
        return self.manifest["counts"]  # type: ignore[no-any-return]


@dataclass
class Draft:
    """An artifact that is being written.

    Attributes:
        path: directory for the files.
        work: work directory of the stage (checkpoints): kept after a failed attempt, deleted after success.
        task: stage, sections, digests of the inputs and version of the code.
        counts: facts about the content, filled in by the stage.
    """

    path: Path
    work: Path
    task: Mapping[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


# --- reading ----------------------------------------------------------------------------------------------------


def open_artifact(path: str | os.PathLike[str], name: str, *, complete: bool = False) -> Artifact:
    """Open a finished artifact and check every file against its manifest.

    Args:
        path: the artifact's directory.
        name: expected artifact (a key of `KINDS`).
        complete: whether `DISPOSABLE` files are required too.

    Raises:
        ArtifactError: missing, unfinished, of another kind or format, or a file differs.
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
        name: expected artifact (a key of `KINDS`).

    Raises:
        ArtifactError: missing, unfinished, or of another kind or format.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        raise ArtifactError(
            f"{path}: no {MANIFEST}: not a finished {name}; run the stage that writes it (`ramen --help`)"
        )
    return _load_manifest(path, KINDS[name], f"run the stage that writes {name} again")


def _load_manifest(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    """Read a manifest and check its structure. Raises ArtifactError, which ends with the remedy."""
    file = path / MANIFEST
    manifest: dict[str, Any] = read_json(file, remedy=remedy)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT or isinstance(found, bool):
        raise ArtifactError(f"{path}: format {shorten(found)}, this version reads {FORMAT}; {remedy}")
    if manifest.get("kind") != kind:
        raise ArtifactError(f"{path}: is a {shorten(manifest.get('kind'))}, expected a {kind}")
    for key, form in manifest_types().items():
        check_type(manifest.get(key), form, f"{file}: {key}", remedy)
    if not manifest["files"] and kind != "graph":  # the graph of a dataset without anchor sets has no files
        raise ArtifactError(f"{file}: files: expected the artifact's files, found none; {remedy}")
    for name in manifest["files"]:
        if not is_safe_relative_path(name):
            raise ArtifactError(f"{file}: files: {shorten(name)} is not a path inside the artifact; {remedy}")
    return manifest


def is_safe_relative_path(name: str) -> bool:
    """Whether a file name from a manifest is a normalised relative path inside the artifact."""
    parts = name.split("/")
    return name != MANIFEST and "\0" not in name and not {"", ".", ".."} & set(parts)


@functools.cache
def manifest_types() -> dict[str, Any]:
    """Return the type of each manifest key, for pydantic."""
    from pydantic import Field, StringConstraints
    from typing_extensions import TypedDict

    digest = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    facts = TypedDict("facts", {"bytes": Annotated[int, Field(ge=0)], "sha256": digest})  # noqa: UP013
    sections = dict[str, dict[str, Any]]
    return {
        "counts": dict[str, Any],
        "sections": sections,
        "inputs": dict[str, digest],  # type: ignore[valid-type]
        "files": dict[str, facts],
    }


def list_files(path: Path) -> list[str]:
    """Return the relative file names listed in an artifact's manifest; without a manifest, of all files present.

    Raises:
        ArtifactError: the manifest cannot be read.
    """
    if not (path / MANIFEST).exists():
        return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    manifest = check_type(read_json(path / MANIFEST), dict[str, Any], str(path / MANIFEST))
    return sorted(check_type(manifest.get("files"), dict[str, Any], f"{path / MANIFEST}: files"))


# --- writing ----------------------------------------------------------------------------------------------------


@contextmanager
def create_drafts(
    outputs: Mapping[str, str | os.PathLike[str]],
    *,
    sections: Mapping[str, Any],
    inputs: Mapping[str, Artifact],
    work: Path,
    task: Mapping[str, Any] | None = None,
    named: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Iterator[dict[str, Draft]]:
    """Create drafts next to the outputs; on success write the manifests and rename, on failure delete the drafts.

    Args:
        outputs: artifact name -> final directory (replaced at the end if it holds an older artifact of its kind).
        sections: validated section values of the stage, recorded in the manifest.
        inputs: opened inputs, whose digests are recorded in the manifest.
        work, task: passed on to each draft.
        named: knob -> directory that the stage reads in addition to its inputs, such as `encoder.name`.

    Raises:
        ArtifactError: an output would overwrite an input, or anything but an older artifact of its kind.
    """
    check_outputs(outputs, {name: artifact.path for name, artifact in inputs.items()} | dict(named or {}))
    written: dict[str, Draft] = {}
    locks: list[int] = []
    new_parents: list[Path] = []
    try:
        for name, output in outputs.items():
            parent = Path(output).absolute().parent
            new_parents += [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(parent, Path(output).name, KINDS[name])
            path = temporary_path(parent / Path(output).name, ".tmp")
            path.mkdir()
            (path / DRAFT_MARKER).touch()
            written[name] = Draft(path, work, task or {})
            locks.append(os.open(path, os.O_RDONLY))
            _lock(locks[-1])
        yield written
        for name, draft in written.items():
            _write_manifest(draft, name, sections, inputs)
            apply_umask(draft.path)
        for name, draft in written.items():
            _replace(draft.path, Path(outputs[name]), KINDS[name])
    finally:
        for draft in written.values():
            shutil.rmtree(draft.path, ignore_errors=True)
        for handle in locks:
            os.close(handle)
        for folder in sorted(new_parents, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # not empty, as after success
                folder.rmdir()


def check_outputs(outputs: Mapping[str, str | os.PathLike[str]], read: Mapping[str, str | os.PathLike[str]]) -> None:
    """Raise an error if an output would overwrite an input, or anything but an older artifact of its kind.

    Args:
        outputs: artifact name -> final directory.
        read: input name or knob -> directory that is read.

    Raises:
        ArtifactError: one of them would.
    """
    used = {Path(os.path.realpath(path)): name for name, path in read.items()}
    for name, output in outputs.items():
        resolved, option = Path(os.path.realpath(output)), f"--{name.replace('_', '-')}"
        for other, other_name in used.items():
            if resolved.is_relative_to(other) or other.is_relative_to(resolved):
                raise ArtifactError(f"{output}: overlaps the directory of {other_name}; give {name} another {option}")
        if Path.cwd().is_relative_to(resolved):
            foreign = "the working directory is inside"
        else:
            foreign = foreign_content(Path(output), KINDS[name])
        if foreign:
            raise ArtifactError(f"{output}: refusing to overwrite: {foreign}; choose another {option}, or move it away")
        used[resolved] = name


def foreign_content(path: Path, kind: str) -> str:
    """Return why a directory may contain files that ramen did not write, as a phrase; "" if it does not.

    ramen may replace a missing or empty directory, and an artifact of the kind (even half deleted) whose remaining
    files are listed in its manifest. Of a link, only the link itself is replaced.

    Args:
        path: directory of the new artifact.
        kind: a value of `KINDS`.
    """
    try:
        if path.is_symlink():
            if not path.exists():
                return f"it is a link to {path.readlink()}, which is missing"
            _load_manifest(path, kind, "")
            return ""
        if not path.exists():
            return ""
        if not path.is_dir():
            return "it is a file"
        if not any(path.iterdir()):
            return ""
        if not (path / MANIFEST).exists():
            return f"it was not written by ramen (no {MANIFEST})"
        files = _load_manifest(path, kind, "")["files"]
        for name, file in _walk_files(path):
            if name != MANIFEST and name not in files:
                return f"{shorten(name)} is not listed in its {MANIFEST}"
            if name in files and file.exists() and not is_as_listed(file, files[name]):
                return f"{name} differs from its {MANIFEST}"
    except ArtifactError as error:
        why = str(error).rstrip("; ").removeprefix(f"{path / MANIFEST}: ").removeprefix(f"{path}: ")
        return f"it is not a {kind} that ramen wrote ({MANIFEST}: {why})"
    except OSError as error:
        return f"it cannot be read ({describe_os_error(error)})"
    return ""


def _walk_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative name and path of everything under a folder except real directories."""
    for root, folders, files in os.walk(folder, onerror=_raise):
        for name in [*files, *(each for each in folders if (Path(root) / each).is_symlink())]:
            file = Path(root) / name
            yield file.relative_to(folder).as_posix(), file


def _raise(error: OSError) -> None:
    raise error


def is_as_listed(file: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a file has the size, and up to `HASHED_BYTES` the sha256, listed in its manifest."""
    if not file.is_file() or file.stat().st_size != facts["bytes"]:
        return False
    return bool(facts["bytes"] > HASHED_BYTES) or sha256(file) == facts["sha256"]


def delete_artifact(path: Path, kind: str) -> bool:
    """Delete an artifact, or nothing (returns False) if it contains anything that ramen did not write.

    The manifest is deleted last: an artifact that a kill left half deleted is still recognised.
    """
    if path.is_symlink() or foreign_content(path, kind):
        return False
    if not path.is_dir():
        return True
    for name, file in _walk_files(path):
        if name != MANIFEST:
            file.unlink(missing_ok=True)
    (path / MANIFEST).unlink(missing_ok=True)
    for root, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):  # a file was added in the meantime
            Path(root).rmdir()
    return True


# --- drafts -----------------------------------------------------------------------------------------------------


def abandoned_drafts(parent: Path, names: Sequence[str]) -> list[Path]:
    """Return the drafts in a folder that killed processes left: older than `DRAFT_GRACE_S` and not locked."""
    return [draft for name in names for draft in _hidden_directories(parent, name, "tmp") if _is_abandoned(draft)]


def _hidden_directories(parent: Path, name: str, suffix: str) -> list[Path]:
    """Return the directories next to an output that are named like those of `temporary_path`."""
    form = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.{suffix}")
    found = sorted(parent.glob(f".{glob.escape(name)}.*.{suffix}"))
    return [path for path in found if form.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _is_abandoned(draft: Path) -> bool:
    with suppress(OSError):  # deleted in the meantime
        if time.time() - draft.stat().st_mtime < DRAFT_GRACE_S or not (draft / DRAFT_MARKER).is_file():
            return False
        handle = os.open(draft, os.O_RDONLY)
        try:
            return _lock(handle)
        finally:
            os.close(handle)
    return False


def _remove_leftovers(parent: Path, name: str, kind: str) -> None:
    """Remove abandoned drafts of an output; restore an output whose replacement was killed between two renames."""
    for leftover in _hidden_directories(parent, name, "old"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime < DRAFT_GRACE_S:
                continue
            aside = leftover / MOVED_ASIDE
            if not os.path.lexists(parent / name) and aside.is_dir():
                os.rename(aside, parent / name)
            if not aside.exists() or delete_artifact(aside, kind):
                leftover.rmdir()  # fails if it contains anything else
    for draft in abandoned_drafts(parent, [name]):
        shutil.rmtree(draft, ignore_errors=True)


def _lock(handle: int) -> bool:
    """Lock a directory for this process; False if it is locked, or if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_manifest(draft: Draft, name: str, sections: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> None:
    files = {
        str(file.relative_to(draft.path)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(draft.path.rglob("*"))
        if file.is_file() and file != draft.path / DRAFT_MARKER
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
    (draft.path / DRAFT_MARKER).unlink(missing_ok=True)


def _replace(source: Path, target: Path, kind: str) -> None:
    """Rename a directory to its final path; an older artifact there is moved aside first and then deleted.

    The older artifact was checked before the stage began, hours ago for a training. Files added since then are kept.
    """
    target = target.absolute()
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        os.rename(source, target)
        return
    folder = temporary_path(target, ".old")
    folder.mkdir()
    aside = folder / MOVED_ASIDE
    try:
        os.rename(target, aside)
    except OSError:
        folder.rmdir()
        raise
    os.rename(source, target)
    with suppress(OSError):  # the new artifact is in place; the next run removes leftovers
        if aside.is_dir() and delete_artifact(aside, kind) and not aside.exists():
            folder.rmdir()
            return
        kept = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
        os.rename(aside, kept)
        folder.rmdir()
        warn(f"{target}: files that ramen did not write were added while the stage ran; they are in {kept}")
