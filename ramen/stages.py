"""The table of stages, and the one function that runs a stage whatever the front.

A stage function lives in a package's `stage.py` and takes, by keyword, exactly its artifacts (`Artifact` for what
it reads, `Draft` for what it writes), its config sections and `track`; it returns headline metrics as a flat dict.
It cannot read a knob it did not declare, so a change of an index knob re-runs neither training in DVC nor its
cached KFP task.

Nothing heavy is imported here: `impl` is resolved only when the stage runs.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramen.artifacts import (
    KINDS,
    Artifact,
    Draft,
    check_room,
    check_writable,
    drafts,
    failed_io,
    folder_sha256,
    open_artifact,
    read_manifest,
    reading,
)
from ramen.errors import ArtifactError, Interrupted
from ramen.processes import rank
from ramen.signals import on_interrupt
from ramen.tracking import NullTracker, Tracker, flat_params, open_tracker
from ramen.workdir import WORK_ENV, claim, lock_workdir, release, work_directory

if TYPE_CHECKING:
    from ramen.config import Config

PACKAGE = Path(__file__).parent
MODELS = {"warm_model", "model"}
"""A stage that reads one of these takes its encoder from there."""


ROOM = 8 << 20
"""Bytes that are free for an output at least, in addition to the copies of the encoder's weights."""
CHECKPOINT_COPIES = 3
"""A checkpoint holds the weights and two moments of the optimiser."""


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        name: as typed on the command line.
        help: one line.
        reads, writes: artifact names.
        sections: config sections the stage may see.
        code: modules and packages under `ramen/` whose change must re-run the stage.
        impl: "module:function".
        checks: "module:function" of what is checked before anything trains; see `ramen.preflight`.
        copies: of the encoder's weights that its outputs hold at least, the optimiser's moments included.
        gpu: the stage trains or encodes, and wants an accelerator where there is one.
        parallel: several processes may run it together (`torchrun`); of any other stage, rank 0 does all.
        side_effects: it changes something outside its artifacts (a registry), so its result is never cached.
        headline: its metrics are also recorded on the pipeline's run, so that pipelines compare row by row.
        shown: files and folders of its first output that are stored with its MLflow run.
    """

    name: str
    help: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sections: tuple[str, ...]
    code: tuple[str, ...]
    impl: str
    checks: tuple[str, ...] = ()
    copies: int = 0
    gpu: bool = False
    parallel: bool = False
    side_effects: bool = False
    headline: bool = False
    shown: tuple[str, ...] = ()

    @property
    def identifier(self) -> str:
        """The name as a Python identifier and folder name: `prune_retrain`."""
        return self.name.replace("-", "_")

    def code_paths(self) -> list[Path]:
        """Files and folders under the package that the stage depends on."""
        return [PACKAGE / part for part in ("artifacts.py", "config", "stages.py", "yamlfile.py", *self.code)]

    def code_version(self) -> str:
        """sha256 (12 hex digits) of the source files the stage depends on."""
        digest = hashlib.sha256()
        for root in self.code_paths():
            files = sorted([*root.rglob("*.py"), *root.rglob("*.j2")]) if root.is_dir() else [root]
            for file in files:
                digest.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()[:12]

    def cache_version(self, config: Config) -> str:
        """What a kept result depends on beside sections and inputs: the code, and what sections name outside.

        That is the raw data for the first stage, else what `named` finds.

        Raises:
            RamenError: there are no raw data, or what a section names is not there.
        """
        from ramen.data import sources

        outside = self.named({name: getattr(config, name) for name in self.sections})
        if not self.reads:
            outside["data.path"] = sources.fingerprint(config.data)
        return "-".join([self.code_version(), *(digest[:12] for digest in outside.values())])

    def named(self, sections: Mapping[str, Any]) -> dict[str, str]:
        """Folders that knobs name beside the stage's inputs: knob -> digest, for one may be written anew in its place.

        Args:
            sections: name -> validated section.

        Raises:
            ArtifactError: the base's evaluation is none.
        """
        folders = self.folders(sections)
        found = {}
        if folder := folders.get("encoder.name"):
            with reading(folder, "set encoder.name to a directory that can be read"):
                found["encoder.name"] = folder_sha256(folder)
        if base := folders.get("scoring.base"):
            found["scoring.base"] = open_artifact(base, "evaluation").digest
        return found

    def folders(self, sections: Mapping[str, Any]) -> dict[str, Path]:
        """Directories that knobs name in addition to the stage's inputs: knob -> path.

        Args:
            sections: name -> validated section.
        """
        found = {}
        starts = not MODELS & set(self.reads) or ("scoring" in sections and "untrained" in sections["scoring"].peers)
        if "encoder" in sections and starts and Path(sections["encoder"].name).is_dir():
            found["encoder.name"] = Path(sections["encoder"].name)
        if "scoring" in sections and sections["scoring"].base:
            found["scoring.base"] = Path(sections["scoring"].base)
        return found


_ITEMS = ("data/dataset.py", "data/filters.py", "data/identity.py", "data/sparse.py")
_TRAINING_CODE = (
    *_ITEMS, "base", "encoder", "graph", "objective", "processes.py", "retrieval.py", "sampling.py",
    "training", "workdir.py",
)  # fmt: skip

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "ingest",
            "read a source, validate it, write the dataset",
            reads=(),
            writes=("dataset",),
            sections=("data",),
            code=("data",),
            impl="ramen.data.stage:ingest",
            shown=("validation",),
        ),
        Stage(
            "build-graph",
            "clean the metadata graphs and walk them",
            reads=("dataset",),
            writes=("graph",),
            sections=("walk",),
            code=(*_ITEMS, "sampling.py", "graph"),
            impl="ramen.graph.stage:build_graph",
        ),
        Stage(
            "warmup",
            "train the encoder on the unpruned graphs",
            reads=("dataset", "graph"),
            writes=("warm_model",),
            sections=("encoder", "objective", "bandit", "base", "training", "guidance"),
            code=_TRAINING_CODE,
            impl="ramen.training.stage:warmup",
            checks=(
                "ramen.preflight:check_encoder",
                "ramen.preflight:check_anchor_sets",
                "ramen.preflight:check_faiss",
            ),
            copies=3,
            gpu=True,
            parallel=True,
        ),
        Stage(
            "prune-retrain",
            "prune noisy edges with the encoder and retrain, round by round",
            reads=("dataset", "graph", "warm_model"),
            writes=("model", "pruned_graph"),
            sections=("encoder", "objective", "bandit", "base", "training", "guidance", "pruning", "classifier"),
            code=_TRAINING_CODE,
            impl="ramen.training.stage:prune_retrain",
            copies=1,
            gpu=True,
            parallel=True,
        ),
        Stage(
            "evaluate",
            "retrieve labels for the test documents; metrics, predictions, report",
            reads=("dataset", "pruned_graph", "model"),
            writes=("evaluation",),
            sections=("encoder", "scoring"),
            code=(
                *_ITEMS,
                "encoder",
                "evaluation",
                "graph/cleaning.py",
                "graph/metadata.py",
                "peers",
                "processes.py",
                "retrieval.py",
            ),
            impl="ramen.evaluation.stage:evaluate",
            checks=("ramen.preflight:check_faiss", "ramen.preflight:check_base"),
            gpu=True,
            headline=True,
            shown=("report.html", "metrics.json", "figures", "per_document.parquet"),
        ),
        Stage(
            "publish-index",
            "build the ANN index, measure its recall, register the retriever",
            reads=("dataset", "model", "evaluation"),
            writes=("retriever",),
            sections=("encoder", "index"),
            code=(
                "data/dataset.py",
                "data/sparse.py",
                "encoder",
                "evaluation/metrics.py",
                "evaluation/per_document.py",
                "evaluation/predictions.py",
                "evaluation/quantiles.py",
                "evaluation/uncertainty.py",
                "index",
                "publishing",
                "processes.py",
                "retrieval.py",
            ),
            impl="ramen.publishing.stage:publish_index",
            checks=(
                "ramen.preflight:check_faiss",
                "ramen.preflight:check_index",
                "ramen.preflight:check_gate",
                "ramen.preflight:check_registry",
            ),
            side_effects=True,
        ),
    )
}


def default_path(artifact: str, root: str | os.PathLike[str] = "artifacts") -> Path:
    """Where an artifact lies unless told otherwise."""
    assert artifact in KINDS
    return Path(root) / artifact


def run_stage(
    name: str,
    *,
    sections: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, str | os.PathLike[str]] | None = None,
    outputs: Mapping[str, str | os.PathLike[str]] | None = None,
    track: Tracker | None = None,
) -> dict[str, float]:
    """Run one stage: validate sections, open and check inputs, write beside, rename, return the metrics.

    Args:
        name: a key of `STAGES`.
        sections: section name -> values, at least those the stage declares (others are ignored).
        inputs, outputs: artifact name -> directory, exactly those the stage reads and writes; None = the defaults.
        track: receives parameters, datasets, step metrics and figures; None = nothing is tracked.

    Raises:
        RamenError: whatever the user can mend; no output is changed in that case.
        Interrupted: SIGTERM or Ctrl-C.
    """
    from ramen.config import parse_section

    stage = STAGES[name]
    track = track or NullTracker()
    inputs = {key: default_path(key) for key in stage.reads} if inputs is None else inputs
    outputs = {key: default_path(key) for key in stage.writes} if outputs is None else outputs
    assert set(inputs) == set(stage.reads) and set(outputs) == set(stage.writes), (name, inputs, outputs)
    values = {key: parse_section(key, sections.get(key, {})) for key in stage.sections}
    plain = {key: value.model_dump() for key, value in values.items()}
    if rank() == 0:
        preflight((name,), values, outputs.values())
    opened = {key: open_artifact(path, key, complete=True) for key, path in inputs.items()}
    check_lineage(opened)
    track.params(flat_params(plain))
    for key, artifact in opened.items():
        track.dataset(key, artifact.digest, str(inputs[key]))

    task = {
        "stage": name,
        "sections": plain,
        "inputs": {key: artifact.digest for key, artifact in opened.items()} | stage.named(values),
        "code": stage.code_version(),
    }
    work = work_directory(task)

    module, function = stage.impl.split(":")
    implementation = getattr(importlib.import_module(module), function)
    if rank() > 0:
        return run_worker_rank(stage, implementation, opened, values, work, task)
    computed = False

    def stop() -> None:
        if not computed:  # else it finishes: renaming the outputs is not to be cut in two
            raise Interrupted("stopped on request; nothing was changed")

    with lock_workdir(work, task), _collected():
        try:
            places = drafts(outputs, sections=plain, inputs=opened, work=work, task=task, named=stage.folders(values))
            with on_interrupt(stop), _located(name, outputs), places as written:
                claim(work, task, outputs)
                metrics: dict[str, float] = implementation(**opened, **written, **values, track=track)
                computed = True
        finally:
            release(work)
        shutil.rmtree(work, ignore_errors=True)
    _report(stage, metrics, outputs, track)
    return metrics


def preflight(names: Iterable[str], sections: Mapping[str, Any], places: Iterable[str | os.PathLike[str]]) -> None:
    """Check what stages will need, before anything trains.

    Args:
        names: keys of `STAGES`.
        sections: section name -> validated section, all that the stages see.
        places: directories that will be written.

    Raises:
        RamenError: a stage would fail later; nothing was changed.
    """
    names = list(names)
    work = work_directory({"stage": "", "sections": {}, "inputs": {}, "code": ""}).parent / "task"
    written = {Path(place): ROOM for place in places}
    for place in written:
        check_writable(place)
    check_writable(work, remedy=f"set {WORK_ENV} to another directory")
    if copies := sum(STAGES[name].copies for name in names):
        from ramen.encoder.checks import encoder_bytes

        weights = encoder_bytes(sections["encoder"].name)
        written[next(iter(written), work)] += copies * weights
        if any(STAGES[name].parallel for name in names):
            written[work] = CHECKPOINT_COPIES * weights
    check_room(written)
    for check in dict.fromkeys(check for name in names for check in STAGES[name].checks):
        module, function = check.split(":")
        getattr(importlib.import_module(module), function)(sections)


@contextlib.contextmanager
def _located(name: str, outputs: Mapping[str, str | os.PathLike[str]]) -> Iterator[None]:
    """Turn an error of the file system into one line; where it names no path, it names the stage's outputs."""
    try:
        yield
    except Exception as error:
        if not (reason := failed_io(error)):
            raise
        # other libraries' errors, and those of a write, name no path
        named = getattr(error, "filename", None) or any(f"{Path(place)}" in reason for place in outputs.values())
        where = "" if named else f"{', '.join(map(str, outputs.values()))}: "
        raise ArtifactError(f"{where}{reason} (stage {name}); no output was changed") from error


