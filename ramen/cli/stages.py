"""One command per stage, generated from the stage table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ramen.cli import tables
from ramen.cli.common import PATH, config_options, show_progress
from ramen.errors import ConfigError
from ramen.files import check_writable, write_text
from ramen.processes import rank
from ramen.stages import Stage, default_path, run_stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ramen.config import Config


def metrics_path(stage: str) -> Path:
    """Return the default path of a stage's metrics."""
    return Path("metrics") / f"{stage}.json"


def write_metrics(path: Path, metrics: Mapping[str, float]) -> None:
    """Write metrics as flat, sorted JSON, atomically; values that are not finite become null."""
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    write_text(path, json.dumps(finite, indent=2, sort_keys=True) + "\n")


def stage_command(stage: Stage) -> click.Command:
    """Return the command of a stage: one path option per artifact, the configuration options, and `--metrics`."""

    @config_options
    def callback(resolve: Callable[..., Config], metrics: Path, **values: Any) -> None:
        from ramen.tracking import open_tracker

        check_writable(metrics, "--metrics ")
        if metrics.is_dir():
            raise ConfigError(
                f"--metrics {metrics}: is a directory; give a file, such as {metrics / metrics_path(stage.name).name}"
            )
        show_progress()
        shorthands = {"source": "data.source", "path": "data.path"}
        more = [f"{knob}={values[key]}" for key, knob in shorthands.items() if values.get(key) is not None]
        sections = resolve(*more).sections(stage.sections)
        outputs = {name: values[name] for name in stage.writes}
        with open_tracker(stage.name) as track:
            result = run_stage(
                stage.name,
                sections=sections,
                inputs={name: values[name] for name in stage.reads},
                outputs=outputs,
                track=track,
            )
        if rank() > 0:  # rank 0 reports for all processes
            return
        write_metrics(metrics, result)
        if stage.name == "evaluate":  # a hundred metrics: print a table, the file has all
            tables.print_evaluation(result)
        else:
            for key, value in sorted(result.items()):
                click.echo(f"{key} {value:.6g}")
        click.echo(f"metrics: {metrics}")
        for name, path in outputs.items():
            click.echo(f"{name}: {path}")

    command = click.command(stage.name, help=_help(stage))(callback)
    command.params[:0] = [*_artifact_options(stage), *_shorthands(stage)]
    metrics = click.Option(
        ["--metrics"], type=PATH, default=metrics_path(stage.name), show_default=True, help="File for the metrics."
    )
    command.params.append(metrics)
    return command


def _artifact_options(stage: Stage) -> list[click.Option]:
    written = "to write; replaces an older one that ramen wrote"
    roles = [(name, "to read") for name in stage.reads] + [(name, written) for name in stage.writes]
    return [
        click.Option(
            [f"--{name.replace('_', '-')}", name],
            type=PATH,
            metavar="DIR",
            default=default_path(name),
            show_default=True,
            help=f"Artifact {role}.",
        )
        for name, role in roles
    ]


def _shorthands(stage: Stage) -> list[click.Option]:
    if "data" not in stage.sections:
        return []
    return [
        click.Option(["--source"], metavar="NAME", help="Short for --set data.source=NAME."),
        click.Option(["--path"], type=PATH, help="Path of your data; short for --set data.path=PATH."),
    ]


def _help(stage: Stage) -> str:
    text = f"{stage.help[0].upper()}{stage.help[1:]}.\n\nConfig sections: {', '.join(stage.sections)}."
    return f"{text}\n\n\b\nExample:\n  ramen {stage.name} {_EXAMPLES[stage.name]}"


_EXAMPLES = {
    "ingest": "--preset xc --set data.path=data/LF-WikiSeeAlsoTitles-320K",
    "build-graph": "--set walk.hops=400 --set walk.top_k=5",
    "warmup": "--set training.lr=1e-4",
    "prune-retrain": "--set pruning.quantile=0.9",
    "evaluate": "--set scoring.links=true",
    "publish-index": "--set index.kind=flat",
}
