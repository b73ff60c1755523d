"""DVC from a pod: push an artifact to the remote without git, and take its pointer into a repository later.

A pod has neither a checkout nor git. `push` streams an artifact to the DVC remote and returns the pointer, five lines
of YAML that the tracker keeps with the run; `adopt` writes such pointers into a repository, where `dvc pull` brings
exactly those files. Access keys come from the environment (AWS_ACCESS_KEY_ID, ...) and are written nowhere.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ramen.console import warn
from ramen.errors import ConfigError, RamenError
from ramen.redaction import redact, without_credentials
from ramen.yamlfile import parse_yaml

REMOTE_ENV = "RAMEN_DVC_REMOTE"
"""URL of the DVC remote that pods push to, such as s3://bucket/dvc; unset = nothing is pushed."""
ENDPOINT_ENV = "AWS_ENDPOINT_URL"
"""Address of an S3-compatible store (MinIO); the AWS SDK reads it too."""
PUSHED = ("dataset", "graph", "pruned_graph")
"""Artifacts that are data, and belong to DVC; models and indexes belong to the registry."""
FOLDER = "dvc"
"""Where the tracker keeps the pointers of a run."""
ADOPTED = "ramen-cluster"
"""Name of the remote that `adopt` adds when the repository has none of the same URL."""


@dataclass(frozen=True)
class Pointer:
    """One artifact on a DVC remote.

    Attributes:
        name: of the artifact.
        md5: DVC's hash of the folder.
        size, files: bytes and number of files.
        remote: URL of the remote.
        endpoint: address of an S3-compatible store; empty = the provider's own.
    """

    name: str
    md5: str
    size: int
    files: int
    remote: str
    endpoint: str = ""

    def to_yaml(self) -> str:
        """The pointer as the tracker keeps it: a DVC file with two more keys under `meta`, without credentials."""
        out = {"md5": self.md5, "size": self.size, "nfiles": self.files, "hash": "md5", "path": self.name}
        return yaml.safe_dump(
            {
                "outs": [out],
                "meta": {
                    "remote": without_credentials(self.remote),
                    "endpoint": without_credentials(self.endpoint),
                },
            },
            sort_keys=False,
        )

    @classmethod
    def from_yaml(cls, text: str) -> Pointer:
        """Read what `to_yaml` wrote. Raises RamenError when it is something else."""
        try:
            tree = parse_yaml(text, "pointer")
            out, meta = tree["outs"][0], tree["meta"]
            found = cls(out["path"], out["md5"], out["size"], out["nfiles"], meta["remote"], meta.get("endpoint") or "")
            # the name becomes a file's: anybody who may write to the store may write a pointer
            valid = (
                found.name in PUSHED
                and re.fullmatch(r"[0-9a-f]{32}(\.dir)?", found.md5)
                and isinstance(found.remote, str)
            )
            if not valid or not all(type(count) is int for count in (found.size, found.files)):
                raise ValueError
        except (ConfigError, LookupError, TypeError, ValueError, AttributeError):
            raise RamenError("not a DVC pointer of a ramen run; push the artifact again") from None
        return found


def push(path: Path, name: str, remote: str, endpoint: str = "") -> Pointer:
    """Stream a folder to a DVC remote; nothing is cached here, and files that are there already are not sent again.

    Args:
        path: finished artifact.
        name: what it is called in the pointer.
        remote: URL of the remote.
        endpoint: address of an S3-compatible store; empty = the provider's own.

    Raises:
        RamenError: the remote cannot be written.
    """
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="ramen-dvc-") as scratch:
        try:
            with Repo.init(scratch, no_scm=True) as repo:
                with repo.config.edit() as config:
                    config["core"] = {"remote": "push", "analytics": False, "check_update": False}
                    config["remote"]["push"] = _remote(remote, endpoint)
                found = repo.add([str(path.absolute())], out=str(Path(scratch) / name), to_remote=True)[0].outs[0]
        except Exception as error:  # DVC's own, the object store's client's, and whatever the machine has not
            raise RamenError(f"DVC remote {remote}: {name} cannot be pushed ({_innermost(error)})") from error
        return Pointer(name, found.hash_info.value, found.meta.size, found.meta.nfiles, remote, endpoint)


