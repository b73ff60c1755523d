"""Load test of `ramen serve`: many clients that send valid and hostile requests.

    python benchmarks/serving_load.py                      64 clients for 60 s, on a small published index
    python benchmarks/serving_load.py --url http://host:8000 --pid 123    a running server

Prints requests per second, latencies, responses by status and the server's memory. The exit code is 1 if a response has
a status of 500 or above (except 503 of a full server), if memory grows by more than `--most-growth` MB after the first
quarter of the time, or if the server does not exit with code 0 within 30 s of SIGTERM.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

WORDS = ("mail", "client", "editor", "library", "kernel", "game", "network", "fonts", "python", "terminal", "music")
STOP_SECONDS = 30


def publish_index(folder: Path) -> None:
    """Register a small index of random labels as ramen@champion in the folder's tracking store."""
    from ramen.config import EncoderConfig, IndexConfig
    from ramen.encoder.loading import load_encoder
    from ramen.files import sha256
    from ramen.index.build import build_index
    from ramen.index.retriever import write_retriever
    from ramen.publishing.publish import publish
    from ramen.tracking import open_tracker

    rng, settings = random.Random(0), IndexConfig(kind="flat")
    texts = [" ".join(rng.choices(WORDS, k=4)) for _ in range(2000)]
    encoder = load_encoder("tiny", EncoderConfig(name="tiny"))
    encoder.save(folder / "model")
    files = {
        str(file.relative_to(folder / "model")): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted((folder / "model").rglob("*"))
        if file.is_file()
    }
    (folder / "retriever").mkdir()
    vectors = encoder.encode(texts)
    write_retriever(
        folder / "retriever", build_index(vectors, settings), [f"label-{i}" for i in range(len(texts))], texts,
        encoder_files=files, facts={"kind": "flat", "dimension": vectors.shape[1]},
    )  # fmt: skip
    with open_tracker("load") as track:
        assert track.run_id
        publish(
            folder / "retriever", folder / "model", run_id=track.run_id, settings=settings,
            tags={"dataset": "load", "ann_recall": "1.0"}, sample=texts[:1],
        )  # fmt: skip


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the published index within the context; yield the server's address and process."""
    command = [sys.executable, "-m", "ramen", "serve", "--port", "0"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()


def make_body(rng: random.Random) -> bytes:
    """Return a request body; three of four are valid."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    valid: list[dict[str, object]] = [
        {"text": text},
        {"text": text, "k": rng.choice([1, 10, 100, 1000])},
        {"text": text * 100, "k": 10, "explain": True},
        {"text": text, "version": rng.choice(["1", "champion"]), "exclude": [f"label-{i}" for i in range(50)]},
    ]
    hostile = [
        b'{"text": NaN}', b'{"text": "\\ud800"}', b'{"text": "x", "k": 1e400}', b"[" * 20_000, b"\xff\xfe",
        json.dumps({"text": "x" * 500_000}).encode(), b'{"text": "' + b"x" * 3_000_000 + b'"}',
        json.dumps(dict.fromkeys(map(str, range(5000)))).encode(), '{"text": "x", "version": "²"}'.encode(),
    ]  # fmt: skip
    return rng.choice(hostile) if rng.random() < 0.25 else json.dumps(rng.choice(valid)).encode()


def run_load(url: str, pid: int, clients: int, seconds: float) -> tuple[Counter[str], list[float], list[float]]:
    """Send requests from many clients; return responses by status, latencies in s and the server's memory in MB."""
    address = urlsplit(url)
    statuses: Counter[str] = Counter()
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds

    def client(number: int) -> None:
        rng = random.Random(number)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        while time.perf_counter() < deadline:
            start = time.perf_counter()
            try:
                if rng.random() < 0.02:  # a client that disconnects before the end of its body
                    with socket.create_connection((address.hostname or "", address.port or 80), timeout=10) as sock:
                        sock.sendall(b"POST /api/query HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
                    statuses["disconnected"] += 1
                    continue
                connection.request("POST", "/api/query", make_body(rng), {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException) as error:
                statuses[type(error).__name__] += 1
                connection.close()
                continue
            statuses[str(response.status)] += 1
            latencies.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    memory, process = [], psutil.Process(pid)
    while any(thread.is_alive() for thread in threads):
        memory.append(process.memory_info().rss / 1e6)
        time.sleep(min(1.0, seconds / 20))
    return statuses, latencies, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--most-growth", type=float, default=200, metavar="MB")
    parser.add_argument("--url", help="address of a running server, instead of starting one")
    parser.add_argument("--pid", type=int, help="process id of that server")
    args = parser.parse_args()
    if (args.url is None) != (args.pid is None):
        parser.error("--url and --pid must be given together")
    if args.url:
        raise SystemExit(
            report(*run_load(args.url, args.pid, args.clients, args.seconds), args.seconds, args.most_growth)
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        os.chdir(folder)
        publish_index(folder)
        with serve(folder) as (url, server):
            failed = report(*run_load(url, server.pid, args.clients, args.seconds), args.seconds, args.most_growth)
            start = time.perf_counter()
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_SECONDS)
            print(f"stopped after {time.perf_counter() - start:.1f} s with exit code {code}")
        log = (folder / "server.log").read_text()
        if "Traceback" in log:
            print(log[-3000:])
        raise SystemExit(bool(failed or code or "Traceback" in log))


def report(
    statuses: Counter[str], latencies: list[float], memory: list[float], seconds: float, most_growth: float
) -> bool:
    """Print the results; return whether a request failed or memory grew too much."""
    growth = max(memory) - max(memory[: len(memory) // 4 + 1])
    p50, p99 = np.quantile(latencies, [0.5, 0.99])
    print(f"{len(latencies) / seconds:,.0f} requests/s, p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms")
    print("responses: " + ", ".join(f"{status} {count:,}" for status, count in sorted(statuses.items())))
    print(
        f"memory: {memory[0]:,.0f} MB at the start, {max(memory):,.0f} MB maximum, "
        f"{growth:,.0f} MB growth after the first quarter"
    )
    failed = [status for status in statuses if status.startswith("5") and status != "503"]
    return bool(failed) or growth > most_growth


if __name__ == "__main__":
    main()
