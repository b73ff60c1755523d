"""DVC pointers: push an artifact to a DVC remote from a pod, and add its pointer to a repository later.

A pod has neither a checkout nor git. `push` streams an artifact to the DVC remote and returns the pointer, a few lines
of YAML that are tracked with the run. `adopt` writes such pointers into a repository, where `dvc pull` downloads
exactly those files. Access keys come from the environment (AWS_ACCESS_KEY_ID, ...) and are never written.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ramen.console import report, warn
from ramen.errors import ConfigError, RamenError
from ramen.redaction import strip_credentials
from ramen.yamlfile import parse_yaml

REMOTE_ENV = "RAMEN_DVC_REMOTE"
"""Environment variable with the URL of the DVC remote, such as s3://bucket/dvc; unset = nothing is pushed."""
ENDPOINT_ENV = "AWS_ENDPOINT_URL"
"""Environment variable with the address of an S3-compatible store (MinIO); the AWS SDK reads it too."""
DATA_ARTIFACTS = ("dataset", "graph", "pruned_graph")
"""Artifacts that are pushed; models and indexes belong to the model registry."""
POINTER_FOLDER = "dvc"
"""Folder of the pointers among the files of a tracked run."""
REMOTE_NAME = "ramen-cluster"
"""Name of the remote that `adopt` adds if the repository has none with the same URL."""


@dataclass(frozen=True)
class Pointer:
    """One artifact on a DVC remote.

    Attributes:
        name: artifact name.
        md5: DVC's hash of the folder.
        size: total size in bytes.
        files: number of files.
        remote: URL of the remote.
        endpoint: address of an S3-compatible store; empty = the provider's default.
    """

    name: str
    md5: str
    size: int
    files: int
    remote: str
    endpoint: str = ""

    def to_yaml(self) -> str:
        """Return the pointer as a DVC file with `meta.remote` and `meta.endpoint`, without credentials."""
        out = {"md5": self.md5, "size": self.size, "nfiles": self.files, "hash": "md5", "path": self.name}
        return yaml.safe_dump(
            {
                "outs": [out],
                "meta": {
                    "remote": strip_credentials(self.remote),
                    "endpoint": strip_credentials(self.endpoint),
                },
            },
            sort_keys=False,
        )

    @classmethod
    def from_yaml(cls, text: str) -> Pointer:
        """Read a pointer written by `to_yaml`. Raises RamenError for anything else."""
        try:
            tree = parse_yaml(text, "pointer")
            out, meta = tree["outs"][0], tree["meta"]
            remote, endpoint = meta["remote"], meta.get("endpoint") or ""
            pointer = cls(out["path"], out["md5"], out["size"], out["nfiles"], remote, endpoint)
            # the name becomes a file name, and anyone with access to the tracking store can write a pointer
            valid = (
                pointer.name in DATA_ARTIFACTS
                and re.fullmatch(r"[0-9a-f]{32}(\.dir)?", pointer.md5)
                and isinstance(pointer.remote, str)
            )
            if not valid or not all(type(count) is int for count in (pointer.size, pointer.files)):
                raise ValueError
        except (ConfigError, LookupError, TypeError, ValueError, AttributeError):
            raise RamenError("not a DVC pointer of a ramen run; push the artifact again") from None
        return pointer


def push(path: Path, name: str, remote: str, endpoint: str = "") -> Pointer:
    """Stream a folder to a DVC remote, without a local cache; files that the remote already has are not sent again.

    Args:
        path: finished artifact.
        name: artifact name.
        remote: URL of the remote.
        endpoint: address of an S3-compatible store; empty = the provider's default.

    Raises:
        RamenError: the push failed.
    """
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="ramen-dvc-") as scratch:
        try:
            with Repo.init(scratch, no_scm=True) as repo:
                with repo.config.edit() as config:
                    config["core"] = {"remote": "push", "analytics": False, "check_update": False}
                    config["remote"]["push"] = _remote_settings(remote, endpoint)
                output = repo.add([str(path.absolute())], out=str(Path(scratch) / name), to_remote=True)[0].outs[0]
        except Exception as error:  # of DVC, the object store's client, or the system (a user without a name)
            raise RamenError(f"DVC remote {remote}: {name} cannot be pushed ({_first_cause(error)})") from error
        return Pointer(name, output.hash_info.value, output.meta.size, output.meta.nfiles, remote, endpoint)


def push_outputs(paths: Mapping[str, Path], track: Any) -> None:
    """Push the data outputs of a finished stage and track their pointers with the run.

    Does nothing unless `RAMEN_DVC_REMOTE` is set. A failed push is a warning and the tag `dvc.error`, not an error: the
    artifact itself is in the pipeline's store, and hours of training should not be lost.

    Args:
        paths: artifact name -> folder.
        track: the stage's tracker.
    """
    remote = os.environ.get(REMOTE_ENV, "")
    for name, path in paths.items():
        if not remote or name not in DATA_ARTIFACTS:
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
            track.artifact(file, POINTER_FOLDER)
        report(f"pushed {name} to {remote}: {pointer.files} files, {pointer.size:,} bytes")


def adopt(pointers: Iterable[Pointer], folder: Path) -> list[Path]:
    """Write pointers into a DVC repository, each with its remote, which is added if it is missing.

    Args:
        pointers: pointers of a run.
        folder: inside the repository; created if missing.

    Returns:
        The `.dvc` files, ready for `dvc pull` and git.

    Raises:
        RamenError: the folder is not in a DVC repository, or contains another pointer of the same name.
    """
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    existing = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path())
    try:
        repo = Repo(Repo.find_root(str(existing)))
    except NotDvcRepoError:
        raise RamenError(
            f"{folder}: not in a DVC repository; run the command in a checkout, or run `dvc init` first"
        ) from None
    texts: dict[Path, str] = {}
    try:
        for pointer in pointers:
            out = {
                "md5": pointer.md5, "size": pointer.size, "nfiles": pointer.files, "hash": "md5",
                "path": pointer.name, "remote": _remote_name(repo, pointer),
            }  # fmt: skip
            texts[folder / f"{pointer.name}.dvc"] = yaml.safe_dump({"outs": [out]}, sort_keys=False)
    finally:
        repo.close()
    for path, text in texts.items():
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise RamenError(f"{path}: contains another version; give another --to, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    ignored = {f"/{path.stem}" for path in texts}
    if (ignore := folder / ".gitignore").is_file():
        ignored |= set(ignore.read_text(encoding="utf-8").split())
    ignore.write_text("\n".join(sorted(ignored)) + "\n", encoding="utf-8")
    return list(texts)


def _remote_name(repo: Any, pointer: Pointer) -> str:
    """Return the name of the repository's remote with the pointer's URL; add one if there is none."""
    wanted = _remote_settings(pointer.remote, pointer.endpoint)
    remotes: Mapping[str, Mapping[str, Any]] = repo.config.get("remote", {})
    for name, settings in remotes.items():
        if str(settings.get("url", "")).rstrip("/") == wanted["url"].rstrip("/"):
            return name
    name, number = REMOTE_NAME, 1
    while name in remotes:
        number += 1
        name = f"{REMOTE_NAME}-{number}"
    with repo.config.edit("repo") as config:
        config["remote"][name] = wanted
    return name


def _remote_settings(url: str, endpoint: str) -> dict[str, str]:
    return {"url": url} | ({"endpointurl": endpoint} if endpoint and url.startswith("s3://") else {})


def _first_cause(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
