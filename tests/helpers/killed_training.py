"""Train both stages while being killed at random, again and again, until they are done.

    python killed_training.py SECTIONS.json DATASET GRAPH OUT SEED

Each attempt is a forked child (everything heavy is imported once) that is sent SIGKILL after a random time. Prints one
JSON line: what each killed attempt said last.
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

import ramen.training.stage  # noqa: F401  what a forked child would otherwise import each time
from ramen.config import EncoderConfig
from ramen.encoder.loading import load_encoder

from training_recipe import train


def attempt(sections: dict, artifacts: dict[str, Path], out: Path, said: Path) -> None:
    """The child: finish what is not finished yet, then leave without a trace of the parent's state."""
    stream = said.open("w", encoding="utf-8", buffering=1)
    sys.stderr = stream
    try:
        train(artifacts, out, sections, again=False)
    except BaseException as error:
        print(f"failed {error!r}", file=stream, flush=True)
        os._exit(1)
    os._exit(0)


def main() -> None:
    sections, dataset, graph, out, seed = sys.argv[1:]
    values = json.loads(Path(sections).read_text(encoding="utf-8"))
    artifacts = {"dataset": Path(dataset), "graph": Path(graph)}
    rng = random.Random(int(seed))
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    load_encoder("tiny", EncoderConfig(name="tiny")).encode(["warm"])
    said = Path(out) / "said.txt"
    last: list[str] = []
    for number in range(200):
        child = os.fork()
        if child == 0:
            attempt(values, artifacts, Path(out), said)
        deadline = time.monotonic() + rng.uniform(0.1, 1.0 + 0.1 * number)  # a busy machine gets there, too
        status = None
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        words = said.read_text(encoding="utf-8").strip().splitlines()
        if status == 0:
            print(json.dumps(last))
            return
        if not os.WIFSIGNALED(status):
            sys.exit(f"attempt ended with {status}: {words[-1] if words else ''}")
        last.append(words[-1] if words else "")
    sys.exit("never finished")


if __name__ == "__main__":
    main()
