"""Components and compiled pipeline agree with the stage table and the table of resources."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from click.testing import CliRunner

from components import load_component
from components.image import IMAGE
from components.resources import (
    GPU,
    GPU_POOL,
    MLFLOW_SECRET,
    NAMESPACE_ENV,
    RESOURCES,
    SETTINGS,
    SETTINGS_KEYS,
    STORE_SECRET,
    USER,
    WORK_CLAIM,
    WORK_PATH,
)
from pipelines.compile import compiled_text
from ramen.cli import cli
from ramen.config import resolve
from ramen.stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[2]
REPORTING = {"ingest", "evaluate"}


@pytest.fixture(scope="module")
def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The compiled pipeline and its platform document."""
    spec, platform = yaml.safe_load_all(compiled_text(resolve(preset="demo")))
    return spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_component_signature_matches_its_stage(stage: Stage) -> None:
    spec = load_component(stage).component_spec
    inputs = {name: value.type for name, value in (spec.inputs or {}).items()}
    assert {name for name in inputs if name in stage.reads} == set(stage.reads)
    parameters = {name: kind for name, kind in inputs.items() if name not in stage.reads}
    assert parameters == {**dict.fromkeys(stage.sections, "Dict"), "version": "String"}
    reports = {"report"} if stage.name in REPORTING else set()
    assert set(spec.outputs) == {*stage.writes, "scalars"} | reports


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_component_module_imports_nothing_heavy(stage: Stage) -> None:
    """kfp runs the function's source in the pod, so the function imports what it needs."""
    tree = ast.parse((ROOT / "components" / stage.identifier / "component.py").read_text())
    top = {
        name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert top == {"kfp", "components.image"}
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert len(function.body) <= 5, "a docstring, an import, two dicts, a call"


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_task_receives_its_sections_and_the_artifacts_of_their_producers(
    stage: Stage, documents: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    spec, _ = documents
    producer = {name: other.name for other in STAGES.values() for name in other.writes}
    task = spec["root"]["dag"]["tasks"][stage.name]
    parameters = task["inputs"]["parameters"]
    assert {name for name in parameters if name != "version"} == set(stage.sections)
    for name in stage.sections:
        assert parameters[name] == {"componentInputParameter": name}
    artifacts = task["inputs"].get("artifacts", {})
    assert {name: value["taskOutputArtifact"]["producerTask"] for name, value in artifacts.items()} == {
        name: producer[name] for name in stage.reads
    }


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_task_has_resources_volumes_secrets_and_retries(
    stage: Stage, documents: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    spec, platform = documents
    wanted = RESOURCES[stage.name]
    container = spec["deploymentSpec"]["executors"][f"exec-{stage.name}"]["container"]
    resources = container["resources"]
    assert container["image"] == IMAGE and not IMAGE.endswith(":latest")
    for key in ("cpuRequest", "cpuLimit", "memoryRequest", "memoryLimit"):
        assert resources[key] > 0
    task = spec["root"]["dag"]["tasks"][stage.name]
    assert task["retryPolicy"]["maxRetryCount"] == wanted.retries >= 1
    # counted from the start of the first attempt, so it must exceed the longest training
    assert int(task["retryPolicy"]["backoffMaxDuration"].removesuffix("s")) >= 30 * 24 * 3600
    assert bool(task["cachingOptions"].get("enableCache")) is not stage.side_effects
    kubernetes = platform[f"exec-{stage.name}"]
    assert kubernetes["securityContext"] == {
        "runAsUser": str(USER), "runAsGroup": str(USER), "runAsNonRoot": True,
    }  # fmt: skip
    secrets = {secret["secretName"]: secret for secret in kubernetes["secretAsEnv"]}
    assert set(secrets) == {MLFLOW_SECRET, STORE_SECRET} and all(one["optional"] for one in secrets.values())
    (settings,) = kubernetes["configMapAsEnv"]
    assert settings["configMapName"] == SETTINGS and settings["optional"] is True
    assert {pair["envVar"] for pair in settings["keyToEnv"]} == set(SETTINGS_KEYS)
    claims = [(volume["constant"], volume["mountPath"]) for volume in kubernetes.get("pvcMount", [])]
    assert claims == [(WORK_CLAIM, WORK_PATH)], "checkpoints and unsent tracking writes survive the pod"
    assert kubernetes["fieldPathAsEnv"] == [
        {"name": NAMESPACE_ENV, "fieldPath": "metadata.namespace"},
        {"name": "KFP_RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"},
    ]
    assert bool(wanted.gpus) is stage.gpu
    if stage.gpu:
        assert resources["accelerator"]["resourceType"] == GPU
        assert kubernetes["nodeSelector"]["labels"] == dict([GPU_POOL])
        assert kubernetes["tolerations"][0]["key"] == GPU
        assert kubernetes["emptyDirMounts"][0]["mountPath"] == "/dev/shm"
    else:
        assert "accelerator" not in resources and "nodeSelector" not in kubernetes


def test_compiled_file_is_a_valid_pipeline_spec(documents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    from google.protobuf import json_format
    from kfp.pipeline_spec import pipeline_spec_pb2

    spec = json_format.ParseDict(documents[0], pipeline_spec_pb2.PipelineSpec())
    assert set(spec.root.dag.tasks) == set(STAGES)
    assert set(spec.root.input_definitions.parameters) == {name for stage in STAGES.values() for name in stage.sections}


@pytest.mark.slow
def test_compiled_file_is_the_same_in_every_process() -> None:
    code = "from pipelines.compile import compiled_text; print(compiled_text())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1


class FakeServer(BaseHTTPRequestHandler):
    """The part of Kubeflow's API that a submission calls."""

    posted: ClassVar[dict[str, Any]] = {}
    run: ClassVar[dict[str, Any]] = {"run_id": "1", "state": "PENDING", "created_at": "2026-01-01T00:00:00Z"}

    def do_GET(self) -> None:
        found = {"multi_user": False} if "healthz" in self.path else {"experiments": []}
        self.answer(self.run if "/runs/" in self.path else found)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted[self.path.rsplit("/", 1)[-1]] = json.loads(body)
        self.answer(self.run if "/runs" in self.path else {"experiment_id": "1", "display_name": "ramen"})

    def answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        pass


@pytest.mark.slow
def test_kfp_run_submit_sends_pipeline_and_platform_spec(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), FakeServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kfp = [str(Path(sys.executable).parent / "kfp"), "--endpoint", f"http://127.0.0.1:{server.server_port}"]
        done = subprocess.run(
            [*kfp, "run", "submit", "-e", "ramen", "-f", "pipelines/ramen.yaml"],
            cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True,
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    sent = FakeServer.posted["runs"]["pipeline_spec"]
    assert set(sent["pipeline_spec"]["root"]["dag"]["tasks"]) == set(STAGES)
    assert set(sent["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]) == {
        f"exec-{name}" for name in STAGES
    }


def test_image_given_at_compilation_is_used_by_every_task() -> None:
    spec, _ = yaml.safe_load_all(compiled_text(resolve(preset="demo"), image="registry.example/ramen@sha256:0"))
    images = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
    assert images == {"registry.example/ramen@sha256:0"}
    for name in ("exec-warmup", "exec-prune-retrain"):  # the multi-node job runs the image of the step
        given = spec["deploymentSpec"]["executors"][name]["container"]["env"]
        assert {"name": "RAMEN_IMAGE", "value": "registry.example/ramen@sha256:0"} in given


def test_preset_given_at_compilation_sets_parameter_defaults(tmp_path: Path) -> None:
    made = tmp_path / "mine.yaml"
    done = CliRunner().invoke(cli, ["compile", "--preset", "debian", "--set", "base.name=ance", "-o", str(made)])
    assert done.exit_code == 0, done.output
    spec = next(yaml.safe_load_all(made.read_text()))
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["objective"]["defaultValue"]["anchor_sets"] == ["rdepends"]
    assert parameters["base"]["defaultValue"]["name"] == "ance"
