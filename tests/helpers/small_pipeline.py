"""Assignments that make the whole pipeline run on `tiny_dataset` in seconds."""

SMALL = (
    "data.source=xc", "walk.hops=20", "encoder.name=tiny", "encoder.precision=fp32", "encoder.max_length=16",
    "training.batch_size=16", "training.epochs=2", "training.warmup_epochs=1", "training.threads=1",
    "training.validation_fraction=0.1", "pruning.every=1", "index.kind=flat",
)  # fmt: skip
