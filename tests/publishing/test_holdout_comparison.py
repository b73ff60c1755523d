"""A holder that was evaluated on other data, asked the candidate's test documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramen.artifacts import Artifact, drafts, open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Dataset
from ramen.encoder.loading import load_encoder
from ramen.evaluation.metrics import DEPTH
from ramen.evaluation.predictions import PREDICTIONS, Ranking, write_predictions
from ramen.index.build import build_index
from ramen.index.retriever import Retriever
from ramen.publishing.holdout_comparison import compare_on_holdout
from ramen.publishing.registry import resolve_version
from ramen.publishing.stage import publish_index


def ranking(problem: Dataset, quality: str) -> Ranking:
    """Every true label first, or none at all."""
    indices = np.full((len(problem.test), DEPTH), len(problem.labels), np.int64)
    for row in range(len(problem.test)):
        true = problem.y_test.indices[problem.y_test.indptr[row] : problem.y_test.indptr[row + 1]]
        if quality == "perfect":
            indices[row, : len(true)] = true
    return Ranking(indices, np.zeros(indices.shape, np.float32))


def write_evaluation(folder: Path, problem: Dataset, quality: str) -> None:
    (folder / "metrics.json").write_text(json.dumps({"psp_at_5": 30.0}))
    (folder / "propensity.json").write_text(json.dumps({"a": 0.55, "b": 1.5, "N": len(problem.train)}))
    write_predictions(folder / PREDICTIONS, problem, ranking(problem, quality), 100)


@pytest.mark.parametrize("kind", ["flat", "IVF8,Flat"])  # one of eight lists is probed, which must not matter here
def test_holder_answers_by_identifier_and_misses_what_it_does_not_know(
    kind: str, tiny_problem: Dataset, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    write_evaluation(tmp_path, tiny_problem, "perfect")
    encoder = load_encoder(artifacts["model"].path, EncoderConfig())
    order = np.random.default_rng(0).permutation(30)[:25]  # five labels are new since
    gone = 201 * tiny_problem.test.texts  # labels of an older day, nearest of all; more than are retrieved
    uids = [*(tiny_problem.labels.uids[i] for i in order), *(f"gone {i}" for i in range(len(gone)))]
    texts = [*(tiny_problem.labels.texts[i] for i in order), *gone]
    holder = Retriever(encoder, build_index(encoder.encode(texts), IndexConfig(kind=kind)), uids, texts)
    found = compare_on_holdout(artifacts["dataset"].path, tmp_path)(holder)

    scores = encoder.encode(tiny_problem.test.texts) @ encoder.encode(tiny_problem.labels.texts).T
    scores[:, np.setdiff1d(np.arange(30), order)] = -2
    scores[tiny_problem.filter_test.toarray() > 0] = -2
    hit = tiny_problem.y_test.toarray()[np.arange(len(scores)), scores.argmax(1)]
    assert found.holder["p_at_1"] == pytest.approx(100 * hit.mean()) and found.documents == len(scores)
    labelled = np.diff(tiny_problem.y_test.indptr) > 0
    assert found.candidate["p_at_1"] == pytest.approx(100 * labelled.mean())
    assert found.candidate["psp_at_5"] == pytest.approx(100)
    assert {"tail/p_at_1", "head/psp_at_5"} <= found.holder.keys()


@pytest.fixture
def publish(artifacts: dict[str, Artifact], tiny_problem: Dataset, tmp_path: Path, track: Any) -> Callable[[str], Any]:
    """Publish with an evaluation of a quality, each time on another day's data; gives the receipt's entry."""
    day = 0

    def run(quality: str) -> Any:
        nonlocal day
        day += 1
        problem = replace(tiny_problem, train=replace(tiny_problem.train, uids=[
            f"{uid}, day {day}" for uid in tiny_problem.train.uids
        ]))  # fmt: skip
        made = {name: tmp_path / str(day) / name for name in ("dataset", "evaluation")}
        with drafts(made, sections={}, inputs={}, work=tmp_path / "work") as written:
            problem.write(written["dataset"].path)
            write_evaluation(written["evaluation"].path, problem, quality)
        inputs = {**artifacts, **{name: open_artifact(path, name) for name, path in made.items()}}
        place = tmp_path / str(day) / "retriever"
        with drafts({"retriever": place}, sections={}, inputs=inputs, work=tmp_path / "work") as written:
            publish_index(**inputs, **written, encoder=EncoderConfig(), index=IndexConfig(kind="flat"), track=track)
        return json.loads((place / "receipt.json").read_text())["registered"]

    return run


def test_gate_compares_versions_of_different_days(publish: Callable[[str], Any]) -> None:
    assert publish("poor")["alias"] == "champion"
    worse = publish("poor")
    assert worse["alias"] is None and "psp_at_5 0.00 is worse than the" in worse["refused"]
    better = publish("perfect")
    assert better["alias"] == "champion" and resolve_version("ramen", "champion") == 3
    assert better["note"] == "compared with version 1, evaluated on another dataset, on 20 test documents"
