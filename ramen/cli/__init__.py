"""The command line: one command per stage, and commands for whole runs, clusters, the registry and the project.

Only click and the stage table are imported here. Commands import the rest when they run, so that `ramen --help` is
fast. For a RamenError, the CLI prints its lines to stderr and exits with the code of its class; any other exception is
a bug and keeps its traceback.
"""

from __future__ import annotations

import os

import click

from ramen.cli import cluster, project, registry, runs, use
from ramen.cli.ablate import ablate
from ramen.cli.common import CommandGroup
from ramen.cli.probe import probe
from ramen.cli.stages import stage_command
from ramen.stages import STAGES
from ramen.tracking import use_project_store

EXAMPLES = """\b
Examples:
  ramen run --preset demo                      the whole pipeline, compared with its base
  ramen run --preset xc --set data.path=DIR    the whole pipeline on your own data
  ramen ingest --preset xc --set data.path=DIR one stage: read and check your data
  ramen query "command line mail client" -k 5  query the published index
  ramen compare                                the newest runs in one table
  ramen ablate --preset demo --study bases     a study over several seeds, in one table
  ramen probe                                  what the graphs add to the texts, before training
  ramen config --preset debian -o params.yaml  a parameter file with comments
"""


@click.group(cls=CommandGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ramen", message="%(prog)s %(version)s")
def cli() -> None:
    """Graph-regularised encoder training for extreme classification, as a pipeline.

    Configuration values: --set overrides the parameter file, which overrides --preset, which overrides the defaults.
    Without --preset and --params, ramen reads params.yaml from the working directory if it exists.
    """
    use_project_store()


cli.add(
    "Pipeline",
    runs.run,
    *(stage_command(stage) for stage in STAGES.values()),
)
cli.add("Cluster", cluster.submit, cluster.dvc_adopt, cluster.tracking)
cli.add("Use", use.query, use.serve, runs.compare, ablate, probe)
cli.add("Registry", registry.registry, registry.promote, registry.rollback, registry.index_update)
cli.add("Project", project.fetch, project.gc, project.config, project.compile, project.sync)


PROCESS_DEFAULTS = {
    # OpenMP threads spin before they sleep, by default for millions of iterations, which made training ten times slower
    # next to another busy process. This count costs nothing on an idle machine.
    "GOMP_SPINCOUNT": "10000",
    # glibc returns every large tensor to the system; allocating it again took a tenth of a training step
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages: a step touches a gigabyte
}
"""Environment of training processes, unless the caller set it. OpenMP reads it when torch is imported. The allocator
reads it when a process starts, so only the stages of `ramen run` benefit."""


def main() -> None:
    """Entry point of the console script."""
    for name, value in PROCESS_DEFAULTS.items():
        os.environ.setdefault(name, value)
    cli(prog_name="ramen")
