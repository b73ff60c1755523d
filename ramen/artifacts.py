"""What is on disk: names, manifest, checks, write-beside-and-rename.

An artifact is a directory with a `manifest.json` that is written last. It holds content facts only (format,
kind, counts, section values, hashes of the inputs, size and sha256 of each file), so that the same content
always has the same digest; times, run ids and git revisions belong to the tracker.

This is the only module that makes or opens an artifact; nothing here loads a pickle.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ramen.errors import ArtifactError, StateRemoved, warn

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
DRAFT_MARKER = ".ramen-draft"
"""An empty file in every draft: only directories that hold one are removed as leftovers of killed processes."""
HASHED_BYTES = 64 << 20
"""Files up to this size are hashed before an artifact is replaced; of larger ones, the size is compared."""
LONGEST_NAME = 255 - len(".01234567.tmp") - 1
"""Bytes of a file's name, so that the name of its temporary copy still fits the file system."""
JSON_BYTES = 256 << 20
"""Largest JSON file of an artifact that is read; the largest that ramen writes takes a few megabytes."""

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
    if not (path / MANIFEST).exists():
        raise ArtifactError(
            f"{path}: no {MANIFEST}: not a finished {name}; run the stage that writes it (`ramen --help`)"
        )
    return _load_manifest(path, KINDS[name], f"run the stage that writes {name} again")


