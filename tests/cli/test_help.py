"""The help: every command under a title, with an example, and without heavy imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from ramen.cli import cli
from ramen.stages import STAGES

HEAVY = {"faiss", "great_expectations", "kfp", "matplotlib", "mlflow", "numpy", "pandas", "pydantic", "rich", "torch"}


def test_help_lists_every_command_under_its_title() -> None:
    text = CliRunner().invoke(cli, ["--help"], terminal_width=120, max_content_width=120).output
    listed: dict[str, list[str]] = {}
    for line in text.split("\n  Examples:")[0].splitlines():
        if line.endswith(":") and not line.startswith(" "):
            listed[line.rstrip(":")] = []
        elif line.startswith("  ") and line[2] != " " and listed:
            listed[list(listed)[-1]].append(line.split()[0])
    listed.pop("Options")
    assert listed == {
        "Pipeline": ["run", *STAGES],
        "Cluster": ["submit", "dvc-adopt", "tracking"],
        "Use": ["query", "serve", "compare", "ablate", "probe"],
        "Registry": ["registry", "promote", "rollback", "index-update"],
        "Project": ["fetch", "gc", "config", "compile", "sync"],
    }


@pytest.mark.parametrize("name", list(cli.commands))
def test_every_command_shows_an_example(name: str) -> None:
    text = CliRunner().invoke(cli, [name, "--help"], terminal_width=120, max_content_width=120).output
    assert f"  ramen {name}" in text.split("Example")[1]


@pytest.mark.parametrize("name", list(STAGES))
def test_stage_command_has_an_option_per_artifact(name: str) -> None:
    stage = STAGES[name]
    text = CliRunner().invoke(cli, [name, "--help"], terminal_width=120, max_content_width=120).output
    for artifact in (*stage.reads, *stage.writes):
        assert f"--{artifact.replace('_', '-')} DIR" in text
        assert f"artifacts/{artifact}" in text
    assert f"metrics/{name}.json" in text


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from ramen.cli import cli; cli(['--help'], standalone_mode=False); print('|', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split("|")[-1].split()}
    assert not loaded & HEAVY
