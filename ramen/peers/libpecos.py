"""Run libpecos in a separate interpreter, since it needs numpy < 2, scipy < 1.14 and transformers < 5.

Inputs and results are exchanged as files; the interpreter runs `pecos_worker.py`.
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

from ramen.errors import RamenError
from ramen.peers import Rank, Task
from ramen.peers.tfidf import make_vectoriser
from ramen.retrieval import RETRIEVED

VARIABLE = "RAMEN_PECOS_PYTHON"
"""Environment variable with the path of the interpreter that has libpecos."""
DEFAULT = ".venv-pecos/bin/python"
"""Interpreter that `make pecos` installs."""
WORKER = Path(__file__).with_name("pecos_worker.py")


def interpreter() -> str:
    """Return the path of the interpreter that has libpecos."""
    return os.environ.get(VARIABLE, DEFAULT)


@functools.lru_cache
def obstacle() -> str:
    """Return why libpecos cannot be used and what to do; empty if it can be used."""
    python = interpreter()
    remedy = f"run `make pecos` to install it, or set {VARIABLE} to an interpreter that has it"
    try:
        done = subprocess.run([python, "-I", "-c", "import pecos.xmc"], capture_output=True, text=True)
    except OSError:
        return f"libpecos is not installed ({python}: no such interpreter); {remedy}"
    if done.returncode:
        return f"libpecos cannot be imported by {python} ({_last_line(done.stderr)}); {remedy}"
    return ""


def fit(task: Task, method: str, **settings: Any) -> Rank:
    """Train XR-Linear or XR-Transformer on TF-IDF features.

    Args:
        task: input of the peer.
        method: "xr-linear" or "xr-transformer".
        settings: further values of the worker's plan.

    Raises:
        RamenError: no label has a training document, or libpecos failed.
    """
    problem, folder = task.problem, task.work
    vectoriser = make_vectoriser(problem.train.texts).fit(problem.train.texts)
    seen = np.setdiff1d(np.arange(len(problem.labels)), problem.unseen)
    pairs = problem.positives[:, seen]
    documents = np.flatnonzero(np.diff(pairs.indptr))
    labels = np.flatnonzero(np.bincount(pairs.indices, minlength=len(seen)))
    if not len(labels):
        raise RamenError(f"{method}: no label has a training document; choose another peer for this dataset")
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
        return sort_scores(sp.csr_matrix(sp.load_npz(folder / "scores.npz")), seen[labels], task)

    return rank


def sort_scores(
    matrix: sp.csr_matrix, labels: NDArray[np.int64], task: Task
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Convert the scores of the trained labels to a ranking.

    Args:
        matrix: CSR N' x K, scores.
        labels: int64 [K], label id of each column.
        task: input of the peer.
    """
    problem = task.problem
    num_labels = len(problem.labels)
    indices = np.full((matrix.shape[0], RETRIEVED), num_labels, np.int64)
    scores = np.full(indices.shape, -np.inf, np.float32)
    for row in range(matrix.shape[0]):
        entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
        ids, values = labels[matrix.indices[entries]], matrix.data[entries]
        if problem.candidates is not None:
            is_candidate = np.isin(ids, problem.candidates)
            ids, values = ids[is_candidate], values[is_candidate]
        order = np.lexsort((ids, -values))[: indices.shape[1]]
        indices[row, : len(order)], scores[row, : len(order)] = ids[order], values[order]
    return indices, scores


def _save(path: Path, matrix: sp.csr_matrix) -> None:
    matrix = sp.csr_matrix(matrix, dtype=np.float32)
    matrix.sort_indices()
    sp.save_npz(path, matrix)


def _run(step: str, folder: Path) -> None:
    done = subprocess.run([interpreter(), "-I", str(WORKER), step, str(folder)], capture_output=True, text=True)
    if done.returncode:
        reason = f"exit code {done.returncode}: {_last_line(done.stderr)}"
        raise RamenError(f"libpecos: {step} failed in {interpreter()}, {reason}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
