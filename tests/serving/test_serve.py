"""`ramen serve`: the API over HTTP, an alias that moves, and the page in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramen.artifacts import create_drafts, open_artifact
from ramen.config import EncoderConfig, IndexConfig
from ramen.data.dataset import Dataset
from ramen.encoder.loading import load_encoder
from ramen.errors import ArtifactError
from ramen.evaluation.quantiles import head_torso_tail
from ramen.index.build import build_index
from ramen.index.retriever import write_retriever
from ramen.publishing.gate import promote
from ramen.publishing.publish import publish
from ramen.publishing.registry import load_version
from ramen.serving import app as serving
from ramen.serving.explain import TrainingGraph
from ramen.stages import run_stage
from ramen.tracking import open_tracker

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"


@pytest.fixture
def artifacts(tmp_path: Path, tiny_xc_folder: Path) -> Path:
    """The dataset and graph artifacts of a run."""
    folder = tmp_path / "artifacts"
    sections: dict[str, Any] = {
        "data": {"source": "xc", "path": str(tiny_xc_folder)},
        "walk": {"hops": 0, "hub_cap": 0},
    }
    run_stage("ingest", sections=sections, outputs={"dataset": folder / "dataset"})
    run_stage(
        "build-graph", sections=sections, inputs={"dataset": folder / "dataset"}, outputs={"graph": folder / "graph"}
    )
    return folder


@pytest.fixture
def published(store: Path, artifacts: Path, tmp_path: Path) -> Path:
    """Publish version 1 (champion) with all labels, and version 2 with 20 of them and one with a hostile text."""
    problem = Dataset.read(artifacts / "dataset")
    encoder = load_encoder("tiny", EncoderConfig(name="tiny"))
    with create_drafts({"model": tmp_path / "model"}, sections={}, inputs={}, work=tmp_path / "work") as written:
        encoder.save(written["model"].path)
    files = json.loads((tmp_path / "model" / "manifest.json").read_text())["files"]
    dataset = open_artifact(artifacts / "dataset", "dataset").digest
    fewer = [*problem.labels.uids[:20], "evil"], [*problem.labels.texts[:20], HOSTILE]
    for number, (uids, texts) in enumerate([(problem.labels.uids, problem.labels.texts), fewer], 1):
        folder = tmp_path / f"retriever{number}"
        folder.mkdir()
        settings = IndexConfig(kind="flat", alias="champion" if number == 1 else "")
        vectors = encoder.encode(texts)
        write_retriever(folder, build_index(vectors, settings), uids, texts, encoder_files=files,
                        facts={"kind": "flat", "dimension": vectors.shape[1]})  # fmt: skip
        with open_tracker("publish-index") as track:
            assert track.run_id
            tags = {"dataset": dataset, "ann_recall": "1.0", "psp_at_5": "30.0", "labels": str(len(uids))}
            publish(folder, tmp_path / "model", run_id=track.run_id, settings=settings, tags=tags, sample=["rook"])
    return artifacts


@pytest.fixture
def url(published: Path, store: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a running `ramen serve --ui`."""
    command = [sys.executable, "-m", "ramen", "serve", "--ui", "--port", "0", "--artifacts", str(published)]
    server = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"},
    )  # fmt: skip
    assert server.stdout is not None and server.stderr is not None
    try:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), server.stderr.read()
        for _ in range(100):
            try:
                urllib.request.urlopen(address + "healthz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())


def post_query(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url + "api/query", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_api_answers_like_local_retriever_and_refuses_invalid_requests(url: str, published: Path) -> None:
    status, answer = post_query(url, text="pepper soup", k=4)
    assert status == 200 and answer["version"] == 1 and answer["same_dataset"]
    local = load_version("ramen", "1").query(["pepper soup"], 4)[0]
    assert [label["uid"] for label in answer["labels"]] == [hit.uid for hit in local]
    assert "anchors" not in answer["labels"][0], "anchors are returned on request only, because they must be encoded"
    _, without = post_query(url, text="pepper soup", k=3, exclude=[local[0].uid, "no such label"])
    assert [label["uid"] for label in without["labels"]] == [hit.uid for hit in local[1:4]]
    status, answer = post_query(url, text="pepper soup", k=30, version="2", explain=True)
    assert status == 200 and answer["version"] == 2 and len(answer["labels"]) == 21
    problem = Dataset.read(published / "dataset")
    graph = TrainingGraph(published)
    for label in answer["labels"]:
        if label["uid"] == "evil":
            assert label["anchors"] == [] and "bin" not in label
            continue
        row = problem.labels.uids.index(label["uid"])
        assert label["documents"] == problem.y_train[:, row].sum()
        assert row in head_torso_tail(graph.frequency)[label["bin"]]
        anchors = {
            (name, problem.anchor_sets[name].texts.texts[anchor])
            for name, edges in graph.graphs.items()
            for anchor in edges.indices[edges.indptr[row] : edges.indptr[row + 1]]
        }
        shown = [(anchor["set"], anchor["text"]) for anchor in label["anchors"]]
        assert set(shown) <= anchors and len(shown) == min(3, len(anchors))
        cosines = [anchor["cosine"] for anchor in label["anchors"]]
        assert cosines == sorted(cosines, reverse=True)
    for body, expected_status, expected_text in [
        ({"text": ""}, 422, "at least 1 character"),
        ({"text": "  "}, 422, "is empty"),
        ({"text": "x", "k": 0}, 422, "greater than or equal to 1"),
        ({"text": "x", "kk": 3}, 422, "Extra inputs"),
        ({"text": "x", "version": "9"}, 404, "no version 9; it has: 1, 2"),
        ({"text": "x", "version": "gold"}, 404, "no alias 'gold'"),
    ]:
        status, answer = post_query(url, **body)
        assert status == expected_status and expected_text in json.dumps(answer), (body, answer)
    listed = get_json(url + "api/versions")
    assert [(one["version"], one["aliases"]) for one in listed] == [(2, []), (1, ["champion"])]
    assert listed[1]["metrics"] == {"psp_at_5": 30.0}


def test_server_follows_moved_alias_without_interruption(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = serving.VersionCache("ramen")
    assert cache.get("champion").number == 1
    promote("ramen", "champion", "2")
    assert cache.get("champion").number == 1, "the alias is not resolved again yet"
    monkeypatch.setattr(serving, "ALIAS_REFRESH_SECONDS", 0.0)
    numbers = []
    for _ in range(200):
        numbers.append(cache.get("champion").number)
        if numbers[-1] == 2:
            break
        time.sleep(0.05)
    assert numbers[0] == 1 and numbers[-1] == 2, "the old version answers until the new one is loaded"


def test_least_recently_used_version_is_evicted(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_VERSIONS", 1)
    cache = serving.VersionCache("ramen")
    for number in ("1", "2", "1"):
        assert cache.get(number).number == int(number)
        assert list(cache._loaded) == [int(number)]


def render_page(url: str, folder: Path) -> str:
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("Chromium is not installed")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         "--virtual-time-budget=15000", "--dump-dom", url],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_compares_two_versions_and_escapes_texts(url: str, tmp_path: Path) -> None:
    page = render_page(url + "?q=pepper%20soup&k=30", tmp_path / "chromium")
    sections = re.findall(r"<section>(.*?)</section>", page, re.DOTALL)
    assert len(sections) == 2 and "version 1" in sections[0] and "version 2" in sections[1]
    first, second = (re.findall(r'class="uid">(.*?)<', section) for section in sections)
    assert len(first) == 30 and len(second) == 21
    highlighted = re.findall(r'<li class="only".*?class="uid">(.*?)<', sections[1], re.DOTALL)
    assert highlighted == ["evil"], "labels that only one version returns are highlighted"
    assert len(re.findall(r'<li class="only"', sections[0])) == 10
    assert (
        'class="why">category: ' in sections[0] and re.search(r'class="bin tail">tail, \d+<', sections[0]) is not None
    ) or (re.search(r'class="bin tail"[^>]*>tail, \d+<', sections[0]))
    assert "20 of 30 labels in common" in page
    assert "<img" not in page and "&lt;img src=x" in sections[1] and "<title>ramen" in page


def test_page_shows_error_message(url: str, tmp_path: Path) -> None:
    page = render_page(url + "?q=x&k=5000", tmp_path / "chromium")
    assert re.search(r'id="message"[^>]*class="error"[^>]*>k: Input should be less than or equal to 1000', page)


def test_busy_port_is_refused(published: Path, url: str) -> None:
    from click.testing import CliRunner

    from ramen.cli import cli

    done = CliRunner().invoke(cli, ["serve", "--port", re.findall(r":(\d+)/", url)[0]])
    assert done.exit_code == 1 and "cannot listen (Address already in use)" in done.output


def test_training_graph_refuses_folder_without_artifacts(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no manifest.json"):
        TrainingGraph(tmp_path)
