"""libpecos in an interpreter with its own packages: it needs numpy < 2, scipy < 1.14 and transformers < 5.

Inputs and results pass through files; `pecos_worker.py` is the program that runs there.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.preprocessing import normalize

from ramen.data.dataset import Dataset
from ramen.errors import RamenError
from ramen.peers import Rank, Task
from ramen.peers.tfidf import make_vectoriser
from ramen.retrieval import RETRIEVED

VARIABLE = "RAMEN_PECOS_PYTHON"
"""Environment variable that names the interpreter with libpecos."""
DEFAULT = ".venv-pecos/bin/python"
"""Interpreter that `make pecos` installs."""
WORKER = Path(__file__).with_name("pecos_worker.py")


def interpreter() -> str:
    """The interpreter that runs libpecos."""
    return os.environ.get(VARIABLE, DEFAULT)


@functools.lru_cache
def obstacle() -> str:
    """Why libpecos cannot be used and what to do; empty if it can."""
    python = interpreter()
    how = f"`make pecos` installs it; or set {VARIABLE} to an interpreter that has it"
    try:
        done = subprocess.run([python, "-I", "-c", "import pecos.xmc"], capture_output=True, text=True)
    except OSError:
        return f"libpecos is not installed ({python}: no such interpreter); {how}"
    if done.returncode:
        return f"libpecos cannot be imported by {python} ({_last_line(done.stderr)}); {how}"
    return ""


def fit(task: Task, method: str, **settings: Any) -> Rank:
    """Train XR-Linear or XR-Transformer on TF-IDF features, in the other interpreter.

    Args:
        task: the data and settings.
        method: "xr-linear" or "xr-transformer".
        settings: passed to the worker.
    """
    problem, folder = task.problem, task.work
    vectoriser = make_vectoriser(problem.train.texts).fit(problem.train.texts)
    seen = np.setdiff1d(np.arange(len(problem.labels)), problem.unseen)
    pairs = problem.positives[:, seen]
    documents = np.flatnonzero(np.diff(pairs.indptr))
    labels = np.flatnonzero(np.bincount(pairs.indices, minlength=len(seen)))
    if not len(labels):
        raise RamenError(f"{method}: no label has a training document")
    _save(folder / "x_train.npz", normalize(vectoriser.transform(problem.train.texts))[documents])
    _save(folder / "x_test.npz", normalize(vectoriser.transform(problem.test.texts)))
    _save(folder / "y_train.npz", pairs[documents][:, labels])
    texts = {"train": [problem.train.texts[i] for i in documents], "test": problem.test.texts}
    for name, values in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    plan = {"method": method, "retrieve": RETRIEVED, "seed": task.training.seed, **settings}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    _run("train", folder)

    def rank() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        _run("predict", folder)
        return sort_scores(sp.csr_matrix(sp.load_npz(folder / "scores.npz")), seen[labels], problem, task)

    return rank


def sort_scores(
    found: sp.csr_matrix, labels: NDArray[np.int64], problem: Dataset, task: Task
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Turn the scores of the trained labels (CSR N' x K, column j is label `labels[j]`) into a ranking."""
    num_labels = len(problem.labels)
    indices = np.full((found.shape[0], RETRIEVED), num_labels, np.int64)
    scores = np.full(indices.shape, -np.inf, np.float32)
    for row in range(found.shape[0]):
        part = slice(found.indptr[row], found.indptr[row + 1])
        names, values = labels[found.indices[part]], found.data[part]
        if problem.candidates is not None:
            competes = np.isin(names, problem.candidates)
            names, values = names[competes], values[competes]
        order = np.lexsort((names, -values))[: indices.shape[1]]
        indices[row, : len(order)], scores[row, : len(order)] = names[order], values[order]
    return indices, scores


def _save(path: Path, matrix: sp.csr_matrix) -> None:
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.sort_indices()
    sp.save_npz(path, matrix)


def _run(step: str, folder: Path) -> None:
    done = subprocess.run([interpreter(), "-I", str(WORKER), step, str(folder)], capture_output=True, text=True)
    if done.returncode:
        found = f"exit code {done.returncode}: {_last_line(done.stderr)}"
        raise RamenError(f"libpecos: {step} failed in {interpreter()}, {found}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
