"""Train on a dataset in memory; open a finished run."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from ramen import config
from ramen.api.datasets import PathLike, write_dataset
from ramen.api.retrieval import Retriever, exact_retriever
from ramen.artifacts import open_artifact, read_manifest
from ramen.config import Config, IndexConfig
from ramen.data.dataset import Dataset
from ramen.errors import ArtifactError, ConfigError, short_repr
from ramen.files import read_json
from ramen.stages import STAGES, preflight, run_stage
from ramen.tracking import NullTracker, Tracker, open_tracker, start_pipeline_run, use_project_store

if TYPE_CHECKING:
    from ramen.api.graphs import GraphMatrices

TRAINING_STAGES = ("build-graph", "warmup", "prune-retrain", "evaluate")
"""Stages of `train`, in order; `ingest` is replaced by the dataset in memory."""
Knobs = Mapping[str, Any]
"""Knob -> value, of one section."""


def train(
    dataset: Dataset,
    *,
    preset: str | None = None,
    out: PathLike | None = None,
    track: bool = False,
    **sections: Knobs,
) -> Run:
    """Train on a dataset, evaluate on its test documents, and return the run.

    An interrupted training resumes when it is called again with the same dataset and knobs.

    Args:
        dataset: from `load_dataset`.
        preset: name of a preset whose values are the defaults (`ramen config --preset NAME` prints them).
        out: folder of the artifacts; an older run there is replaced. None = a temporary folder, deleted with the run.
        track: record the run and its stages in MLflow, as `ramen run` does.
        **sections: section -> knobs, such as `training={"epochs": 8}`, `encoder={"name": "minilm"}`.

    Raises:
        ConfigError: a section or knob is unknown, or a value is out of range.
        RamenError: the environment lacks what training needs; see the message.
    """
    settings = _configured(preset, sections)
    temporary = tempfile.TemporaryDirectory(prefix="ramen-") if out is None else None
    folder = Path(temporary.name if temporary is not None else str(out))
    places = {name: folder / name for stage in TRAINING_STAGES for name in STAGES[stage].writes}
    preflight(TRAINING_STAGES, dict(settings), places.values())
    write_dataset(dataset, folder / "dataset")
    places["dataset"] = folder / "dataset"
    with _tracked(settings, track):
        for stage in TRAINING_STAGES:
            with _tracker(stage, track) as tracker:
                run_stage(
                    stage,
                    sections=settings.sections(),
                    inputs={name: places[name] for name in STAGES[stage].reads},
                    outputs={name: places[name] for name in STAGES[stage].writes},
                    track=tracker,
                )
    return Run(folder, temporary)


def _configured(preset: str | None, sections: Mapping[str, Knobs]) -> Config:
    """Return the configuration: defaults < preset < the given sections."""
    settings = Config() if preset is None else config.resolve(preset=preset)
    for name, instead in {"data": "ramen.load_dataset", "index": "run.publish"}.items():
        if name in sections:
            raise ConfigError(f"{name}: no section of training; pass its knobs to {instead}")
    changed = {}
    for name, knobs in sections.items():
        before = getattr(settings, name, None)
        if not isinstance(knobs, Mapping):
            raise ConfigError(f"{name}: expected a mapping of knobs, as {name}={{...}}, found {short_repr(knobs)}")
        changed[name] = config.parse_section(name, _merged(before, knobs) if before is not None else knobs)
    return settings.model_copy(update=changed)


def _merged(section: BaseModel, knobs: Knobs) -> dict[str, Any]:
    """Return a section's values with some replaced; knobs nested in a knob are replaced one by one."""
    values = section.model_dump()
    for name, value in knobs.items():
        nested = getattr(section, name, None)
        whole = not (isinstance(nested, BaseModel) and isinstance(value, Mapping))
        values[name] = value if whole else _merged(nested, value)  # type: ignore[arg-type]
    return values


