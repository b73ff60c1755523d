"""Growth: time and peak memory of the steps that process all labels, at 10,000, 100,000 and 1,000,000 labels.

    python benchmarks/growth.py                      all sizes (the largest takes minutes and 2 GB of scratch disk)
    python benchmarks/growth.py --sizes 10000 100000

The data are simulated texts in the layout of the Extreme Classification Repository: as many documents as labels, two
labels per document, a tenth as many test documents, two anchor sets with about five edges per row. Each part runs in a
separate process, so that its peak memory is measured separately; ingest and build-graph are the stages of the pipeline.
The exponent relates time to the number of labels between the last two sizes; 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

WIDTH, QUERIES, DEPTH = 384, 1024, 100
WORDS = 30_000
SETS = {"wide": 2, "narrow": 20}
"""Anchor set -> labels per anchor."""


def text_lines(count: int, seed: int) -> Iterator[str]:
    """Yield lines `identifier->text` with three to eight words of Zipf frequency."""
    rng = np.random.default_rng(seed)
    for start in range(0, count, 100_000):
        size = min(100_000, count - start)
        lengths = rng.integers(3, 9, size)
        numbers = np.minimum(rng.zipf(1.2, int(lengths.sum())), WORDS)
        words = [f"word{number}" for number in numbers.tolist()]
        stop = np.cumsum(lengths).tolist()
        for i, (length, end) in enumerate(zip(lengths.tolist(), stop, strict=True)):
            yield f"t{seed}-{start + i}->{' '.join(words[end - length : end])} {start + i}\n"


def matrix_lines(rows: int, columns: int, mean: int, seed: int) -> Iterator[str]:
    """Yield header and rows of a sparse matrix with one to 2 mean - 1 entries per row."""
    rng = np.random.default_rng(seed)
    yield f"{rows} {columns}\n"
    for start in range(0, rows, 100_000):
        size = min(100_000, rows - start)
        for row in rng.integers(0, columns, (size, 2 * mean - 1)).tolist():
            kept = sorted(set(row[: 1 + row[0] % (2 * mean - 1)]))
            yield " ".join(f"{column}:1.0" for column in kept) + "\n"


def write_source(folder: Path, labels: int) -> None:
    """Write a simulated data set to disk, line by line."""
    documents, test = labels, labels // 10
    raw = folder / "raw_data"
    raw.mkdir(parents=True)
    for seed, (name, count) in enumerate((("train", documents), ("test", test), ("label", labels))):
        with (raw / f"{name}.raw.txt").open("w", encoding="utf-8") as file:
            file.writelines(text_lines(count, seed))
    matrices = {"trn_X_Y.txt": (documents, labels, 2), "tst_X_Y.txt": (test, labels, 2)}
    for seed, (name, share) in enumerate(SETS.items()):
        with (raw / f"{name}.raw.txt").open("w", encoding="utf-8") as file:
            file.writelines(text_lines(labels // share, 10 + seed))
        matrices[f"{name}_trn_X_Y.txt"] = (documents, labels // share, 5)
        matrices[f"{name}_lbl_X_Y.txt"] = (labels, labels // share, 5)
    for seed, (name, (rows, columns, mean)) in enumerate(matrices.items()):
        with (folder / name).open("w", encoding="utf-8") as file:
            file.writelines(matrix_lines(rows, columns, mean, 20 + seed))


def run_ingest(folder: Path, labels: int) -> None:
    """Stage `ingest`."""
    from ramen.stages import run_stage

    data = {"source": "xc", "path": str(folder / "source")}
    run_stage("ingest", sections={"data": data}, outputs={"dataset": folder / "dataset"})


def run_graph(folder: Path, labels: int) -> None:
    """Stage `build-graph`, with the published walk."""
    from ramen.config import resolve
    from ramen.stages import run_stage

    sections = resolve(preset="paper").sections(["walk"])
    run_stage(
        "build-graph",
        sections=sections,
        inputs={"dataset": folder / "dataset"},
        outputs={"graph": folder / "graph"},
    )


def run_tokens(folder: Path, labels: int) -> None:
    """Tokenise every distinct text, as training does at its start."""
    from ramen.config import EncoderConfig
    from ramen.data.dataset import Dataset
    from ramen.encoder.loading import load_encoder
    from ramen.training.inputs import tokenise

    tokenise(load_encoder("tiny", EncoderConfig(name="tiny")), Dataset.read(folder / "dataset"))


def run_retrieval(folder: Path, labels: int) -> None:
    """Search 1,024 documents over all labels exactly, as mining, validation and evaluation do."""
    from ramen.retrieval import search

    vectors = np.random.default_rng(0).standard_normal((labels, WIDTH), np.float32)
    search(vectors[:QUERIES].copy(), vectors, DEPTH)


def run_metrics(folder: Path, labels: int) -> None:
    """Compute all metrics for a tenth as many test documents as labels."""
    from ramen.data.dataset import Dataset
    from ramen.evaluation.metrics import compute_metrics, inverse_propensity

    problem = Dataset.read(folder / "dataset")
    first = np.random.default_rng(0).integers(0, labels - DEPTH, (len(problem.test), 1))
    compute_metrics(first + np.arange(DEPTH), problem.y_test, inverse_propensity(problem.y_train, 0.55, 1.5))


PARTS: dict[str, Callable[[Path, int], None]] = {
    "ingest": run_ingest,
    "build-graph": run_graph,
    "tokens": run_tokens,
    "retrieval": run_retrieval,
    "metrics": run_metrics,
}


def measure(part: str, folder: Path, labels: int) -> tuple[float, float]:
    """Run a part in a separate process; return seconds, including imports, and peak memory in GiB."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--sizes", str(labels)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RAMEN_TRACKING": "off"})
    if done.returncode:
        sys.exit(f"{part}: {done.stderr.strip()}")
    seconds, peak = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        started = time.perf_counter()
        os.chdir(args.folder)
        PARTS[args.part](args.folder, args.sizes[0])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps([time.perf_counter() - started, peak]))
        return
    figures: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    for labels in args.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_source(folder / "source", labels)
            for part in PARTS:
                figures[part].append(measure(part, folder, labels))
                print(
                    f"{labels:>9} {part:12} {figures[part][-1][0]:8.1f} s {figures[part][-1][1]:6.2f} GiB", flush=True
                )
    print(f"{'part':12}" + "".join(f"{labels:>20}" for labels in args.sizes) + "  exponent")
    for part, values in figures.items():
        cells = "".join(f"{seconds:11.1f} s{peak:5.1f} GiB" for seconds, peak in values)
        exponent = ""
        if len(values) > 1:
            growth = math.log(values[-1][0] / values[-2][0]) / math.log(args.sizes[-1] / args.sizes[-2])
            exponent = f"{growth:10.2f}"
        print(f"{part:12}{cells}{exponent}")


if __name__ == "__main__":
    main()
