"""Every base algorithm in both training stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramen.base import BASES

from training_recipe import (
    assert_same_artifacts,
    changed,
    history,
    interrupt_before_steps,
    run_retraining,
    run_until_done,
    run_warmup,
    train,
)

EARLY = {"refresh_from": 1, "refresh_every": 2, "clusters": {"double_every": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_base_learns_and_is_bit_identical_after_interruptions(
    name: str, tiny_artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramen.base.dexa.OFFSET_HEADS", 2)
    monkeypatch.setattr("ramen.base.mining.SHORTLIST", 5)
    monkeypatch.setattr("ramen.training.labels.classifier.BATCH_SIZE", 16)
    monkeypatch.setattr("ramen.training.labels.classifier.SHORTLIST", 5)
    sections = changed(
        base={"name": name, **EARLY},
        training={"epochs": 8, "warmup_epochs": 4},
        pruning={"every": 2},
        classifier={"epochs": 3},
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(tiny_artifacts, whole, sections)
    losses = [record["task_loss"] for record in history(whole / "model")]
    assert losses[-1] < losses[0]
    # two interruptions of the warm-up and one of the retraining; SiameseXML has fewer steps per epoch
    interrupt_before_steps(monkeypatch, (4, 8, 12) if name == "siamesexml" else (7, 14, 26))
    assert run_until_done(lambda: run_warmup(tiny_artifacts, resumed, sections)) == 2
    assert run_until_done(lambda: run_retraining(tiny_artifacts, resumed / "warm_model", resumed, sections)) == 1
    assert_same_artifacts(resumed, whole, "warm_model", "model", "pruned_graph")
