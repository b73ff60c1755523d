"""Where a run comes from: version, host, git revision, data hashes, and the front that started it."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ramen.errors import ConfigError, warn
from ramen.yamlfile import read_yaml

ARM_ENV = "RAMEN_ARM"
"""Environment variable naming the variant ("ramen", "base") that a pipeline run is."""


def pipeline_key() -> str | None:
    """What the stages of one pipeline run share when nobody passed a parent on: a KFP run id or a DVC process."""
    if run := os.environ.get("KFP_RUN_ID"):
        return f"kfp:{run}"
    if os.environ.get("DVC_STAGE"):
        import psutil

        for process in psutil.Process().parents():
            with suppress(psutil.Error):  # another user's process does not tell its command
                if any(Path(part).name == "dvc" for part in process.cmdline()[:3]):
                    return f"dvc:{socket.gethostname()}:{process.pid}:{process.create_time():.0f}"
    return None


def dvc_project() -> Path | None:
    """Root of the project that this DVC experiment was started from; None outside a temporary workspace.

    `dvc exp run --temp` and `--queue` run in a copy of the project that is deleted afterwards. DVC_ROOT is the project.
    """
    here = Path.cwd()
    for folder in here.parents:
        if folder.parts[-3:] == (".dvc", "tmp", "exps"):
            return folder.parents[2]
    root = os.environ.get("DVC_ROOT")
    if os.environ.get("DVC_EXP_NAME") and root and not here.is_relative_to(Path(root).resolve()):
        return Path(root)
    return None


def provenance() -> dict[str, str]:
    """Tags every run carries: version, host, git revision, data and graph hashes, KFP and DVC context."""
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
    """md5 of the raw data (data.dvc) and of the graphs (dvc.lock), where these files are."""
    pointer, lock = _read_dvc(Path("data.dvc")), _read_dvc(Path("dvc.lock"))
    outs = {
        "dvc.data": _at(pointer, "outs", 0, "md5"),
        "dvc.graph": _at(lock, "stages", "build-graph", "outs", 0, "md5"),
    }
    return {key: str(value) for key, value in outs.items() if value}


def _read_dvc(path: Path) -> Any:
    """What a file of DVC holds, None where there is none or nothing that can be read."""
    if not path.is_file():
        return None
    try:
        return read_yaml(path)
    except (ConfigError, FileNotFoundError) as error:
        warn(f"{error}; the run is not tagged with the hashes of DVC")
        return None


def _at(tree: Any, *keys: str | int) -> Any:
    """The value under some keys of nested mappings and lists, None where the tree has another form."""
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
