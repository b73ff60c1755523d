"""Stages `warmup` and `prune-retrain`: open artifacts, train, write the model."""

from __future__ import annotations

from ramen.artifacts import Artifact, Draft, write_json
from ramen.config import Encoder, Objective, Pruning, Training
from ramen.graph.metadata import read_graphs, write_graphs
from ramen.tracking import Tracker
from ramen.training.launch import together
from ramen.training.rounds import Rounds
from ramen.training.session import Session


def warmup(
    *,
    dataset: Artifact,
    graph: Artifact,
    warm_model: Draft,
    encoder: Encoder,
    objective: Objective,
    training: Training,
    track: Tracker,
) -> dict[str, float]:
    """Train on the unpruned graphs for `training.warmup_epochs` epochs."""
    inputs = {"dataset": dataset, "graph": graph}
    sections = {"encoder": encoder, "objective": objective, "training": training}
    with together("warmup", inputs, sections, training) as processes:
        session = Session(dataset, graph, warm_model, encoder.name, encoder, objective, training, track, processes)
        with session.interruptible():
            session.resume()
            session.train("warmup", min(training.warmup_epochs, training.epochs))
    session.write(warm_model)
    return session.last_metrics()


def prune_retrain(
    *,
    dataset: Artifact,
    graph: Artifact,
    warm_model: Artifact,
    model: Draft,
    pruned_graph: Draft,
    encoder: Encoder,
    objective: Objective,
    training: Training,
    pruning: Pruning,
    track: Tracker,
) -> dict[str, float]:
    """Prune the graphs with the encoder and retrain, in rounds, to `training.epochs` or convergence."""
    inputs = {"dataset": dataset, "graph": graph, "warm_model": warm_model}
    sections = {"encoder": encoder, "objective": objective, "training": training, "pruning": pruning}
    with together("prune-retrain", inputs, sections, training) as processes:
        session = Session(dataset, graph, model, warm_model.path, encoder, objective, training, track, processes)
        session.start_from(warm_model)
        rounds = Rounds(session, pruning)
        with session.interruptible():
            session.resume(rounds.restore)
            rounds.run()
    session.write(model)
    write_graphs(pruned_graph.path, rounds.pruned or read_graphs(graph.path))
    write_json(pruned_graph.path / "rounds.json", session.trainer.position.rounds)
    pruned_graph.counts |= rounds.counts()
    return session.last_metrics() | rounds.metrics()