@contextmanager
def _tracked(settings: Config, track: bool) -> Iterator[None]:
    """Record the pipeline's run in MLflow if `track` is set."""
    if not track:
        yield
        return
    use_project_store()
    used = {section for stage in TRAINING_STAGES for section in STAGES[stage].sections}  # not `data`: it is in memory
    with start_pipeline_run("ramen", config.to_yaml(settings), sections=settings.sections(used)):
        yield


@contextmanager
def _tracker(stage: str, track: bool) -> Iterator[Tracker]:
    if not track:
        yield NullTracker()
        return
    with open_tracker(stage) as tracker:
        yield tracker


@dataclass(frozen=True)
class Run:
    """A finished training: model, metrics, history and report.

    Attributes:
        folder: the artifacts `dataset`, `graph`, `warm_model`, `model`, `pruned_graph`, `evaluation`; after `publish`
            also `retriever`.
    """

    folder: Path
    _temporary: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_path(cls, folder: PathLike) -> Run:
        """Open the run that `train(out=...)` or `ramen run` wrote to a folder.

        Raises:
            ArtifactError: the folder holds no finished model and evaluation.
        """
        for name in ("dataset", "model", "evaluation"):
            read_manifest(Path(folder) / name, name)
        return cls(Path(folder))

    @cached_property
    def model(self) -> Retriever:
        """The trained model with an exact index of the dataset's labels."""
        return exact_retriever(self.folder)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics on the test documents, in percent; NaN where a slice is empty."""
        found = read_json(self.folder / "evaluation" / "metrics.json", dict[str, float | None])
        return {name: math.nan if value is None else value for name, value in found.items()}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch: phase, losses, weights, edges kept, held-out P@1."""
        found: list[dict[str, Any]] = read_json(self.folder / "model" / "history.json", list[dict[str, Any]])
        return found

    @property
    def graphs(self) -> GraphMatrices:
        """The pruned graphs of the last round, in the form of `build_graph`."""
        from ramen.api.graphs import matrices
        from ramen.graph.metadata import read_graphs

        return {name: matrices(sides) for name, sides in read_graphs(self.folder / "pruned_graph").items()}

    @property
    def report(self) -> Path:
        """The evaluation's report, an HTML file."""
        return self.folder / "evaluation" / "report.html"

    def publish(self, **index: Any) -> dict[str, float]:
        """Build the index, measure its recall, and register the retriever in MLflow.

        Args:
            **index: knobs of section `index`, such as `model="mail"`; `model=""` writes the retriever to the run's
                folder without registering it.

        Returns:
            The stage's metrics: `ann_recall_at_10`, `index_bytes`, and of a registered version `version` and
            `promoted`.

        Raises:
            RamenError: the registration failed, or tracking is off.
        """
        settings = cast(IndexConfig, config.parse_section("index", index))
        encoder = read_manifest(self.folder / "model", "model")["sections"]["encoder"]
        if settings.model:
            use_project_store()
        with _tracker("publish-index", bool(settings.model)) as tracker:
            return run_stage(
                "publish-index",
                sections={"encoder": encoder, "index": settings.model_dump()},
                inputs={name: self.folder / name for name in STAGES["publish-index"].reads},
                outputs={"retriever": self.folder / "retriever"},
                track=tracker,
            )

    def save(self, folder: PathLike) -> None:
        """Write the encoder as a sentence-transformers model whose card lists the test metrics.

        What the model knows of single labels (their context, offsets and classifiers) is in the run's index only.

        Raises:
            ArtifactError: the folder exists and is not empty.
        """
        from ramen.encoder.label_vectors import LABEL_FILES
        from ramen.encoder.model_card import write_model_card

        target, model = Path(folder), open_artifact(self.folder / "model", "model")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ArtifactError(f"{target}: refusing to overwrite: it is not an empty folder; choose another one")
        for name in model.manifest["files"]:
            if name not in LABEL_FILES:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model.path / name, target / name)
        write_model_card(
            target,
            sections=model.manifest["sections"],
            dataset=read_manifest(self.folder / "dataset", "dataset"),
            counts=model.counts,
            test_metrics=self.metrics,
        )
