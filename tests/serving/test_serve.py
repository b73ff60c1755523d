"""`ramen serve`: the API over HTTP, an alias that moves, and the page as headless Chromium shows it."""

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

from ramen.artifacts import drafts, open_artifact
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

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"


@pytest.fixture
def artifacts(tmp_path: Path, tiny_source: Path) -> Path:
    """Dataset and graph of a run."""
    folder = tmp_path / "artifacts"
    sections: dict[str, Any] = {"data": {"source": "xc", "path": str(tiny_source)}, "walk": {"hops": 0, "hub_cap": 0}}
    run_stage("ingest", sections=sections, outputs={"dataset": folder / "dataset"})
    run_stage(
        "build-graph", sections=sections, inputs={"dataset": folder / "dataset"}, outputs={"graph": folder / "graph"}
    )
    return folder


@pytest.fixture
def published(store: Path, artifacts: Path, tmp_path: Path) -> Path:
    """Two versions: of all labels, and of the first 20 and one with a hostile text; the first is champion."""
    problem = Dataset.read(artifacts / "dataset")
    encoder = load_encoder("tiny", EncoderConfig(name="tiny"))
    with drafts({"model": tmp_path / "model"}, sections={}, inputs={}, work=tmp_path / "work") as made:
        encoder.save(made["model"].path)
    files = json.loads((tmp_path / "model" / "manifest.json").read_text())["files"]
    dataset = open_artifact(artifacts / "dataset", "dataset").digest
    some = [*problem.labels.uids[:20], "evil"], [*problem.labels.texts[:20], HOSTILE]
    for number, (uids, texts) in enumerate([(problem.labels.uids, problem.labels.texts), some], 1):
        folder, settings = (
            tmp_path / f"retriever{number}",
            IndexConfig(kind="flat", alias="champion" if number == 1 else ""),
        )
        folder.mkdir()
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
    """Address of a running `ramen serve --ui`."""
    command = [sys.executable, "-m", "ramen", "serve", "--ui", "--port", "0", "--artifacts", str(published)]
    server = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{store}"},
    )  # fmt: skip
    assert server.stdout is not None and server.stderr is not None
    try:
        said = server.stdout.readline().strip()
        assert said.startswith("http://127.0.0.1:"), server.stderr.read()
        for _ in range(100):
            try:
                urllib.request.urlopen(said + "healthz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield said
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def _ask(url: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(url + "api/query", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_api_answers_as_the_registry_does_and_refuses_nonsense(url: str, published: Path) -> None:
    status, answer = _ask(url, text="pepper soup", k=4)
    assert status == 200 and answer["version"] == 1 and answer["same_dataset"]
    local = load_version("ramen", "1").query(["pepper soup"], 4)[0]
    assert [label["uid"] for label in answer["labels"]] == [hit.uid for hit in local]
    assert "anchors" not in answer["labels"][0], "they cost an encoding, and are asked for"
    _, without = _ask(url, text="pepper soup", k=3, exclude=[local[0].uid, "no such label"])
    assert [label["uid"] for label in without["labels"]] == [hit.uid for hit in local[1:4]]
    status, answer = _ask(url, text="pepper soup", k=30, version="2", explain=True)
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
        own = {
            (name, problem.anchor_sets[name].texts.texts[anchor])
            for name, sides in graph.graphs.items()
            for anchor in sides.indices[sides.indptr[row] : sides.indptr[row + 1]]
        }
        shown = [(one["set"], one["text"]) for one in label["anchors"]]
        assert set(shown) <= own and len(shown) == min(3, len(own))
        cosines = [one["cosine"] for one in label["anchors"]]
        assert cosines == sorted(cosines, reverse=True)
    for body, code, said in [
        ({"text": ""}, 422, "at least 1 character"),
        ({"text": "  "}, 422, "is empty"),
        ({"text": "x", "k": 0}, 422, "greater than or equal to 1"),
        ({"text": "x", "kk": 3}, 422, "Extra inputs"),
        ({"text": "x", "version": "9"}, 404, "no version 9; it has: 1, 2"),
        ({"text": "x", "version": "gold"}, 404, "no alias 'gold'"),
    ]:
        status, answer = _ask(url, **body)
        assert status == code and said in json.dumps(answer), (body, answer)
    listed = _get(url + "api/versions")
    assert [(one["version"], one["aliases"]) for one in listed] == [(2, []), (1, ["champion"])]
    assert listed[1]["metrics"] == {"psp_at_5": 30.0}


def test_alias_that_moves_is_followed_without_a_gap(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = serving.Versions("ramen")
    assert versions.get("champion").number == 1
    promote("ramen", "champion", "2")
    assert versions.get("champion").number == 1, "not yet looked at again"
    monkeypatch.setattr(serving, "LOOK_AGAIN", 0.0)
    seen = []
    for _ in range(200):
        seen.append(versions.get("champion").number)
        if seen[-1] == 2:
            break
        time.sleep(0.05)
    assert seen[0] == 1 and seen[-1] == 2, "the old version answers while the new one is loaded"


def test_only_a_few_versions_stay_in_memory(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_VERSIONS", 1)
    versions = serving.Versions("ramen")
    for number in ("1", "2", "1"):
        assert versions.get(number).number == int(number)
        assert list(versions._loaded) == [int(number)]


def _dom(url: str, folder: Path) -> str:
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("Chromium is not installed")
    done = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         "--virtual-time-budget=15000", "--dump-dom", url],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_sets_two_versions_side_by_side_and_runs_no_text_as_code(url: str, tmp_path: Path) -> None:
    page = _dom(url + "?q=pepper%20soup&k=30", tmp_path / "chromium")
    sections = re.findall(r"<section>(.*?)</section>", page, re.DOTALL)
    assert len(sections) == 2 and "version 1" in sections[0] and "version 2" in sections[1]
    first, second = (re.findall(r'class="uid">(.*?)<', section) for section in sections)
    assert len(first) == 30 and len(second) == 21
    tinted = re.findall(r'<li class="only".*?class="uid">(.*?)<', sections[1], re.DOTALL)
    assert tinted == ["evil"], "what only one of them finds is marked"
    assert len(re.findall(r'<li class="only"', sections[0])) == 10
    assert (
        'class="why">category: ' in sections[0] and re.search(r'class="bin tail">tail, \d+<', sections[0]) is not None
    ) or (re.search(r'class="bin tail"[^>]*>tail, \d+<', sections[0]))
    assert "20 of 30 labels in common" in page
    assert "<img" not in page and "&lt;img src=x" in sections[1] and "<title>ramen" in page


def test_page_says_what_went_wrong(url: str, tmp_path: Path) -> None:
    page = _dom(url + "?q=x&k=5000", tmp_path / "chromium")
    assert re.search(r'id="message"[^>]*class="error"[^>]*>k: Input should be less than or equal to 1000', page)


def test_busy_port_is_one_line(published: Path, url: str) -> None:
    from click.testing import CliRunner

    from ramen.cli import cli

    done = CliRunner().invoke(cli, ["serve", "--port", re.findall(r":(\d+)/", url)[0]])
    assert done.exit_code == 1 and "cannot listen there (Address already in use)" in done.output


def test_folder_without_artifacts_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no manifest.json"):
        TrainingGraph(tmp_path)
