"""Generated files agree with the stage table, the configuration and the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ramen import config
from ramen.cli import cli, sync
from ramen.stages import STAGES


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return {str(path.relative_to(sync.ROOT)): text for path, text in sync.generated_files().items()}


def test_committed_files_are_current(generated: dict[str, str]) -> None:
    assert [
        str(path) for path in sync.outdated_files({sync.ROOT / name: text for name, text in generated.items()})
    ] == []


def test_all_generated_files_are_listed(generated: dict[str, str]) -> None:
    readmes = {f"components/{stage.identifier}/README.md" for stage in STAGES.values()}
    assert set(generated) == readmes | {
        "dvc.yaml",
        "params.yaml",
        "pipelines/ramen.yaml",
        "docs/config.md",
        "docs/cli.md",
    }


def test_config_page_has_a_row_per_knob(generated: dict[str, str]) -> None:
    for name, section in config.SECTIONS.items():
        part = generated["docs/config.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `([\w.]+)`(?: •)? \|(.*)\|$", part, re.MULTILINE)
        assert [knob for knob, _ in rows] == [path for path, _ in config.knobs(section)]
        assert all(len(re.split(r"(?<!\\)\|", cells)) == 4 for _, cells in rows)


def test_cli_page_has_every_command(generated: dict[str, str]) -> None:
    assert re.findall(r"^## ramen (\S+)$", generated["docs/cli.md"], re.MULTILINE) == cli.list_commands(None)  # type: ignore[arg-type]


def test_params_yaml_keeps_its_values(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "params.yaml").write_text("walk: {hops: 17}\n")
    text = sync.generated_files(tmp_path)[tmp_path / "params.yaml"]
    assert "  hops: 17  # " in text and "  restart: 0.8  # " in text


@pytest.mark.slow
def test_check_lists_outdated_files_and_sync_updates_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in sync.generated_files():
        target = tmp_path / path.relative_to(sync.ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "docs" / "cli.md").unlink()
    check = CliRunner().invoke(cli, ["sync", "--check"])
    assert check.exit_code == 1
    assert check.stdout.splitlines() == ["outdated: dvc.yaml", "outdated: docs/cli.md"]
    assert not (tmp_path / "docs" / "cli.md").exists()
    assert CliRunner().invoke(cli, ["sync"]).exit_code == 0
    assert CliRunner().invoke(cli, ["sync", "--check"]).exit_code == 0
