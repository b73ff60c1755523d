"""The bandit on planted data: one anchor set adds information that the texts lack, the other is random.

    python benchmarks/bandit.py [--seeds 3] [--epochs 100]

A label is one word. Documents and anchors about it use some of its eight synonyms, of which its few training documents
contain only a part. The anchors of the informative set `told` contain the others; the set `noise` links labels to
anchors about other labels. Rows: the base, constant uniform weights, the bandit from the same weights, the informative
set alone, and that set read as text by MOGIC's oracle, which guides an encoder without graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from ramen.artifacts import create_drafts
from ramen.data.dataset import AnchorSet, Dataset, Texts
from ramen.stages import run_stage

LABELS, SYNONYMS, ANCHORS, TEST = 100, 8, 6, 600
START = 0.3
SECTIONS: dict[str, dict[str, Any]] = {
    "encoder": {"name": "tiny", "precision": "fp32", "max_length": 16, "dropout": 0.0},
    "objective": {"label_context": "none", "anchor_sampling": "uniform", "lambda_label": START},
    "base": {"random_labels": 0.5},  # as when the figures in benchmarks/README.md were made
    "training": {"batch_size": 64, "lr": 2e-3, "lr_warmup_steps": 20, "validation_fraction": 0.25, "threads": 1},
    "pruning": {"rule": "none"},
    "bandit": {"period": 2, "sigma": 0.2, "lr": 0.03},
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {"objective": {"graphs": False}},
    "uniform weights": {},
    "bandit": {"bandit": {"enabled": True}},
    "informative set alone": {"objective": {"lambdas": {"noise.label": 0.0}}},
    "read by an oracle": {
        "objective": {"graphs": False},
        "guidance": {"enabled": True, "anchor_sets": ["told"], "epochs": 40, "max_length": 40},
    },
}


def planted(per_label: int = 8, seed: int = 0) -> Dataset:
    """Return 100 labels with `per_label` training documents each, and label-side anchor sets `told` and `noise`."""
    rng = np.random.default_rng(seed)

    def word() -> str:
        return "".join(rng.choice(list("bcdfglmnprst")) + rng.choice(list("aeiou")) for _ in range(3))

    vocabulary: set[str] = set()
    while len(vocabulary) < LABELS * (SYNONYMS + 1):
        vocabulary.add(word())
    words = rng.permutation(sorted(vocabulary)).reshape(LABELS, SYNONYMS + 1)
    filler = [word() for _ in range(30)]

    def text(label: int, count: int) -> str:
        return " ".join([*rng.choice(words[label, 1:], count, replace=False), *rng.choice(filler, 2)])

    train, test = np.repeat(np.arange(LABELS), per_label), rng.integers(0, LABELS, TEST)
    about = np.repeat(np.arange(LABELS), ANCHORS)

    def anchor_set(name: str, texts: list[str], links: Iterable[Iterable[int]]) -> AnchorSet:
        uids = [f"{name}-{i}" for i in range(len(texts))]
        return AnchorSet(Texts(uids, texts), _matrix([[] for _ in train], len(texts)), _matrix(links, len(texts)))

    told = anchor_set("told", [text(label, 3) for label in about], [np.flatnonzero(about == i) for i in range(LABELS)])
    noise = anchor_set(
        "noise",
        [text(int(rng.integers(LABELS)), 3) for _ in about],
        [rng.choice(len(about), ANCHORS, replace=False) for _ in range(LABELS)],
    )
    return Dataset(
        Texts([f"train-{i}" for i in range(len(train))], [text(label, 2) for label in train]),
        Texts([f"test-{i}" for i in range(TEST)], [text(label, 2) for label in test]),
        Texts([f"label-{i}" for i in range(LABELS)], words[:, 0].tolist()),
        _matrix([[label] for label in train], LABELS),
        _matrix([[label] for label in test], LABELS),
        _matrix([[] for _ in train], LABELS),
        _matrix([[] for _ in test], LABELS),
        {"told": told, "noise": noise},
    )


def _matrix(rows: Iterable[Iterable[int]], columns: int) -> sp.csr_matrix:
    rows = [sorted(row) for row in rows]
    indptr = np.cumsum([0, *map(len, rows)])
    indices = np.array([column for row in rows for column in row], np.int32)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(len(rows), columns))


def write(dataset: Dataset, folder: Path) -> dict[str, Path]:
    """Write the artifacts `dataset` and `graph` (without a walk); return their paths."""
    paths = {name: folder / name for name in ("dataset", "graph")}
    with create_drafts({"dataset": paths["dataset"]}, sections={}, inputs={}, work=folder / "work") as draft:
        dataset.write(draft["dataset"].path)
    run_stage("build-graph", sections={"walk": {"hops": 0}}, inputs={"dataset": paths["dataset"]},
              outputs={"graph": paths["graph"]})  # fmt: skip
    return paths


def train(
    data: dict[str, Path], out: Path, row: dict[str, dict[str, Any]], seed: int, epochs: int
) -> tuple[float, dict[str, float]]:
    """Train and evaluate one row; return test P@1 in percent and the final weights λ of the label side."""
    sections = {name: {**SECTIONS.get(name, {}), **row.get(name, {})} for name in {**SECTIONS, **row}}
    sections["training"] |= {"seed": seed, "epochs": epochs, "warmup_epochs": epochs - 1}
    out.mkdir(parents=True)
    warm, model, pruned = out / "warm_model", out / "model", out / "pruned_graph"
    run_stage("warmup", sections=sections, inputs=data, outputs={"warm_model": warm})
    run_stage("prune-retrain", sections=sections, inputs={**data, "warm_model": warm},
              outputs={"model": model, "pruned_graph": pruned})  # fmt: skip
    metrics = run_stage(
        "evaluate", sections={"encoder": sections["encoder"], "scoring": {}},
        inputs={"dataset": data["dataset"], "pruned_graph": pruned, "model": model},
        outputs={"evaluation": out / "evaluation"},
    )  # fmt: skip
    weights = json.loads((model / "history.json").read_text())[-1]["lambda"]
    return metrics["p_at_1"], {key.split(".")[0]: value for key, value in weights.items() if key.endswith(".label")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    print(f"{'':22} {'P@1':>14}  {'told':>6} {'noise':>6}   mean of {options.seeds} seeds")
    with tempfile.TemporaryDirectory() as folder:
        data = write(planted(), Path(folder))
        for name, row in ROWS.items():
            results = [
                train(data, Path(folder) / name / str(seed), row, seed, options.epochs) for seed in range(options.seeds)
            ]
            scores = np.array([score for score, _ in results])
            ends = [
                f"{np.mean([w[key] for _, w in results]):6.2f}" if results[0][1] else "" for key in ("told", "noise")
            ]
            spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
            print(f"{name:22} {scores.mean():6.1f} ±{spread:5.1f}   {' '.join(ends)}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
