"""The stages `warmup` and `prune-retrain`: train on the artifacts, write the model."""

from __future__ import annotations

from ramen.artifacts import Artifact, Draft
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
from ramen.encoder.label_vectors import add_context, write_classifier, write_context
from ramen.encoder.model_card import write_model_card
from ramen.files import write_json
from ramen.graph.metadata import read_graphs, write_graphs
from ramen.tracking import Tracker
from ramen.training.labels.classifier import train_classifiers
from ramen.training.labels.context import label_context
from ramen.training.launch import launch_processes
from ramen.training.model_files import (
    check_warm_settings,
    load_training_state,
    write_model,
    write_training_state,
)
from ramen.training.oracle import read_oracle, train_oracle, write_oracle
from ramen.training.pruning_rounds import PruningRounds
from ramen.training.schedule import Clock
from ramen.training.setup import TrainingSections, build_trainer


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
    """Train the oracle, if there is one, then the encoder on the unpruned graphs for `training.warmup_epochs`."""
    inputs = {"dataset": dataset, "graph": graph}
    sections, clock = TrainingSections(encoder, objective, bandit, base, training, guidance), Clock()
    with launch_processes("warmup", inputs, sections.by_name(), training) as processes:
        oracle, oracle_metrics = None, dict[str, float]()
        if guidance.enabled:
            oracle, oracle_metrics = train_oracle(dataset, graph, warm_model, sections, track, processes)
        trainer = build_trainer(
            dataset, graph, warm_model, encoder.name, sections, track, processes,
            clock=clock, oracle=oracle, max_length=encoder.max_length,
        )  # fmt: skip
        with trainer.interruptible():
            trainer.resume()
            trainer.train("warmup", trainer.schedule.warmup_epochs)
    write_model(warm_model, trainer)
    write_training_state(warm_model, trainer)
    if oracle is not None:
        write_oracle(warm_model.path, oracle)
    return trainer.last_metrics() | oracle_metrics


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
    """Prune the graphs with the encoder and retrain, in rounds, until training ends (`training.epochs`)."""
    inputs = {"dataset": dataset, "graph": graph, "warm_model": warm_model}
    sections, clock = TrainingSections(encoder, objective, bandit, base, training, guidance), Clock()
    check_warm_settings(warm_model, sections.by_name())
    all_sections = {**sections.by_name(), "pruning": pruning, "classifier": classifier}
    with launch_processes("prune-retrain", inputs, all_sections, training) as processes:
        oracle = read_oracle(warm_model.path) if guidance.enabled else None
        trainer = build_trainer(
            dataset, graph, model, warm_model.path, sections, track, processes, clock=clock, oracle=oracle
        )
        load_training_state(warm_model, trainer)
        rounds = PruningRounds(trainer, pruning, objective)
        with trainer.interruptible():
            trainer.resume()
            rounds.restore()
            rounds.run()
            trainer.finish()  # the rest is short, and is repeated after an interruption
            labels = trainer.embed_role("labels")
            context = label_context(trainer, objective, rounds.drawn, labels)
            # fused without the held-out documents: the share is chosen on them
            fused_with = labels if context is None else add_context(labels, context.without_held_out)
            classified = train_classifiers(trainer, classifier, model, labels, fused_with)
    write_model(model, trainer)
    if context is not None:
        write_context(model.path, context.vectors)
    if classified is not None:
        write_classifier(model.path, classified.weight, classified.share)
    write_graphs(pruned_graph.path, rounds.pruned or read_graphs(graph.path))
    write_json(pruned_graph.path / "rounds.json", trainer.state.rounds)
    pruned_graph.counts |= rounds.counts()
    metrics = trainer.last_metrics() | rounds.metrics()
    write_model_card(
        model.path,
        sections={name: section.model_dump() for name, section in all_sections.items()},
        dataset=dataset.manifest,
        counts=model.counts,
        heldout_p_at_1=metrics.get("val_p_at_1"),
    )
    metrics |= {f"context/{name}": share for name, share in (context.shares if context else {}).items()}
    return metrics | (classified.metrics if classified else {})