def record_cached(name: str, metrics: Mapping[str, float], outputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """Record a stage whose result came from a cache as a computed one is recorded, with the tag `ramen.cached`.

    Args:
        name: a key of `STAGES`.
        metrics: returned by the stage when it was computed.
        outputs: artifact name -> directory, as in `run_stage`.

    Raises:
        RamenError: an output has no readable manifest, or the tracking store cannot be reached.
    """
    stage = STAGES[name]
    manifest = read_manifest(outputs[stage.writes[0]], stage.writes[0])
    with open_tracker(name, {"ramen.cached": "true"}) as track:
        track.params(flat_params(manifest["sections"]))
        for key, digest in manifest["inputs"].items():
            track.dataset(key, digest, key)
        _report(stage, metrics, outputs, track)


def _report(
    stage: Stage, metrics: Mapping[str, float], outputs: Mapping[str, str | os.PathLike[str]], track: Tracker
) -> None:
    """Record a finished stage's metrics and the files that people open."""
    (track.headline if stage.headline else track.log)(metrics)
    for path in (Path(outputs[stage.writes[0]]) / name for name in stage.shown):
        if path.exists():
            track.artifact(path, path.name if path.is_dir() else "")


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Let go of what a stage made: a trained model hangs together in cycles, gigabytes that a next row would sit on.

    What was there before is not looked through, which would take half a second each time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def check_lineage(opened: Mapping[str, Artifact]) -> None:
    """What is read together must have been made from each other: rows of one are rows of the other.

    Raises:
        ArtifactError: an artifact was made from another one of a name than the one given.
    """
    for name, artifact in opened.items():
        for source, digest in artifact.manifest["inputs"].items():
            if source in opened and opened[source].digest != digest:
                maker = next(stage.name for stage in STAGES.values() if name in stage.writes)
                raise ArtifactError(
                    f"{artifact.path}: was made from another {source} than {opened[source].path}; run `ramen {maker}` "
                    f"again, or name the {source} that it was made from"
                )


def run_worker_rank(
    stage: Stage,
    implementation: Callable[..., dict[str, float]],
    opened: Mapping[str, Artifact],
    values: Mapping[str, Any],
    work: Path,
    task: Mapping[str, Any],
) -> dict[str, float]:
    """Take part in a stage that rank 0 reports and writes."""
    if not stage.parallel:
        return {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        written = {name: Draft(Path(folder) / name, work, task) for name in stage.writes}
        for draft in written.values():
            draft.path.mkdir()
        return implementation(**opened, **written, **values, track=NullTracker())
