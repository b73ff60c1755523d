"""The trainer of sentence-transformers: MultipleNegativesRankingLoss with mined hard negatives, for a given time.

Initial weights, text length, batch size, optimiser settings, precision and held-out documents are those of RAMEN. The
time limit includes loading, mining and training; the learning rate depends on the remaining time and reaches 0 at the
limit.
"""

from __future__ import annotations

import time
from typing import Any

import datasets
import numpy as np
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import mine_hard_negatives
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, TrainerCallback

from ramen.console import report
from ramen.data.dataset import Dataset
from ramen.encoder.loading import load_encoder
from ramen.encoder.model import use_bf16
from ramen.peers import Rank, Task
from ramen.retrieval import RETRIEVED, search
from ramen.training.heldout import split_held_out
from ramen.training.setup import ADAM_EPS
from ramen.training.trainer import CLIP_NORM

EMBED_BATCH = 256
MAX_STEPS = 1 << 30
"""Step limit, never reached: the time limit ends training."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """Stops training at the time limit and computes the learning rate from the remaining time.

    Args:
        seconds: time limit, starting now.
        warmup: number of steps in which the learning rate rises linearly.
    """

    def __init__(self, seconds: float, warmup: int) -> None:
        self.deadline = time.monotonic() + seconds
        self.warmup = warmup
        self.start = 0.0

    def learning_rate(self, step: int) -> float:
        """Return the factor of the peak learning rate: linear rise in steps, then linear decay in time."""
        remaining = (self.deadline - time.monotonic()) / max(self.deadline - self.start, 1e-9)
        return min(max(remaining, 0.0), (step + 1) / (self.warmup + 1))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = time.monotonic() >= self.deadline


class TimedTrainer(SentenceTransformerTrainer):  # type: ignore[misc]
    """Trainer with the learning rate of a `Clock`."""

    def __init__(self, clock: Clock, **kwargs: Any) -> None:
        super().__init__(callbacks=[clock], **kwargs)
        self.clock = clock

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """See the base class."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.clock.learning_rate)
        return self.lr_scheduler


def fit(task: Task) -> Rank:
    """Mine negatives with the initial weights, then train until the time limit."""
    problem, training = task.problem, task.training
    clock = Clock(task.seconds, training.lr_warmup_steps)
    datasets.disable_progress_bars()
    load_encoder(task.encoder.name, task.encoder, "cpu").save(task.work / "start")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(training.seed)
    model = SentenceTransformer(str(task.work / "start"), device=device)
    model.model_card_data.generate_widget_examples = False
    pairs = training_pairs(problem, split_held_out(problem, training)[1])
    bf16 = use_bf16(task.encoder.precision, device)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        rows = mine_hard_negatives(
            pairs,
            model,
            corpus=[problem.labels.texts[i] for i in np.setdiff1d(np.arange(len(problem.labels)), problem.unseen)],
            num_negatives=1,
            batch_size=EMBED_BATCH,
            use_faiss=True,
            verbose=False,
        )
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(task.work / "trainer"),
        per_device_train_batch_size=training.batch_size,
        max_steps=MAX_STEPS,
        learning_rate=training.lr,
        weight_decay=training.weight_decay,
        adam_epsilon=ADAM_EPS,
        max_grad_norm=CLIP_NORM,
        bf16=bf16,
        use_cpu=device == "cpu",
        batch_sampler="no_duplicates",
        seed=training.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        clock, model=model, args=arguments, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = trainer.state.global_step
    epochs = steps * training.batch_size / len(rows)
    report(f"sentence-transformers: {steps} steps in {task.seconds:.0f} s, {epochs:.1f} epochs")
    model.eval()

    def rank() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            documents, labels = (
                model.encode(texts.texts, batch_size=EMBED_BATCH, show_progress_bar=False).astype(np.float32)
                for texts in (problem.test, problem.labels)
            )
        return search(documents, labels, RETRIEVED, candidates=problem.candidates)

    return rank


def training_pairs(problem: Dataset, documents: Any) -> datasets.Dataset:
    """Return all positive pairs of the given training documents as columns `anchor` and `positive` (texts)."""
    pairs = problem.positives[documents].tocoo()
    kept = ~np.isin(pairs.col, problem.unseen)
    return datasets.Dataset.from_dict(
        {
            "anchor": [problem.train.texts[i] for i in documents[pairs.row[kept]]],
            "positive": [problem.labels.texts[i] for i in pairs.col[kept]],
        }
    )
