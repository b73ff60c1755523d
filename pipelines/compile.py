"""Compile the pipeline to the YAML that `kfp run submit` accepts."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from pipelines.ramen import build
from ramen import __version__
from ramen.config import Config, resolve
from ramen.files import write_text
from ramen.stages import STAGES

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Compiled by `ramen compile` from pipelines/ramen.py and params.yaml; change those instead.\n"


def compiled_text(config: Config | None = None, image: str | None = None) -> str:
    """Return the pipeline as YAML; equal input gives equal bytes.

    Args:
        config: defaults of the pipeline's parameters; None = the repository's params.yaml, or the preset `demo`.
        image: image of every task; None = `components.image.IMAGE`.
    """
    from kfp import compiler

    params = ROOT / "params.yaml"
    config = config or (resolve(params=params) if params.is_file() else resolve(preset="demo"))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build(config, dict.fromkeys(STAGES, __version__)), str(path))
        text = path.read_text(encoding="utf-8")
    # the order of the parameters in kfp's own header differs between processes
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    if image is not None:
        from components.image import IMAGE

        text = text.replace(IMAGE, image)
    return HEADER + text


def compile_pipeline(path: Path, config: Config | None = None, image: str | None = None) -> None:
    """Write `compiled_text` to a file, atomically."""
    write_text(path, compiled_text(config, image))
