"""Stages `warmup` and `prune-retrain`: open artifacts, train, write the model."""

from __future__ import annotations

from ramen.artifacts import Artifact, Draft, write_json
from ramen.config import (
    BanditConfig,
    BaseConfig,
    ClassifierConfig,
    EncoderConfig,
    GuidanceConfig,
    ObjectiveConfig,
    PruningConfig,
    TrainingConfig,
)
from ramen.encoder.label_vectors import with_context, write_classifier, write_context
from ramen.encoder.model_card import write_model_card
from ramen.graph.metadata import read_graphs, write_graphs
from ramen.tracking import Tracker
from ramen.training.labels.classifier import classify
from ramen.training.labels.context import label_context
from ramen.training.launch import launch_processes
from ramen.training.oracle import read_oracle, train_oracle, write_oracle
from ramen.training.pruning_rounds import Rounds
from ramen.training.schedule import Clock
from ramen.training.setup import Session, TrainingSections, check_warm_settings


def warmup(
    *,
    dataset: Artifact,
    graph: Artifact,
    warm_model: Draft,
    encoder: EncoderConfig,
    objective: ObjectiveConfig,
    bandit: BanditConfig,
    base: BaseConfig,
    training: TrainingConfig,
    guidance: GuidanceConfig,
    track: Tracker,
) -> dict[str, float]:
    """Train the oracle if one is to guide, then on the unpruned graphs for `training.warmup_epochs` epochs."""
    inputs = {"dataset": dataset, "graph": graph}
    settings, clock = TrainingSections(encoder, objective, bandit, base, training, guidance), Clock()
    with launch_processes("warmup", inputs, settings.sections(), training) as processes:
        oracle, judged = None, dict[str, float]()
        if guidance.enabled:
            oracle, judged = train_oracle(dataset, graph, warm_model, settings, track, processes)
        session = Session(
            dataset, graph, warm_model, encoder.name, settings, track, processes,
            oracle=oracle, max_length=encoder.max_length, clock=clock,
        )  # fmt: skip
        with session.interruptible():
            session.resume()
            session.train("warmup", session.plan.warmup_epochs)
    session.write(warm_model, to_go_on=True)
    if oracle is not None:
        write_oracle(warm_model.path, oracle)
    return session.last_metrics() | judged


def prune_retrain(
    *,
    dataset: Artifact,
    graph: Artifact,
    warm_model: Artifact,
    model: Draft,
    pruned_graph: Draft,
    encoder: EncoderConfig,
    objective: ObjectiveConfig,
    bandit: BanditConfig,
    base: BaseConfig,
    training: TrainingConfig,
    guidance: GuidanceConfig,
    pruning: PruningConfig,
    classifier: ClassifierConfig,
    track: Tracker,
) -> dict[str, float]:
    """Prune the graphs with the encoder and retrain, in rounds, to the end of the plan (`training.epochs`)."""
    inputs = {"dataset": dataset, "graph": graph, "warm_model": warm_model}
    settings, clock = TrainingSections(encoder, objective, bandit, base, training, guidance), Clock()
    sections = {**settings.sections(), "pruning": pruning, "classifier": classifier}
    check_warm_settings(warm_model, settings)
    with launch_processes("prune-retrain", inputs, sections, training) as processes:
        oracle = read_oracle(warm_model.path) if guidance.enabled else None
        session = Session(
            dataset, graph, model, warm_model.path, settings, track, processes, oracle=oracle, clock=clock
        )
        session.start_from(warm_model)
        rounds = Rounds(session, pruning)
        with session.interruptible():
            session.resume(rounds.restore)
            rounds.run()
            session.end()  # what follows is short, and done again after an interruption
            labels = session.embed_role("labels")
            context = label_context(session, rounds.drawn, labels)
            unseen = labels if context is None else with_context(labels, context.unseen)
            classified = classify(session, classifier, model, labels, unseen)
    session.write(model, to_go_on=False)
    if context is not None:
        write_context(model.path, context.vectors)
    if classified is not None:
        write_classifier(model.path, classified.weight, classified.share)
    write_graphs(pruned_graph.path, rounds.pruned or read_graphs(graph.path))
    write_json(pruned_graph.path / "rounds.json", session.trainer.position.rounds)
    pruned_graph.counts |= rounds.counts()
    metrics = session.last_metrics() | rounds.metrics()
    write_model_card(
        model.path,
        sections={name: section.model_dump() for name, section in sections.items()},
        dataset=dataset.manifest,
        counts=model.counts,
        heldout_p_at_1=metrics.get("val_p_at_1"),
    )
    metrics |= {f"context/{name}": share for name, share in (context.shares if context else {}).items()}
    return metrics | (classified.metrics if classified else {})
