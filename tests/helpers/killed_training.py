"""Run both training stages in processes that are killed at random times, until the stages are done.

    python killed_training.py SECTIONS.json DATASET GRAPH OUT SEED

Each attempt is a forked child, so that heavy imports happen once, and receives SIGKILL after a random time. Prints one
line of JSON: the last line that each killed attempt printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

import torch

import ramen.training.stage  # noqa: F401  imported before the fork
from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder

from training_recipe import train


def run_attempt(sections: dict, artifacts: dict[str, Path], out: Path, log: Path) -> None:
    """Run the unfinished stages in the child, and exit without the parent's cleanup."""
    stream = log.open("w", encoding="utf-8", buffering=1)
    sys.stderr = stream
    try:
        train(artifacts, out, sections, skip_finished=True)
    except BaseException as error:
        print(f"failed {error!r}", file=stream, flush=True)
        os._exit(1)
    os._exit(0)


def main() -> None:
    sections, dataset, graph, out, seed = sys.argv[1:]
    values = json.loads(Path(sections).read_text(encoding="utf-8"))
    artifacts = {"dataset": Path(dataset), "graph": Path(graph)}
    rng = random.Random(int(seed))
    torch.set_num_threads(1)  # a fork would lose a pool of threads
    load_encoder("tiny", EncoderConfig(name="tiny")).encode(["warm"])
    log = Path(out) / "log.txt"
    last_lines: list[str] = []
    for number in range(200):
        child = os.fork()
        if child == 0:
            run_attempt(values, artifacts, Path(out), log)
        # longer after each attempt, so that a busy machine finishes, too
        deadline = time.monotonic() + rng.uniform(0.1, 1.0 + 0.05 * number)
        status = None
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        if status == 0:
            print(json.dumps(last_lines))
            return
        if not os.WIFSIGNALED(status):
            sys.exit(f"attempt ended with {status}: {lines[-1] if lines else ''}")
        last_lines.append(lines[-1] if lines else "")
    sys.exit("not finished after 200 attempts")


if __name__ == "__main__":
    main()
