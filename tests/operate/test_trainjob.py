"""Multi-node training steps: the job they create, how they handle its end, and the files they exchange."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from components import resources, trainjob
from ramen.artifacts import open_artifact
from ramen.config import resolve
from ramen.errors import ConfigError, Interrupted, RamenError
from ramen.stages import STAGES, run_stage
from ramen.tracking import NullTracker

KNOBS = [
    "encoder.name=tiny", "training.epochs=1", "training.warmup_epochs=1", "training.batch_size=16",
    "training.threads=1", "base.refresh_from=0",
]  # fmt: skip


class Cluster:
    """A fake Trainer: runs the job's command in one local process, or ends the job with the condition `end`."""

    def __init__(self, end: str = "Complete", error: int = 0) -> None:
        self.end, self.error = end, error
        self.unknown_fields: tuple[str, ...] = ()
        self.jobs: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.requests = 0

    def create_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, job: Any) -> Any:
        from kubernetes.client import ApiException

        assert (group, version, plural) == ("trainer.kubeflow.org", "v1alpha1", "trainjobs") and namespace == "lab"
        name = job["metadata"]["name"]
        if self.error or name in self.jobs:
            raise ApiException(status=self.error or 409, reason="refused")
        self.jobs[name] = job
        trainer = job["spec"]["trainer"]
        if self.end == "Complete":
            assert trainer["command"] == ["torchrun"]
            done = subprocess.run(
                [sys.executable, *trainer["args"]], env=os.environ | {"RAMEN_TRACKING": "off"}, capture_output=True,
                text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        return {**job, "spec": {key: value for key, value in job["spec"].items() if key not in self.unknown_fields}}

    def get_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> Any:
        self.requests += 1
        if self.requests == 1:
            raise OSError("connection reset")
        kind, message = (self.end, "no node has 8 GPUs\nmore") if self.requests > 3 else ("Running", "")
        return {"status": {"conditions": [{"type": kind, "status": "True", "message": message}]}}

    def delete_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> None:
        self.deleted.append(name)


@pytest.fixture
def step(tmp_path: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of `run_job` for the warm-up, with real inputs."""
    monkeypatch.setattr(trainjob, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("RAMEN_TRAIN_NODES", "2")
    monkeypatch.setenv("RAMEN_IMAGE", "registry.example/ramen@sha256:1")
    monkeypatch.setenv("RAMEN_NAMESPACE", "lab")
    monkeypatch.setenv("KFP_RUN_ID", "run-7")
    monkeypatch.chdir(tmp_path)
    sections = resolve(preset="demo", sets=[*KNOBS, "data.source=xc", f"data.path={tiny_xc_folder}"]).sections()
    run_stage("ingest", sections=sections, outputs={"dataset": tmp_path / "pod" / "dataset"})
    inputs = {"dataset": tmp_path / "pod" / "dataset", "graph": tmp_path / "pod" / "graph"}
    run_stage(
        "build-graph", sections=sections, inputs={"dataset": inputs["dataset"]}, outputs={"graph": inputs["graph"]}
    )
    chosen = {name: sections[name] for name in STAGES["warmup"].sections}
    outputs = {"warm_model": tmp_path / "pod" / "warm_model"}
    return {
        "sections": chosen, "inputs": inputs, "outputs": outputs, "track": NullTracker(), "shared": tmp_path / "jobs",
    }  # fmt: skip


@pytest.mark.slow
def test_job_trains_on_the_inputs_and_its_model_is_copied_back(step: dict[str, Any], tmp_path: Path) -> None:
    cluster = Cluster()
    metrics = trainjob.run_job("warmup", api=cluster, **step)
    model = open_artifact(step["outputs"]["warm_model"], "warm_model")
    assert model.manifest["inputs"]["dataset"] == open_artifact(step["inputs"]["dataset"], "dataset").digest
    assert metrics["epoch/loss"] > 0
    (job,) = cluster.jobs.values()
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2 and trainer["image"] == "registry.example/ramen@sha256:1"
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "1"
    names = {one["name"]: one for one in trainer["env"]}
    assert names["KFP_RUN_ID"]["value"] == "run-7"
    assert names["MLFLOW_TRACKING_PASSWORD"]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert cluster.deleted == list(cluster.jobs) and not list((tmp_path / "jobs").iterdir()), (
        "job and files are deleted"
    )


def test_trainer_that_drops_fields_of_the_job_is_refused(step: dict[str, Any]) -> None:
    cluster = Cluster("Failed")
    cluster.unknown_fields = ("runtimePatches",)
    with pytest.raises(RamenError, match=r"Trainer does not know spec.runtimePatches; install Kubeflow Trainer 2.2"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert cluster.deleted == list(cluster.jobs)


def test_failed_job_is_reported_in_one_line_and_keeps_the_inputs(step: dict[str, Any], tmp_path: Path) -> None:
    error = r"warmup: job ramen-warmup-\w+ failed \(no node has 8 GPUs\); kubectl -n lab"
    with pytest.raises(RamenError, match=error):
        trainjob.run_job("warmup", api=Cluster("Failed"), **step)
    assert not step["outputs"]["warm_model"].exists()
    assert list((tmp_path / "jobs").glob("*/in/dataset/manifest.json"))


@pytest.mark.slow
def test_retry_after_a_failed_job_creates_it_again(step: dict[str, Any]) -> None:
    class FailsOnce(Cluster):
        """The first job fails, the second one succeeds."""

        def delete_namespaced_custom_object(self, *where: str) -> None:
            super().delete_namespaced_custom_object(*where)
            self.jobs.pop(where[-1])
            self.end = "Complete"

    cluster = FailsOnce("Failed")
    with pytest.raises(RamenError, match="failed"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert len(cluster.jobs) == 1 and not cluster.deleted, "the failed job is kept for inspection"
    trainjob.run_job("warmup", api=cluster, **step)
    assert open_artifact(step["outputs"]["warm_model"], "warm_model")
    assert len(cluster.deleted) == 2, "the failed job and the finished job"


@pytest.mark.slow
def test_retry_of_a_lost_step_finds_its_running_job(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_node(*args: Any) -> None:
        raise SystemExit("the node is lost")

    cluster = Cluster()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(trainjob, "_wait", lose_node)
        trainjob.run_job("warmup", api=cluster, **step)
    assert not cluster.deleted and not step["outputs"]["warm_model"].exists()
    trainjob.run_job("warmup", api=cluster, **step)
    assert len(cluster.jobs) == 1 and open_artifact(step["outputs"]["warm_model"], "warm_model")


@pytest.mark.parametrize(("status", "error"), [(404, "Trainer is not installed"), (403, "may not create TrainJobs")])
def test_refused_job_is_reported_with_its_cause(step: dict[str, Any], status: int, error: str) -> None:
    with pytest.raises(RamenError, match=error):
        trainjob.run_job("warmup", api=Cluster(error=status), **step)


def test_interrupt_deletes_the_job(step: dict[str, Any]) -> None:
    cluster = Cluster("Running")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Interrupted, match="was deleted, and a retry resumes from its checkpoint"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert cluster.deleted == list(cluster.jobs)


def test_invalid_node_count_or_template_is_refused(
    step: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRAIN_NODES", "two")
    with pytest.raises(ConfigError, match="RAMEN_TRAIN_NODES = 'two'"):
        trainjob.node_count()
    monkeypatch.setenv("RAMEN_TRAIN_NODES", "2")
    monkeypatch.setenv("RAMEN_TRAINJOB", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match="is not a TrainJob template"):
        trainjob.run_job("warmup", api=Cluster(), **step)


def test_default_template_uses_the_names_of_the_pipeline() -> None:
    (patch,) = yaml.safe_load(trainjob.TEMPLATE.read_text())["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert job["name"] == "node"
    assert pod["serviceAccountName"] == resources.SERVICE_ACCOUNT and pod["nodeSelector"] == dict([resources.GPU_POOL])
    assert pod["tolerations"][0]["key"] == resources.GPU
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == resources.WORK_CLAIM
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == resources.WORK_PATH
    assert pod["securityContext"]["runAsUser"] == resources.USER
