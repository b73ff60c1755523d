"""The table of stages, and `run_stage`, which the CLI, DVC and Kubeflow all use to run one.

A stage function lives in a package's `stage.py` and takes exactly these keyword arguments: its artifacts (`Artifact`
for inputs, `Draft` for outputs), its config sections, and `track`. It returns headline metrics as a flat dict. It
cannot read a knob that it did not declare, so a changed index knob re-runs neither training in DVC nor the cached KFP
task.

Nothing heavy is imported here: `impl` is resolved when the stage runs.
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

from ramen.artifacts import KINDS, Artifact, Draft, create_drafts, open_artifact, read_manifest
from ramen.errors import ArtifactError, Interrupted
from ramen.files import check_room, check_writable, describe_io_error, folder_sha256, wrap_read_errors
from ramen.processes import rank
from ramen.signals import on_interrupt
from ramen.tracking import NullTracker, Tracker, flat_params, open_tracker
from ramen.workdir import WORK_ENV, lock_workdir, record_task, remove_if_empty, work_directory, work_root

if TYPE_CHECKING:
    from ramen.config import Config

PACKAGE = Path(__file__).parent
MODEL_ARTIFACTS = {"warm_model", "model"}
"""A stage that reads one of these loads its encoder from it."""
MIN_FREE_BYTES = 8 << 20
"""Free space required for each output, in addition to the copies of the encoder's weights."""
CHECKPOINT_COPIES = 3
"""A checkpoint contains the weights and the two moments of the optimiser."""


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        name: command name.
        help: one line for `ramen --help`.
        reads, writes: artifact names.
        sections: config sections the stage may read.
        code: modules and packages under `ramen/` whose change must re-run the stage.
        impl: the stage function, as "module:function".
        checks: functions that check the stage's needs before anything trains; see `ramen.preflight`.
        copies: minimum size of the outputs, in copies of the encoder's weights (including the optimiser's moments).
        gpu: it trains or encodes, and uses an accelerator if there is one.
        parallel: several processes may run it together (`torchrun`); any other stage runs on rank 0 only.
        side_effects: it changes something outside its artifacts (a registry), so its result is never cached.
        headline: its metrics are also recorded on the pipeline's run, to compare pipelines row by row.
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
        """The name as a Python identifier and folder name, such as `prune_retrain`."""
        return self.name.replace("-", "_")

    def code_paths(self) -> list[Path]:
        """Return the files and folders of the package that the stage's result depends on."""
        common = ("artifacts.py", "config", "files.py", "stages.py", "yamlfile.py")
        return [PACKAGE / part for part in (*common, *self.code)]

    def code_version(self) -> str:
        """Return the sha256 (12 hex digits) of the source files that the stage's result depends on."""
        digest = hashlib.sha256()
        for root in self.code_paths():
            files = sorted([*root.rglob("*.py"), *root.rglob("*.j2")]) if root.is_dir() else [root]
            for file in files:
                digest.update(str(file.relative_to(PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()[:12]

    def cache_version(self, config: Config) -> str:
        """Return a version of everything a cached result depends on in addition to sections and inputs.

        These are the code, the raw data of the first stage, and the directories that knobs name.

        Raises:
            RamenError: the raw data or a named directory cannot be read.
        """
        from ramen.data import sources

        digests = self.knob_digests({name: getattr(config, name) for name in self.sections})
        if not self.reads:
            digests["data.path"] = sources.fingerprint(config.data)
        return "-".join([self.code_version(), *(digest[:12] for digest in digests.values())])

    def knob_digests(self, sections: Mapping[str, Any]) -> dict[str, str]:
        """Return the digests of the directories that knobs name, since their content may change: knob -> digest.

        Args:
            sections: name -> validated section.

        Raises:
            ArtifactError: a directory cannot be read, or `scoring.base` is not an evaluation.
        """
        folders = self.knob_folders(sections)
        digests = {}
        if folder := folders.get("encoder.name"):
            with wrap_read_errors(folder, "set encoder.name to a directory that can be read"):
                digests["encoder.name"] = folder_sha256(folder)
        if base := folders.get("scoring.base"):
            digests["scoring.base"] = open_artifact(base, "evaluation").digest
        return digests

    def knob_folders(self, sections: Mapping[str, Any]) -> dict[str, Path]:
        """Return the directories that knobs name in addition to the stage's inputs: knob -> path.

        Args:
            sections: name -> validated section.
        """
        folders = {}
        loads_encoder = not MODEL_ARTIFACTS & set(self.reads) or (
            "scoring" in sections and "untrained" in sections["scoring"].peers
        )
        if "encoder" in sections and loads_encoder and Path(sections["encoder"].name).is_dir():
            folders["encoder.name"] = Path(sections["encoder"].name)
        if "scoring" in sections and sections["scoring"].base:
            folders["scoring.base"] = Path(sections["scoring"].base)
        return folders


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
    """Return the default directory of an artifact."""
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
    """Run one stage: validate the sections, check the inputs, write drafts, rename them, return the metrics.

    Args:
        name: a key of `STAGES`.
        sections: section name -> values, at least those that the stage declares (others are ignored).
        inputs, outputs: artifact name -> directory, exactly those that the stage reads and writes; None = the defaults.
        track: receives parameters, datasets, metrics and files; None = nothing is tracked.

    Raises:
        RamenError: an error caused by the user's input or configuration; no output has changed.
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
        "inputs": {key: artifact.digest for key, artifact in opened.items()} | stage.knob_digests(values),
        "code": stage.code_version(),
    }
    work = work_directory(task)

    module, function = stage.impl.split(":")
    implementation = getattr(importlib.import_module(module), function)
    if rank() > 0:
        return run_worker_rank(stage, implementation, opened, values, work, task)
    computed = False

    def interrupt() -> None:
        if not computed:  # renaming several outputs must not be interrupted half-way
            raise Interrupted("interrupted; no output was changed")

    folders = stage.knob_folders(values)
    with lock_workdir(work, task), _freed_memory():
        try:
            created = create_drafts(outputs, sections=plain, inputs=opened, work=work, task=task, named=folders)
            with on_interrupt(interrupt), _reported_io_errors(name, outputs), created as written:
                record_task(work, task, outputs)
                metrics: dict[str, float] = implementation(**opened, **written, **values, track=track)
                computed = True
        finally:
            remove_if_empty(work)
        shutil.rmtree(work, ignore_errors=True)
    _record_results(stage, metrics, outputs, track)
    return metrics


def preflight(names: Iterable[str], sections: Mapping[str, Any], outputs: Iterable[str | os.PathLike[str]]) -> None:
    """Check disk space, permissions and the stages' own checks before anything trains.

    Args:
        names: keys of `STAGES`.
        sections: section name -> validated section, all that the stages read.
        outputs: directories that will be written.

    Raises:
        RamenError: a stage would fail later; nothing was changed.
    """
    names = list(names)
    work = work_root() / "task"
    needed = {Path(path): MIN_FREE_BYTES for path in outputs}
    for path in needed:
        check_writable(path)
    check_writable(work, remedy=f"set {WORK_ENV} to another directory")
    if copies := sum(STAGES[name].copies for name in names):
        from ramen.encoder.checks import encoder_bytes

        weights = encoder_bytes(sections["encoder"].name)
        needed[next(iter(needed), work)] += copies * weights
        if any(STAGES[name].parallel for name in names):
            needed[work] = CHECKPOINT_COPIES * weights
    check_room(needed)
    for check in dict.fromkeys(check for name in names for check in STAGES[name].checks):
        module, function = check.split(":")
        getattr(importlib.import_module(module), function)(sections)


@contextlib.contextmanager
def _reported_io_errors(name: str, outputs: Mapping[str, str | os.PathLike[str]]) -> Iterator[None]:
    """Turn an error of the file system into one line; if it names no path, add the stage's outputs."""
    try:
        yield
    except Exception as error:
        if not (reason := describe_io_error(error)):
            raise
        has_path = getattr(error, "filename", None) or any(f"{Path(path)}" in reason for path in outputs.values())
        where = "" if has_path else f"{', '.join(map(str, outputs.values()))}: "
        raise ArtifactError(f"{where}{reason} (stage {name}); no output was changed") from error


def record_cached(name: str, metrics: Mapping[str, float], outputs: Mapping[str, str | os.PathLike[str]]) -> None:
    """Track a stage whose result came from a cache like a computed one, with the tag `ramen.cached`.

    Args:
        name: a key of `STAGES`.
        metrics: returned when the stage was computed.
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
        _record_results(stage, metrics, outputs, track)


def _record_results(
    stage: Stage, metrics: Mapping[str, float], outputs: Mapping[str, str | os.PathLike[str]], track: Tracker
) -> None:
    """Track the metrics of a finished stage and the files listed in `Stage.shown`."""
    (track.headline if stage.headline else track.log)(metrics)
    for path in (Path(outputs[stage.writes[0]]) / name for name in stage.shown):
        if path.exists():
            track.artifact(path, path.name if path.is_dir() else "")


@contextlib.contextmanager
def _freed_memory() -> Iterator[None]:
    """Free the stage's memory: a trained model has reference cycles that would keep gigabytes alive until the next row.

    Objects that existed before are frozen: collecting them would take half a second each time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def check_lineage(opened: Mapping[str, Artifact]) -> None:
    """Check that artifacts which are read together were made from each other, so that their rows correspond.

    Args:
        opened: artifact name -> artifact.

    Raises:
        ArtifactError: an artifact was made from another input than the one given.
    """
    for name, artifact in opened.items():
        for source, digest in artifact.manifest["inputs"].items():
            if source in opened and opened[source].digest != digest:
                maker = next(stage.name for stage in STAGES.values() if name in stage.writes)
                raise ArtifactError(
                    f"{artifact.path}: was made from another {source} than {opened[source].path}; run `ramen {maker}` "
                    f"again, or pass the {source} that it was made from"
                )


def run_worker_rank(
    stage: Stage,
    implementation: Callable[..., dict[str, float]],
    opened: Mapping[str, Artifact],
    values: Mapping[str, Any],
    work: Path,
    task: Mapping[str, Any],
) -> dict[str, float]:
    """Run a stage on a rank other than 0, which neither writes artifacts nor reports."""
    if not stage.parallel:
        return {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        written = {name: Draft(Path(folder) / name, work, task) for name in stage.writes}
        for draft in written.values():
            draft.path.mkdir()
        return implementation(**opened, **written, **values, track=NullTracker())
