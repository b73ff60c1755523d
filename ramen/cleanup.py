"""`ramen gc`: find and delete files that no finished or resumable run needs.

These are the training state of warm models, which only `prune-retrain` reads, results of the local runner that a later
run replaced, and drafts of killed processes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramen.artifacts import (
    DISPOSABLE,
    DRAFT_GRACE_S,
    DRAFT_MARKER,
    KINDS,
    MANIFEST,
    abandoned_drafts,
    delete_artifact,
    foreign_content,
    is_as_listed,
    read_manifest,
)
from ramen.errors import ArtifactError, RamenError
from ramen.files import read_json, sha256
from ramen.stages import STAGES
from ramen.workdir import inputs_in_use

RECORDS = {"scalars", "report", "executor_output.json", "metrics.json", "seconds.json"}
"""Files of Kubeflow's local runner or of a study next to a stage's artifacts."""
_CacheEntry = dict[str, dict[str, Any]]
"""Entry of the runner's cache: output -> facts about it."""


@dataclass(frozen=True)
class Removal:
    """A file or folder that is not needed.

    Attributes:
        path: the file or folder.
        bytes: its size.
        reason: why it is not needed.
    """

    path: Path
    bytes: int
    reason: str


def find_unneeded(out: Path, runs: Path, studies: Path, *, unfinished: bool = False) -> list[Removal]:
    """List what can be deleted, without anything that a link under `out`, a checkpoint or an unfinished run needs.

    Results that contain a file which ramen did not write are not listed.

    Args:
        out: `--out` of `ramen run`: a folder per variant, with a link per artifact.
        runs: folder of the local runner: `<run>/<stage>/<artifact>` and `cache/*.json`.
        studies: `--out` of `ramen ablate`; only training state and drafts are listed there.
        unfinished: also list results of unfinished runs, unless a checkpoint needs them.

    Raises:
        RamenError: neither folder was written by ramen, or a run is in progress.
    """
    run_folders = [run for run in sorted(runs.glob("ramen-*")) if run.is_dir() and not run.is_symlink()]
    results = [path for run in run_folders for path in sorted(run.iterdir()) if _is_result(path)]
    rows = [path for path in sorted((studies / "cache").glob("*-*")) if _is_result(path, path.name.rpartition("-")[0])]
    if not results and not rows:
        raise RamenError(f"{out}: no results of `ramen run` or `ramen ablate` ({studies}); give --out or --studies")
    for run in run_folders:
        if not _finished(run) and _in_progress(run):
            raise RamenError(f"{run}: a run is in progress, or was killed a minute ago; wait for it to end")
    in_use = inputs_in_use()
    linked = _linked_artifacts(out)
    replaced = {
        path: reason for path in results if (reason := _removal_reason(path, linked, in_use, unfinished)) is not None
    }
    removals = [Removal(path, _size(path), reason) for path, reason in replaced.items()]
    kept = [path for path in (*results, *rows) if path not in replaced]
    for path in kept:
        for draft in abandoned_drafts(path, list(STAGES[_stage_of(path)].writes)):
            removals.append(Removal(draft, _size(draft), "draft of a process that was killed"))
    return removals + list(_training_state(kept, in_use))


def delete_removals(removals: Sequence[Removal], runs: Path) -> None:
    """Delete what `find_unneeded` listed, and the cache entries that refer to it."""
    for removal in removals:
        if _is_draft(removal.path):
            shutil.rmtree(removal.path)
        elif removal.path.is_dir():
            # first the cache entries: if this process is killed, none may refer to half a result
            prefix = f"{removal.path.absolute()}/"
            for entry in filter(Path.is_file, runs.glob("cache/*.json")):
                text = entry.read_bytes()
                if os.fsencode(prefix) in text or json.dumps(prefix)[1:-1].encode() in text:
                    entry.unlink(missing_ok=True)
            _delete_result(removal.path)
            if removal.path.parent.parent == runs:
                with suppress(OSError):  # not empty
                    removal.path.parent.rmdir()
        else:
            removal.path.unlink(missing_ok=True)


def _delete_result(result: Path) -> None:
    """Delete what the stage and the runner wrote; files added in the meantime stay."""
    for path in list(result.iterdir()):
        if path.name in STAGES[_stage_of(result)].writes:
            delete_artifact(path, KINDS[path.name])
        elif _is_draft(path):
            shutil.rmtree(path)
        elif path.name in RECORDS and path.is_file():
            path.unlink()
    with suppress(OSError):
        result.rmdir()


