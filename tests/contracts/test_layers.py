"""Import contracts in pyproject.toml: they hold, and they refuse forbidden imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).parent


def run_import_linter(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [str(PROGRAM / "lint-imports"), "--no-cache", "--config", str(folder / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("ramen", "components", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_hold() -> None:
    done = run_import_linter(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ramen/config/knobs.py", "import ramen.stages"),
        ("ramen/stages.py", "import ramen.training.stage"),
        ("ramen/graph/walk.py", "import ramen.graph.stage"),
        ("ramen/graph/walk.py", "import ramen.encoder.model"),
        ("ramen/evaluation/metrics.py", "import ramen.objective"),
        ("ramen/encoder/model.py", "import ramen.training.trainer"),
        ("ramen/training/trainer.py", "import mlflow"),
        ("ramen/index/build.py", "import kfp"),
    ],
)
def test_forbidden_import_is_refused(module: str, line: str, copy: Path) -> None:
    path = copy / module
    path.write_text(path.read_text() + f"\n\ndef planted() -> None:\n    {line}\n")
    done = run_import_linter(copy)
    assert done.returncode == 1 and "BROKEN" in done.stdout


@pytest.mark.parametrize(
    "module", ["ramen/cli/common.py", "ramen/config/knobs.py", "ramen/stages.py", "ramen/tracking/runs.py"]
)
def test_heavy_import_at_module_level_is_refused(module: str) -> None:
    command = [str(PROGRAM / "ruff"), "check", "--select", "TID253", "--stdin-filename", module, "-"]
    for source, code in (("import torch\n", 1), ("def f():\n    import torch\n", 0)):
        done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True)
        assert done.returncode == code, done.stdout
