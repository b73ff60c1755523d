"""Run the pipeline on Kubeflow's local subprocess runner: the same components as on a cluster, with a cache."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipelines.console import Console
from pipelines.ramen import Outputs, build
from ramen.base_run import BASE, RAMEN, base_config, graph_uses, with_base_evaluation
from ramen.cleanup import drop_cached_result
from ramen.config import Config, to_yaml
from ramen.console import warn
from ramen.data import sources
from ramen.errors import Interrupted, RamenError
from ramen.files import apply_umask, read_json
from ramen.processes import environment
from ramen.provenance import ARM_ENV
from ramen.signals import on_interrupt
from ramen.stages import STAGES, preflight, record_cached
from ramen.tracking import start_pipeline_run

STORE = ".kfp"
"""Folder under `--out` that holds the runner's outputs and its cache."""


def check_run(config: Config, out: Path, *, with_base: bool = True) -> None:
    """Check what `run_with_base` needs, before anything is computed or written.

    Raises:
        RamenError: a stage would fail, or a file is where the run places a link.
    """
    preflight(STAGES, dict(config), (out / arm for arm in (BASE, RAMEN)))
    for arm in (BASE, RAMEN) if with_base else (RAMEN,):
        check_links(out, arm)


def run_with_base(
    config: Config, out: Path, *, with_base: bool = True, announce: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, Path] | None]:
    """Run the pipeline and, for comparison, its base run first; each is tracked as an MLflow run.

    A configuration that uses no graph is its own base run, and is run once, as the base.

    Args:
        config: the configuration.
        out: folder of both arms; see `run_local`.
        with_base: whether to run the base first.
        announce: receives one line per arm when the arm starts.

    Returns:
        Links to the artifacts of the run, and those of the base run or None, as from `run_local`.

    Raises:
        RamenError, Interrupted: as `run_local`.
    """
    sources.fetch_if_missing(config.data)
    if not graph_uses(config):
        return run_arm(BASE, config, out, announce), None
    base = None
    if with_base:
        base = run_arm(BASE, base_config(config), out, announce)
        config = with_base_evaluation(config, base["evaluation"])
    return run_arm(RAMEN, config, out, announce), base


def run_arm(arm: str, config: Config, out: Path, announce: Callable[[str], None]) -> dict[str, Path]:
    """Run the pipeline once, as an MLflow run named after the arm; returns the artifacts' links."""
    uses = graph_uses(config)
    announce(f"{arm}: with {' and '.join(uses)}" if uses else f"{arm}: without graphs")
    with start_pipeline_run(arm, to_yaml(config), {"ramen.arm": arm}, config.sections()):
        return run_local(config, out, arm=arm)


def run_local(config: Config, out: Path, *, arm: str) -> dict[str, Path]:
    """Run all stages. A stage comes from the cache while its code, sections, inputs and raw data are unchanged.

    Args:
        config: the configuration.
        out: receives one link per artifact, `<out>/<arm>/<artifact>`; all arms share the files in `<out>/.kfp`.
        arm: name of the variant ("ramen", "base").

    Returns:
        Artifact name -> its link.

    Raises:
        RamenError: a stage failed; the message is the stage's.
        Interrupted: SIGTERM or Ctrl-C; a running training stage wrote a checkpoint first.
    """
    from kfp import local

    check_links(out, arm)
    store = (out / STORE).absolute()
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=str(store), raise_on_error=True, enable_caching=True,
        cache_root=str(store / "cache"),
    )  # fmt: skip
    console = Console(sys.stderr)
    with environment({ARM_ENV: arm}), console.attached(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pipeline = build(config, cache_versions(config), retry=False)
            finished = _run_and_recover(pipeline, console, store)
        finally:
            if (store / "cache").is_dir():  # the runner writes its entries with mode 0600
                apply_umask(store / "cache")
        made = {name: Path(finished.outputs[name].path) for name in Outputs._fields}
        for stage in console.cached:
            outputs = {name: made[name] for name in STAGES[stage].writes}
            scalars = outputs[STAGES[stage].writes[0]].parent / "scalars"
            record_cached(stage, read_json(scalars, dict[str, float]), outputs)
    return {name: _link(out / arm / name, target) for name, target in made.items()}


def _run_and_recover(pipeline: Callable[[], Any], console: Console, store: Path) -> Any:
    """Run the pipeline; if it fails on a cached artifact, remove that cache entry.

    After `ramen gc` removed training state the pipeline runs a second time; a damaged artifact is reported.
    """
    try:
        return _run(pipeline, console)
    except RamenError as error:
        text, _, remedy = str(error).rpartition("; ")
        stage = drop_cached_result(store, str(error)) if remedy.startswith("run ") else ""
        if not stage:
            raise
        if "removed by `ramen gc`" not in text:
            damaged = RamenError(f"{text}; run the same command again, which computes {stage} again")
            damaged.exit_code = error.exit_code
            raise damaged from None
        warn("`ramen gc` removed the training state that prune-retrain needs: warmup runs again")
        console.cached.clear()
        return _run(pipeline, console)


def _run(pipeline: Callable[[], Any], console: Console) -> Any:
    """Run the pipeline; on SIGTERM or Ctrl-C, signal the running stage and wait for it to end."""

    def stop() -> None:
        console.stop()
        _signal_stage(signal.SIGTERM)

    with on_interrupt(stop):
        try:
            return pipeline()
        except RuntimeError as error:
            if console.stopped:
                raise Interrupted(console.failure() or "stopped on request") from None
            failed = RamenError(console.failure() or str(error))
            failed.exit_code = console.exit_code
            raise failed from None
        except KeyboardInterrupt:
            _signal_stage(signal.SIGKILL)
            raise Interrupted("stopped on request") from None


def _signal_stage(number: signal.Signals) -> None:
    """Signal the running stage; the runner starts it from a shell, which does not pass signals on."""
    with suppress(psutil.Error):  # the process has ended
        for shell in psutil.Process().children():
            for process in shell.children() or [shell]:
                process.send_signal(number)


def cache_versions(config: Config) -> dict[str, str]:
    """Return, per stage, what its cached result depends on in addition to its inputs."""
    return {name: stage.cache_version(config) for name, stage in STAGES.items()}


def check_links(out: Path, arm: str) -> None:
    """Raise RamenError if something other than a link is where a run links its artifacts."""
    for path in (out / arm / name for name in Outputs._fields):
        if path.exists() and not path.is_symlink():
            raise RamenError(
                f"{path}: is not a link, but the run places a link to its {path.name} there; move it away, or give "
                "another --out"
            )


def _link(path: Path, target: Path) -> Path:
    """Make `path` a relative link to `target`, replacing an older link in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.link"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent.absolute()))
    temporary.replace(path)
    return path
