"""Tags that record where a run comes from: version, host, git revision, data hashes, KFP and DVC context."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ramen.console import warn
from ramen.errors import ConfigError
from ramen.yamlfile import read_yaml

ARM_ENV = "RAMEN_ARM"
"""Environment variable with the variant of a pipeline run ("ramen" or "base")."""


def pipeline_key() -> str | None:
    """Return a key that the stages of one pipeline run share if no parent run was passed: KFP run id or DVC process."""
    if run := os.environ.get("KFP_RUN_ID"):
        return f"kfp:{run}"
    if os.environ.get("DVC_STAGE"):
        import psutil

        for process in psutil.Process().parents():
            with suppress(psutil.Error):  # the command line of another user's process is hidden
                if any(Path(part).name == "dvc" for part in process.cmdline()[:3]):
                    return f"dvc:{socket.gethostname()}:{process.pid}:{process.create_time():.0f}"
    return None


def dvc_project() -> Path | None:
    """Return the project root of a DVC experiment in a temporary workspace, None outside of one.

    `dvc exp run --temp` and `--queue` run in a copy of the project that is deleted afterwards.
    """
    workspace = Path.cwd()
    for folder in workspace.parents:
        if folder.parts[-3:] == (".dvc", "tmp", "exps"):
            return folder.parents[2]
    root = os.environ.get("DVC_ROOT")
    if os.environ.get("DVC_EXP_NAME") and root and not workspace.is_relative_to(Path(root).resolve()):
        return Path(root)
    return None


def provenance_tags() -> dict[str, str]:
    """Return the tags of every run: version, host, git revision, data and graph hashes, KFP and DVC context."""
    import ramen

    tags = {"ramen.version": ramen.__version__, "ramen.host": socket.gethostname()}
    revision = os.environ.get("RAMEN_GIT_SHA") or _git("rev-parse", "HEAD")
    if revision:
        tags["mlflow.source.git.commit"] = revision
        if "RAMEN_GIT_SHA" not in os.environ:
            tags["ramen.git.dirty"] = str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower()
    environment = {
        ARM_ENV: "ramen.arm",
        "KFP_RUN_ID": "kfp.run_id",
        "DVC_STAGE": "dvc.stage",
        "DVC_EXP_NAME": "dvc.exp",
    }
    tags |= {tag: os.environ[name] for name, tag in environment.items() if os.environ.get(name)}
    return tags | _dvc_hashes()


def _dvc_hashes() -> dict[str, str]:
    """Return the md5 of the raw data (from data.dvc) and of the graphs (from dvc.lock), as far as known."""
    pointer, lock = _read_dvc(Path("data.dvc")), _read_dvc(Path("dvc.lock"))
    outs = {
        "dvc.data": _lookup(pointer, "outs", 0, "md5"),
        "dvc.graph": _lookup(lock, "stages", "build-graph", "outs", 0, "md5"),
    }
    return {key: str(value) for key, value in outs.items() if value}


def _read_dvc(path: Path) -> Any:
    """Return the content of a DVC file, None if it is missing or cannot be read."""
    if not path.is_file():
        return None
    try:
        return read_yaml(path)
    except (ConfigError, FileNotFoundError) as error:
        warn(f"{error}; the run is not tagged with DVC hashes")
        return None


def _lookup(tree: Any, *keys: str | int) -> Any:
    """Return the value at a path of keys in nested mappings and lists, None if the path does not exist."""
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _git(*arguments: str) -> str:
    """Return the output of a git command, "" if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