def push_outputs(paths: Mapping[str, Path], track: Any) -> None:
    """After a stage: push those of its outputs that belong to DVC, and keep the pointers with the run.

    Does nothing unless `RAMEN_DVC_REMOTE` is set. A remote that cannot be written costs a warning and the tag
    `dvc.error`, not hours of training: the artifact itself is in the pipeline's store.

    Args:
        paths: artifact name -> folder.
        track: the stage's tracker.
    """
    remote = os.environ.get(REMOTE_ENV, "")
    for name, path in paths.items():
        if not remote or name not in PUSHED:
            continue
        try:
            pointer = push(path, name, remote, os.environ.get(ENDPOINT_ENV, ""))
        except RamenError as error:
            warn(error)
            track.tags({"dvc.error": str(error)[:500]})
            continue
        track.tags({f"dvc.{name}": pointer.md5})
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / f"{name}.dvc"
            file.write_text(pointer.to_yaml(), encoding="utf-8")
            track.artifact(file, FOLDER)
        place = redact(remote)
        print(f"pushed {name} to {place}: {pointer.files} files, {pointer.size:,} bytes", file=sys.stderr, flush=True)


def adopt(pointers: Iterable[Pointer], folder: Path) -> list[Path]:
    """Write pointers into a DVC repository, each pinned to its remote, which is added where it is missing.

    Args:
        pointers: what a run pushed.
        folder: inside the repository; made if missing.

    Returns:
        The `.dvc` files, ready for `dvc pull` and for git.

    Raises:
        RamenError: the folder is in no DVC repository, or holds another pointer of the same name.
    """
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    existing = next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), Path())
    try:
        repo = Repo(Repo.find_root(str(existing)))
    except NotDvcRepoError:
        raise RamenError(f"{folder}: in no DVC repository; run it in a checkout, or `dvc init` first") from None
    texts: dict[Path, str] = {}
    try:
        for pointer in pointers:
            out = {
                "md5": pointer.md5, "size": pointer.size, "nfiles": pointer.files, "hash": "md5",
                "path": pointer.name, "remote": _named(repo, pointer),
            }  # fmt: skip
            texts[folder / f"{pointer.name}.dvc"] = yaml.safe_dump({"outs": [out]}, sort_keys=False)
    finally:
        repo.close()
    for path, text in texts.items():
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise RamenError(f"{path}: is another version already; give another --to, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    ignored = {f"/{path.stem}" for path in texts}
    if (ignore := folder / ".gitignore").is_file():
        ignored |= set(ignore.read_text(encoding="utf-8").split())
    ignore.write_text("\n".join(sorted(ignored)) + "\n", encoding="utf-8")
    return list(texts)


def _named(repo: Any, pointer: Pointer) -> str:
    """The repository's remote of the pointer's URL, added if there is none."""
    wanted = _remote(pointer.remote, pointer.endpoint)
    remotes: Mapping[str, Mapping[str, Any]] = repo.config.get("remote", {})
    for name, settings in remotes.items():
        if str(settings.get("url", "")).rstrip("/") == wanted["url"].rstrip("/"):
            return name
    name, number = ADOPTED, 1
    while name in remotes:
        number += 1
        name = f"{ADOPTED}-{number}"
    with repo.config.edit("repo") as config:
        config["remote"][name] = wanted
    return name


def _remote(url: str, endpoint: str) -> dict[str, str]:
    return {"url": url} | ({"endpointurl": endpoint} if endpoint and url.startswith("s3://") else {})


def _innermost(error: BaseException) -> str:
    """First line of the error that started it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
