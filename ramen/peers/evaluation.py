"""Evaluation of a peer, with the filters, metrics and files of a trained model."""

from __future__ import annotations

import time

from ramen.artifacts import Draft
from ramen.evaluation.metrics import DEPTH, apply_filter
from ramen.evaluation.predictions import PREDICTIONS, Ranking, write_predictions
from ramen.evaluation.tables import count_documents, measure_ranking, write_tables
from ramen.peers import PEERS, Rank, Task


def rank_test_documents(task: Task, rank: Rank) -> Ranking:
    """Return the first 100 labels of each test document after removal of filtered pairs."""
    return Ranking(*apply_filter(*rank(), task.problem.filter_test, DEPTH))


def evaluate_peer(name: str, task: Task, evaluation: Draft) -> tuple[dict[str, float], float]:
    """Train and evaluate a peer, and write the files of an `evaluation` artifact without a report.

    Args:
        name: a key of `PEERS`.
        task: input of the peer.
        evaluation: the artifact to fill.

    Returns:
        Metrics in percent, and the training time in seconds.
    """
    start = time.monotonic()
    rank = PEERS[name].fit(task)
    seconds = time.monotonic() - start
    ranking = rank_test_documents(task, rank)
    measured = measure_ranking(task.problem, ranking, task.scoring)
    write_tables(evaluation.path, task.problem, measured, task.scoring, None)
    write_predictions(evaluation.path / PREDICTIONS, task.problem, ranking)
    evaluation.counts.update(count_documents(task.problem, measured, task.scoring))
    return measured.metrics, seconds
