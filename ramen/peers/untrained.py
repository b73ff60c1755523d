"""The configured encoder before training: cosine between document text and label text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ramen.encoder.loading import load_encoder
from ramen.peers import Rank, Task
from ramen.retrieval import RETRIEVED, search


def fit(task: Task) -> Rank:
    """Load the encoder.

    Raises:
        RamenError: the encoder cannot be loaded.
    """
    problem = task.problem
    encoder = load_encoder(task.encoder.name, task.encoder)

    def rank() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        documents, labels = encoder.encode(problem.test.texts), encoder.encode(problem.labels.texts)
        return search(documents, labels, RETRIEVED, candidates=problem.candidates)

    return rank
