"""Comparison with a champion that was evaluated on another dataset."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramen.artifacts import Artifact, create_drafts, open_artifact
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


def make_ranking(problem: Dataset, quality: str) -> Ranking:
    """Return a ranking with every true label first ("perfect") or with no label ("poor")."""
    indices = np.full((len(problem.test), DEPTH), len(problem.labels), np.int64)
    for row in range(len(problem.test)):
        labels = problem.y_test.indices[problem.y_test.indptr[row] : problem.y_test.indptr[row + 1]]
        if quality == "perfect":
            indices[row, : len(labels)] = labels
    return Ranking(indices, np.zeros(indices.shape, np.float32))


def write_evaluation(folder: Path, problem: Dataset, quality: str) -> None:
    (folder / "metrics.json").write_text(json.dumps({"psp_at_5": 30.0}))
    (folder / "propensity.json").write_text(json.dumps({"a": 0.55, "b": 1.5, "N": len(problem.train)}))
    write_predictions(folder / PREDICTIONS, problem, make_ranking(problem, quality), 100)


@pytest.mark.parametrize("kind", ["flat", "IVF8,Flat"])  # the comparison must search all eight lists, not one
def test_champion_labels_match_by_uid_and_unknown_labels_are_missed(
    kind: str, tiny_dataset: Dataset, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    write_evaluation(tmp_path, tiny_dataset, "perfect")
    encoder = load_encoder(artifacts["model"].path, EncoderConfig())
    order = np.random.default_rng(0).permutation(30)[:25]  # the champion lacks five labels
    obsolete = 201 * tiny_dataset.test.texts  # unknown to the candidate, nearest to all queries, more than RETRIEVED
    uids = [*(tiny_dataset.labels.uids[i] for i in order), *(f"obsolete {i}" for i in range(len(obsolete)))]
    texts = [*(tiny_dataset.labels.texts[i] for i in order), *obsolete]
    champion = Retriever(encoder, build_index(encoder.encode(texts), IndexConfig(kind=kind)), uids, texts)
    comparison = compare_on_holdout(champion, dataset=artifacts["dataset"].path, evaluation=tmp_path)

    scores = encoder.encode(tiny_dataset.test.texts) @ encoder.encode(tiny_dataset.labels.texts).T
    scores[:, np.setdiff1d(np.arange(30), order)] = -2
    scores[tiny_dataset.filter_test.toarray() > 0] = -2
    hits = tiny_dataset.y_test.toarray()[np.arange(len(scores)), scores.argmax(1)]
    assert comparison.champion["p_at_1"] == pytest.approx(100 * hits.mean()) and comparison.documents == len(scores)
    labelled = np.diff(tiny_dataset.y_test.indptr) > 0
    assert comparison.candidate["p_at_1"] == pytest.approx(100 * labelled.mean())
    assert comparison.candidate["psp_at_5"] == pytest.approx(100)
    assert {"tail/p_at_1", "head/psp_at_5"} <= comparison.champion.keys()


@pytest.fixture
def publish(artifacts: dict[str, Artifact], tiny_dataset: Dataset, tmp_path: Path, track: Any) -> Callable[[str], Any]:
    """Publish with an evaluation of the given quality on the data of a new day; return the receipt's entry."""
    day = 0

    def run(quality: str) -> Any:
        nonlocal day
        day += 1
        problem = replace(tiny_dataset, train=replace(tiny_dataset.train, uids=[
            f"{uid}, day {day}" for uid in tiny_dataset.train.uids
        ]))  # fmt: skip
        folders = {name: tmp_path / str(day) / name for name in ("dataset", "evaluation")}
        with create_drafts(folders, sections={}, inputs={}, work=tmp_path / "work") as written:
            problem.write(written["dataset"].path)
            write_evaluation(written["evaluation"].path, problem, quality)
        inputs = {**artifacts, **{name: open_artifact(path, name) for name, path in folders.items()}}
        retriever = tmp_path / str(day) / "retriever"
        with create_drafts({"retriever": retriever}, sections={}, inputs=inputs, work=tmp_path / "work") as written:
            publish_index(**inputs, **written, encoder=EncoderConfig(), index=IndexConfig(kind="flat"), track=track)
        return json.loads((retriever / "receipt.json").read_text())["registered"]

    return run


@pytest.mark.slow
def test_gate_compares_versions_of_different_days(publish: Callable[[str], Any]) -> None:
    assert publish("poor")["alias"] == "champion"
    worse = publish("poor")
    assert worse["alias"] is None and "psp_at_5 0.00 is worse than the" in worse["refused"]
    better = publish("perfect")
    assert better["alias"] == "champion" and resolve_version("ramen", "champion") == 3
    assert better["note"] == "compared with version 1, evaluated on another dataset, on 20 test documents"
