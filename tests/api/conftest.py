"""A finished run of the tiny problem, trained through the library."""

from __future__ import annotations

from typing import Any

import pytest

import ramen

SECTIONS: dict[str, dict[str, Any]] = {
    "encoder": {"name": "tiny", "precision": "fp32", "max_length": 16},
    "training": {"epochs": 2, "warmup_epochs": 1, "batch_size": 16, "validation_fraction": 0.1, "threads": 1},
    "scoring": {"peers": []},
}


@pytest.fixture(scope="session")
def sections() -> dict[str, dict[str, Any]]:
    """Knobs of `finished_run`."""
    return SECTIONS


@pytest.fixture(scope="session")
def finished_run(shared_dataset: ramen.Dataset, tmp_path_factory: pytest.TempPathFactory) -> ramen.Run:
    """Two epochs, for all tests of a session: do not publish or change it."""
    folder = tmp_path_factory.mktemp("library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAMEN_WORK", str(folder / "work"))
        return ramen.train(shared_dataset, out=folder / "run", **SECTIONS)
