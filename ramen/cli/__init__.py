"""`ramen ...`: one command per stage of the table, and the commands that run, read and derive.

Only click and the stage table are imported here; everything else is imported inside the command that needs it, so
that `ramen --help` answers at once. A RamenError prints its lines on stderr and ends with its class's exit code;
anything else is a bug and keeps its traceback.
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
  ramen run --preset demo                      the whole pipeline, beside its base
  ramen run --preset xc --set data.path=DIR    your own data, all of it
  ramen ingest --preset xc --set data.path=DIR one stage: your data, checked
  ramen query "command line mail client" -k 5  ask the published index
  ramen compare                                runs side by side
  ramen ablate --preset demo --study bases     a study over seeds, as one table
  ramen probe                                  what the graphs say about the task
  ramen config --preset debian -o params.yaml  a commented parameter file
"""


@click.group(cls=CommandGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ramen", message="%(prog)s %(version)s")
def cli() -> None:
    """Graph-regularised encoder training for extreme classification, as a pipeline.

    Values are resolved as: defaults < --preset < parameter file < --set. Without --preset and --params, params.yaml of
    the working directory is read if there is one.
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
    # OpenMP threads spin before they sleep, by default millions of turns: next to any other busy process training was
    # ten times slower. At this count an idle machine loses nothing and two busy processes share it fairly.
    "GOMP_SPINCOUNT": "10000",
    # keep freed memory: glibc gives every large tensor back to the system, and getting it again was a tenth of a step
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # large pages: a step touches a gigabyte
}
"""Environment of the processes that train, unless the caller set it. OpenMP reads it when torch is loaded; the
allocator when a process starts, so only the stages of `ramen run` profit."""


def main() -> None:
    """Entry point of the console script."""
    for name, value in PROCESS_DEFAULTS.items():
        os.environ.setdefault(name, value)
    cli(prog_name="ramen")
