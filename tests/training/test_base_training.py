"""Every base algorithm through both training stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramen.artifacts import open_artifact
from ramen.base import BASES
from ramen.errors import Interrupted
from ramen.stages import run_stage
from ramen.training.trainer import Trainer

from training_recipe import changed, history, train

EARLY = {"refresh_from": 1, "refresh_every": 2, "clusters": {"double_every": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_every_base_trains_with_graphs_and_ends_bit_identical_after_a_stop(
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
    train(tiny_artifacts, tmp_path / "whole", sections)
    losses = [record["task_loss"] for record in history(tmp_path / "whole" / "model")]
    assert losses[-1] < losses[0]
    plain, stops = Trainer.train_step, iter((3, 7, 11) if name == "siamesexml" else (6, 13, 25))
    at = next(stops)

    def stop(self: Trainer, step: object) -> dict[str, float]:
        if self.state.global_step == at:
            self.interrupted = True
        return plain(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train_step", stop)
    inputs = {name: tiny_artifacts[name] for name in ("dataset", "graph")}
    outputs = {"warm_model": tmp_path / "warm_model"}
    for stage in ("warmup", "prune-retrain"):
        for _ in range(4):
            try:
                run_stage(stage, sections=sections, inputs=inputs, outputs=outputs)
                break
            except Interrupted:
                at = next(stops, -1)
        inputs = {**inputs, "warm_model": tmp_path / "warm_model"}
        outputs = {"model": tmp_path / "model", "pruned_graph": tmp_path / "pruned_graph"}
    assert at == -1, "all three stops happened"
    for artifact in ("warm_model", "model", "pruned_graph"):
        theirs = open_artifact(tmp_path / "whole" / artifact, artifact)
        assert open_artifact(tmp_path / artifact, artifact).digest == theirs.digest, artifact