def drop_cached_result(runs: Path, error: str) -> str:
    """Delete the cache entry of a result that an error reports as damaged or incomplete.

    Args:
        runs: folder of the local runner.
        error: message of the stage that read the result.

    Returns:
        The stage that wrote the result; "" if there is no such entry.
    """
    stage = ""
    for entry in runs.glob("cache/*.json"):
        with suppress(ArtifactError):
            for name, facts in read_json(entry, _CacheEntry).items():
                uri = str(facts.get("uri", ""))
                if uri and (f"{uri}: " in error or f"{uri}/" in error):
                    entry.unlink(missing_ok=True)
                    stage = next((each.name for each in STAGES.values() if name in each.writes), stage)
    return stage


def _stage_of(result: Path) -> str:
    """Return the stage of a result of the runner (`<stage>`) or of a study (`<stage>-<key>`)."""
    return result.name if result.name in STAGES else result.name.rpartition("-")[0]


def _is_draft(path: Path) -> bool:
    """Whether a folder is a draft of an artifact."""
    has_draft_name = path.name.startswith(".") and path.suffix == ".tmp"
    return has_draft_name and not path.is_symlink() and (path / DRAFT_MARKER).is_file()


def _is_result(path: Path, stage: str = "") -> bool:
    """Whether a folder contains only a stage's outputs, its drafts and records of the runner or a study."""
    stage = stage or path.name
    if stage not in STAGES or not path.is_dir() or path.is_symlink():
        return False
    return all(
        each.is_dir() and not each.is_symlink()
        if each.name in STAGES[stage].writes
        else (each.name in RECORDS and each.is_file()) or _is_draft(each)
        for each in path.iterdir()
    )


def _manifests(result: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the artifacts of a result with their manifests, if these can be read."""
    for name in STAGES[_stage_of(result)].writes:
        with suppress(ArtifactError):
            yield result / name, read_manifest(result / name, name)


def _linked_artifacts(out: Path) -> set[Path] | None:
    """Return the artifacts that links under `out` point to and the `scoring.base` of each; None without links."""
    linked = {Path(os.path.realpath(link)) for link in out.glob("*/*") if link.is_symlink()}
    if not linked:
        return None
    for artifact in list(linked):
        if artifact.name == "evaluation" and (artifact / MANIFEST).exists():
            scoring = read_manifest(artifact, "evaluation")["sections"].get("scoring", {})
            if scoring.get("base"):
                with suppress(ValueError):  # not a path, such as text with \0
                    linked.add(Path(os.path.realpath(str(scoring["base"]))))
    return linked


def _removal_reason(result: Path, linked: set[Path] | None, in_use: set[str], unfinished: bool) -> str | None:
    """Return why a result of the local runner is not needed; None if it is or may be needed."""
    finished = _finished(result.parent)
    if linked is None or not (finished or unfinished):
        return None
    artifacts = [artifact for artifact, _ in _manifests(result)]
    if any(artifact.resolve() in linked or sha256(artifact / MANIFEST) in in_use for artifact in artifacts):
        return None
    names = (name for name in STAGES[_stage_of(result)].writes if os.path.lexists(result / name))
    if any(foreign_content(result / name, KINDS[name]) for name in names):
        return None
    return "replaced by a later run" if finished else "result of an unfinished run"


def _finished(run: Path) -> bool:
    """Whether a run finished its last stage, which never comes from the cache."""
    return (run / "publish-index" / "retriever" / MANIFEST).is_file()


def _in_progress(run: Path) -> bool:
    """Whether a process holds a draft in a run's folder, or wrote there within the last two minutes."""
    for result in run.iterdir():
        drafts = set(result.glob(".*.tmp")) if result.is_dir() else set()
        if drafts - set(abandoned_drafts(result, list(KINDS))) or time.time() - result.stat().st_mtime < DRAFT_GRACE_S:
            return True
    return False


def _training_state(results: Sequence[Path], in_use: set[str]) -> Iterator[Removal]:
    """Yield the training state of warm models whose `prune-retrain` has finished."""
    manifests = [pair for result in results for pair in _manifests(result)]
    retrained = {manifest["inputs"].get("warm_model") for artifact, manifest in manifests if artifact.name == "model"}
    for artifact, manifest in manifests:
        digest = sha256(artifact / MANIFEST)
        if artifact.name == "warm_model" and digest in retrained and digest not in in_use:
            for name in sorted(DISPOSABLE & manifest["files"].keys()):
                if is_as_listed(file := artifact / name, manifest["files"][name]):
                    yield Removal(file, file.stat().st_size, "training state; prune-retrain has finished")


def _size(path: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