def _load_manifest(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    """Read a manifest and check its form. Raises ArtifactError, with what to do about it."""
    file = path / MANIFEST
    manifest: dict[str, Any] = read_json(file, remedy=remedy)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT or isinstance(found, bool):
        raise ArtifactError(f"{path}: format {shown(found)}, this version reads {FORMAT}; {remedy}")
    if manifest.get("kind") != kind:
        raise ArtifactError(f"{path}: is a {shown(manifest.get('kind'))}, expected a {kind}")
    for key, form in manifest_forms().items():
        checked(manifest.get(key), form, f"{file}: {key}", remedy)
    if not manifest["files"] and kind != "graph":  # of a dataset without anchor sets there is no graph
        raise ArtifactError(f"{file}: files: expected the artifact's files, found none; {remedy}")
    for name in manifest["files"]:
        if not is_inside(name):
            raise ArtifactError(f"{file}: files: {shown(name)} is not a path inside the artifact; {remedy}")
    return manifest


def is_inside(name: str) -> bool:
    """Whether a name from a manifest is the normal form of a relative path that does not leave the artifact."""
    parts = name.split("/")
    return name != MANIFEST and "\0" not in name and not {"", ".", ".."} & set(parts)


@functools.cache
def manifest_forms() -> dict[str, Any]:
    """Key of a manifest -> its form, as pydantic checks it."""
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


def listed_files(path: Path) -> list[str]:
    """Names of an artifact's files, relative, as its manifest lists them; without a manifest, of all files there.

    Raises:
        ArtifactError: the manifest cannot be read.
    """
    if not (path / MANIFEST).exists():
        return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    manifest = checked(read_json(path / MANIFEST), dict[str, Any], str(path / MANIFEST))
    return sorted(checked(manifest.get("files"), dict[str, Any], f"{path / MANIFEST}: files"))


@contextmanager
def drafts(
    outputs: Mapping[str, str | os.PathLike[str]],
    *,
    sections: Mapping[str, Any],
    inputs: Mapping[str, Artifact],
    work: Path,
    task: Mapping[str, Any] | None = None,
    named: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Iterator[dict[str, Draft]]:
    """Write artifacts beside their places; on success finish the manifests and rename all, else remove all.

    Args:
        outputs: artifact name -> final directory (an older artifact of its kind there is replaced at the end).
        sections: validated section values of the stage, recorded in the manifest.
        inputs: opened inputs, whose digests are recorded in the manifest.
        work, task: the stage's work directory and what was asked for, handed to each draft.
        named: knob -> directory that the stage reads although it is not an input, such as `encoder.name`.

    Raises:
        ArtifactError: an output's place holds something else than an older artifact of its kind, or an input.
    """
    check_outputs(outputs, {name: artifact.path for name, artifact in inputs.items()} | dict(named or {}))
    made: dict[str, Draft] = {}
    held: list[int] = []
    fresh: list[Path] = []
    try:
        for name, place in outputs.items():
            parent = Path(place).absolute().parent
            fresh += [folder for folder in (parent, *parent.parents) if not folder.exists()]
            parent.mkdir(parents=True, exist_ok=True)
            _sweep(parent, Path(place).name, KINDS[name])
            beside = _beside(parent / Path(place).name, ".tmp")
            beside.mkdir()
            (beside / DRAFT_MARKER).touch()
            made[name] = Draft(beside, work, task or {})
            held.append(os.open(beside, os.O_RDONLY))
            _lock(held[-1])
        yield made
        for name, draft in made.items():
            _write_manifest(draft, name, sections, inputs)
            apply_umask(draft.path)
        for name, draft in made.items():
            _replace(draft.path, Path(outputs[name]), KINDS[name])
    finally:
        for draft in made.values():
            shutil.rmtree(draft.path, ignore_errors=True)
        for handle in held:
            os.close(handle)
        for folder in sorted(fresh, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # in use, as it should be
                folder.rmdir()


def check_outputs(outputs: Mapping[str, str | os.PathLike[str]], read: Mapping[str, str | os.PathLike[str]]) -> None:
    """Refuse outputs that would replace what a stage reads, or anything that is not an older artifact of their kind.

    Args:
        outputs: artifact name -> final directory.
        read: name of an input, or a knob -> directory that is read.

    Raises:
        ArtifactError: an output would.
    """
    taken = {Path(os.path.realpath(path)): name for name, path in read.items()}
    for name, place in outputs.items():
        whole, option = Path(os.path.realpath(place)), f"--{name.replace('_', '-')}"
        for other, its in taken.items():
            if whole.is_relative_to(other) or other.is_relative_to(whole):
                raise ArtifactError(f"{place}: is the place of {its} too; give {name} another {option}")
        if Path.cwd().is_relative_to(whole):
            foreign = "the working directory is inside"
        else:
            foreign = foreign_content(Path(place), KINDS[name])
        if foreign:
            raise ArtifactError(f"{place}: refusing to overwrite: {foreign}; choose another {option}, or move it away")
        taken[whole] = name


def foreign_content(place: Path, kind: str) -> str:
    """Return why a directory may hold something that ramen did not write, in a phrase; empty if it does not.

    Replaceable are a missing or empty directory and an artifact of the kind, be it half deleted, whose remaining files
    are those that its manifest lists. Of a link only the link itself is replaced.

    Args:
        place: what an artifact is to replace.
        kind: a value of `KINDS`.
    """
    try:
        if place.is_symlink():
            if not place.exists():
                return f"it is a link to {place.readlink()}, which is missing"
            _load_manifest(place, kind, "")
            return ""
        if not place.exists():
            return ""
        if not place.is_dir():
            return "it is a file"
        if not any(place.iterdir()):
            return ""
        if not (place / MANIFEST).exists():
            return f"it was not written by ramen (no {MANIFEST})"
        files = _load_manifest(place, kind, "")["files"]
        for name, file in _contents(place):
            if name != MANIFEST and name not in files:
                return f"{shown(name)} is not listed in its {MANIFEST}"
            if name in files and file.exists() and not is_as_listed(file, files[name]):
                return f"{name} differs from its {MANIFEST}"
    except ArtifactError as error:
        why = str(error).rstrip("; ").removeprefix(f"{place / MANIFEST}: ").removeprefix(f"{place}: ")
        return f"it is not a {kind} that ramen wrote ({MANIFEST}: {why})"
    except OSError as error:
        return f"it cannot be read ({os_error_text(error)})"
    return ""


def _contents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Relative name and path of everything under a folder that is not a real directory."""
    for root, folders, files in os.walk(folder, onerror=_raise):
        for name in [*files, *(each for each in folders if (Path(root) / each).is_symlink())]:
            file = Path(root) / name
            yield file.relative_to(folder).as_posix(), file


def _raise(error: OSError) -> None:
    raise error


def is_as_listed(file: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a file has the size, and unless it is large the sha256, that a manifest lists."""
    if not file.is_file() or file.stat().st_size != facts["bytes"]:
        return False
    return bool(facts["bytes"] > HASHED_BYTES) or sha256(file) == facts["sha256"]


def delete_artifact(place: Path, kind: str) -> bool:
    """Delete an artifact; False, and nothing is deleted, if it holds anything that ramen did not write.

    The manifest goes last, so that what a kill leaves is still known to be an artifact.
    """
    if place.is_symlink() or foreign_content(place, kind):
        return False
    if not place.is_dir():
        return True
    for name, file in _contents(place):
        if name != MANIFEST:
            file.unlink(missing_ok=True)
    (place / MANIFEST).unlink(missing_ok=True)
    for root, _, _ in os.walk(place, topdown=False):
        with suppress(OSError):  # a file was added meanwhile
            Path(root).rmdir()
    return True


def abandoned_drafts(parent: Path, names: Sequence[str]) -> list[Path]:
    """Drafts of artifacts that killed processes left in a folder: minutes old and held by nobody."""
    return [draft for name in names for draft in _hidden(parent, name, "tmp") if _abandoned(draft)]


def _hidden(parent: Path, name: str, suffix: str) -> list[Path]:
    """Directories next to an output that are named as `_beside` names them."""
    form = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.{suffix}")
    found = sorted(parent.glob(f".{glob.escape(name)}.*.{suffix}"))
    return [path for path in found if form.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _abandoned(draft: Path) -> bool:
    with suppress(OSError):  # gone meanwhile
        if time.time() - draft.stat().st_mtime < FRESH or not (draft / DRAFT_MARKER).is_file():
            return False
        handle = os.open(draft, os.O_RDONLY)
        try:
            return _lock(handle)
        finally:
            os.close(handle)
    return False


def _sweep(parent: Path, name: str, kind: str) -> None:
    """Remove drafts of an output that killed processes left: those that are minutes old and that nobody holds.

    An output that was moved aside by a process killed before it had put the new one there is put back.
    """
    for left in _hidden(parent, name, "old"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < FRESH:
                continue
            if not os.path.lexists(parent / name) and (left / ASIDE).is_dir():
                os.rename(left / ASIDE, parent / name)
            if not (left / ASIDE).exists() or delete_artifact(left / ASIDE, kind):
                left.rmdir()  # fails if anything else is there
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
    """Rename a directory into place; an older one is moved aside first (rename cannot replace a full directory).

    The older one was checked before the stage began. What was added to it since, hours for a training, is kept.
    """
    target = target.absolute()
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        os.rename(source, target)
        return
    aside = _beside(target, ".old")
    aside.mkdir()
    try:
        os.rename(target, aside / ASIDE)
    except OSError:
        aside.rmdir()
        raise
    os.rename(source, target)
    with suppress(OSError):  # the new artifact is in place; what is left here is swept by the next run
        if (aside / ASIDE).is_dir() and delete_artifact(aside / ASIDE, kind) and not (aside / ASIDE).exists():
            aside.rmdir()
            return
        kept = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
        os.rename(aside / ASIDE, kept)
        aside.rmdir()
        warn(f"{target}: files that ramen did not write were added while the stage ran; they are in {kept}")


def check_writable(place: Path, what: str = "", remedy: str = "choose another path") -> None:
    """Refuse a path that a file or directory cannot be written to: its nearest existing folder is tried.

    Args:
        place: the path; what is there is not touched.
        what: what the message begins with, such as an option's name and a space.
        remedy: what the message ends with.

    Raises:
        ArtifactError: it cannot; the message says why.
    """
    there = next((folder for folder in place.absolute().parents if os.path.lexists(folder)), Path("/"))
    long = [part for part in place.parts if len(os.fsencode(part)) > LONGEST_NAME]
    try:
        if long:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a directory")
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        said = error.strerror or str(error)
        raise ArtifactError(f"{what}{place}: cannot be written ({said}); {remedy}") from None


def check_room(needed: Mapping[Path, int]) -> None:
    """Refuse outputs for which their disks have no room.

    Args:
        needed: output -> bytes that it takes at least.

    Raises:
        ArtifactError: a disk has less free space than its outputs take.
    """
    of_disk: dict[int, tuple[Path, int]] = {}
    for place, size in needed.items():
        there = next((folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists()), Path("/"))
        first, known = of_disk.get(there.stat().st_dev, (there, 0))
        of_disk[there.stat().st_dev] = (first, known + size)
    for there, size in of_disk.values():
        if (free := shutil.disk_usage(there).free) < size:
            raise ArtifactError(
                f"{there}: {free / 1e6:,.0f} MB free on its disk, expected at least {size / 1e6:,.0f} MB; free some "
                "space, or choose another place"
            )


def failed_io(error: BaseException) -> str:
    """One line about an error of the file system (no space, read-only, missing), empty for any other error.

    It names what was to be written, not the file beside it.
    """
    if isinstance(error, OSError) and (error.filename or error.errno):
        return os_error_text(error)
    if type(error).__module__.partition(".")[0] in WRITERS:
        said = re.sub(r"^.*I/O error: | \(os error \d+\)", "", str(error).strip().splitlines()[0])
        return BESIDE.sub(r"\1", said)
    return ""


def os_error_text(error: OSError) -> str:
    """Return `path: what went wrong` of an operating system's error, or only what went wrong where it names no path."""
    said = error.strerror or str(error).strip().partition("\n")[0] or type(error).__name__
    said = re.sub(r"^\[[Ee]rrno \d+\] ", "", said)
    if isinstance(error, FileExistsError) and error.filename and Path(error.filename).is_file():
        said = "is a file, expected a directory"
    if "[errno" in said.lower():  # pyarrow repeats the system's error at the end of its own
        said = os.strerror(error.errno) if error.errno else said
    if error.filename is None:
        return BESIDE.sub(r"\1", said)
    place = BESIDE.sub(r"\1", os.fsdecode(error.filename))
    return f"{place}: {said}"


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """Give an error of the file system that names no path (a full disk during a write) the path being written."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(place)
        raise


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
        with naming(path):
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


# --- reading what may be damaged or foreign ------------------------------------------------------------------

RERUN = "run the stage that wrote it again"


@contextmanager
def reading(file: Path, remedy: str = RERUN) -> Iterator[None]:
    """Turn every error that the content of a file causes while it is read into one line that names the file.

    Raises:
        ArtifactError: the file is missing, cannot be read, or is not what its reader expects.
    """
    try:
        yield
    except ArtifactError:
        raise
    except FileNotFoundError:
        raise ArtifactError(f"{file}: missing; {remedy}") from None
    except OSError as error:
        said = error.strerror or str(error).strip().partition("\n")[0]
        raise ArtifactError(f"{file}: cannot be read ({shown(said)}); {remedy}") from None
    except MemoryError:
        raise ArtifactError(f"{file}: needs more memory than there is; it may be damaged: {remedy}") from None
    except Exception as error:  # parsers raise anything, from KeyError to zipfile's own classes
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ArtifactError(f"{file}: cannot be read ({shown(said)}); {remedy}") from None


def read_json(file: Path, form: Any = Any, *, remedy: str = RERUN) -> Any:
    """Read a JSON file of an artifact and check its form.

    Args:
        file: the file, in UTF-8.
        form: a type that pydantic checks strictly, such as `dict[str, float]`.
        remedy: what to do about a broken file.

    Raises:
        ArtifactError: missing, too large, not valid JSON, or of another form.
    """
    from pydantic_core import from_json

    with reading(file, remedy):
        if not stat.S_ISREG((found := file.stat()).st_mode):  # a pipe or a device may never end
            raise ArtifactError(f"{file}: is not a file; {remedy}")
        if (size := found.st_size) > JSON_BYTES:
            raise ArtifactError(f"{file}: {size:,} bytes, expected at most {JSON_BYTES:,}; {remedy}")
        data = file.read_bytes()
    try:
        value = from_json(data)
    except ValueError as error:
        raise ArtifactError(f"{file}: not valid JSON ({shown(error)}); {remedy}") from None
    return checked(value, form, str(file), remedy)


def checked(value: Any, form: Any, where: str, remedy: str = RERUN) -> Any:
    """Return a value of the form that is expected.

    Args:
        value: as read from JSON.
        form: a type that pydantic checks strictly.
        where: the file, and the key in it.
        remedy: what to do about a broken file.

    Raises:
        ArtifactError: it is of another form; the first difference is reported.
    """
    from pydantic import TypeAdapter, ValidationError

    if form is Any:
        return value
    try:
        return TypeAdapter(form).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"{shown(part)}: " for part in first["loc"])
        said = "missing" if first["type"] == "missing" else first["msg"][:1].lower() + first["msg"][1:]
        raise ArtifactError(f"{where}: {place}{said}; {remedy}") from None


def shown(value: object) -> str:
    """A value from a foreign file as it is printed: short, on one line, without control characters."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value)[:200])
    return text if len(text) <= 120 else f"{text[:117]}..."


def read_arrays(file: Path, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the arrays of an .npz file that numpy wrote uncompressed; nothing is unpickled.

    Args:
        file: the archive.
        names: arrays that must be there; None = any.

    Raises:
        ArtifactError: missing, damaged, compressed (it could unpack to any size), or without one of `names`.
    """
    import zipfile

    import numpy as np

    with reading(file):
        with zipfile.ZipFile(file) as archive:
            if packed := [each.filename for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]:
                raise ArtifactError(f"{file}: {shown(packed[0])} is compressed, expected stored arrays; {RERUN}")
        with np.load(file, allow_pickle=False) as content:
            found = {name: content[name] for name in content.files}
    for name in names or ():
        if name not in found:
            raise ArtifactError(f"{file}: has no array {name!r}; {RERUN}")
    return found


def read_array(file: Path, kinds: str, shape: tuple[int | None, ...], *, mapped: bool = False) -> Any:
    """Read an .npy file; nothing is unpickled.

    Args:
        file: the file.
        kinds: numpy's letters of the kinds of values allowed, such as "iu".
        shape: expected sizes; None = any.
        mapped: whether rows are read from the disk when they are used.

    Raises:
        ArtifactError: missing, damaged, or of other values or another shape.
    """
    import numpy as np

    with reading(file):
        array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
        fits = len(shape) == array.ndim and all(
            size in (None, there) for size, there in zip(shape, array.shape, strict=True)
        )
        if array.dtype.kind not in kinds or not fits:
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            raise ArtifactError(
                f"{file}: holds {array.dtype} of shape {array.shape}, expected {wanted} values of kind {kinds!r}; "
                f"{RERUN}"
            )
        return array


def read_tensors(file: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Read the arrays of a safetensors file as numpy arrays.

    Raises:
        ArtifactError: missing, damaged, or without one of `names`.
    """
    from safetensors.numpy import load_file

    with reading(file):
        found: dict[str, Any] = load_file(file)
    for name in names:
        if name not in found:
            raise ArtifactError(f"{file}: has no tensor {name!r}; {RERUN}")
    return found


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
    uids, texts = _read_strings(path, ("uid", "text"))
    return uids, texts


def _read_strings(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Columns of strings of a Parquet file. Raises ArtifactError for another type, or for missing values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path):
        table = pq.ParquetFile(path).read(columns=list(columns))
        for name in columns:
            if name not in table.column_names:
                raise ArtifactError(f"{path}: has no column {name!r}; {RERUN}")
            if not pa.types.is_string(table[name].type) or table[name].null_count:
                raise ArtifactError(f"{path}: column {name!r} does not hold a string in every row; {RERUN}")
        return [table[name].to_pylist() for name in columns]


def read_titles(path: Path) -> list[str] | None:
    """Read the titles written by `write_texts`, None if there are none."""
    import pyarrow.parquet as pq

    with reading(path):
        if "title" not in pq.read_schema(path).names:
            return None
    return _read_strings(path, ("title",))[0]


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


def read_csr(path: Path, shape: tuple[int | None, int | None] = (None, None)) -> Any:
    """Read a scipy CSR matrix (`scipy.sparse.csr_matrix`) written by `write_csr`.

    Args:
        path: the .npz file.
        shape: expected rows and columns; None = any.

    Raises:
        ArtifactError: missing, damaged, of another shape, or with indices outside of it.
    """
    import scipy.sparse as sp

    arrays = read_arrays(path, ("data", "indices", "indptr", "shape"))
    found = edges_of(path, arrays, "data", shape)
    with reading(path):
        return sp.csr_matrix((arrays["data"], arrays["indices"], arrays["indptr"]), shape=found)


def edges_of(
    path: Path, arrays: Mapping[str, Any], values: str, shape: tuple[int | None, int | None] = (None, None)
) -> tuple[int, int]:
    """Check arrays in CSR order: finite values, rows that ascend, indices inside the shape; returns the shape.

    Args:
        path: the file that they were read from.
        arrays: `indptr`, `indices`, `shape`, and the values.
        values: name of the values.
        shape: expected rows and columns; None = any.

    Raises:
        ArtifactError: one of these does not hold.
    """
    import numpy as np

    def refuse(what: str) -> ArtifactError:
        return ArtifactError(f"{path}: {what}; {RERUN}")

    indptr, indices, numbers, size = (arrays[name] for name in ("indptr", "indices", values, "shape"))
    if size.dtype.kind not in "iu" or size.shape != (2,) or (size < 0).any():
        raise refuse("its shape is not two numbers of at least 0")
    rows, columns = (int(each) for each in size)
    for each, wanted, what in ((rows, shape[0], "rows"), (columns, shape[1], "columns")):
        if wanted is not None and each != wanted:
            raise refuse(f"has {each:,} {what}, expected {wanted:,}")
    if indptr.dtype.kind not in "iu" or indptr.shape != (rows + 1,) or indices.dtype.kind not in "iu":
        raise refuse(f"indptr and indices are not those of {rows:,} rows")
    if indices.ndim != 1 or numbers.shape != indices.shape or numbers.dtype.kind not in "fiub":
        raise refuse("indices and values are not two lists of one length")
    if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        raise refuse("indptr does not ascend from 0 to the number of entries")
    if len(indices) and (indices.min() < 0 or indices.max() >= columns):
        raise refuse(f"an index is outside of {columns:,} columns")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise refuse("a value is not finite")
    return rows, columns
