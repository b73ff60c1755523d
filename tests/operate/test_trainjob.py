"""A step that trains on several nodes: the job it makes, what it does with its end, and a real hand-over of files."""

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
    """A Trainer: runs a job's command here, as one process, or ends it as it is told."""

    def __init__(self, end: str = "Complete", error: int = 0) -> None:
        self.end, self.error = end, error
        self.unknown: tuple[str, ...] = ()
        self.jobs: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.looks = 0

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
        return {**job, "spec": {key: value for key, value in job["spec"].items() if key not in self.unknown}}

    def get_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> Any:
        self.looks += 1
        if self.looks == 1:
            raise OSError("connection reset")
        kind, message = (self.end, "no node has 8 GPUs\nmore") if self.looks > 3 else ("Running", "")
        return {"status": {"conditions": [{"type": kind, "status": "True", "message": message}]}}

    def delete_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, name: str) -> None:
        self.deleted.append(name)


@pytest.fixture
def step(tmp_path: Path, tiny_xc_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of `run_job` for a warm-up, with real inputs."""
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


def test_step_hands_its_work_to_the_nodes_and_takes_the_model_back(step: dict[str, Any], tmp_path: Path) -> None:
    cluster = Cluster()
    metrics = trainjob.run_job("warmup", api=cluster, **step)
    made = open_artifact(step["outputs"]["warm_model"], "warm_model")
    assert made.manifest["inputs"]["dataset"] == open_artifact(step["inputs"]["dataset"], "dataset").digest
    assert metrics["epoch/loss"] > 0
    (job,) = cluster.jobs.values()
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2 and trainer["image"] == "registry.example/ramen@sha256:1"
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "1"
    names = {one["name"]: one for one in trainer["env"]}
    assert names["KFP_RUN_ID"]["value"] == "run-7"
    assert names["MLFLOW_TRACKING_PASSWORD"]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert cluster.deleted == list(cluster.jobs) and not list((tmp_path / "jobs").iterdir()), "nothing is left behind"


def test_a_trainer_that_drops_the_nodes_and_the_volume_trains_nothing(step: dict[str, Any]) -> None:
    cluster = Cluster("Failed")
    cluster.unknown = ("runtimePatches",)
    with pytest.raises(RamenError, match=r"Trainer does not know spec.runtimePatches; install Kubeflow Trainer 2.2"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert cluster.deleted == list(cluster.jobs)


def test_failed_job_is_one_line_and_leaves_the_inputs_for_the_next_attempt(
    step: dict[str, Any], tmp_path: Path
) -> None:
    said = r"warmup: job ramen-warmup-\w+ failed \(no node has 8 GPUs\); kubectl -n lab"
    with pytest.raises(RamenError, match=said):
        trainjob.run_job("warmup", api=Cluster("Failed"), **step)
    assert not step["outputs"]["warm_model"].exists()
    assert list((tmp_path / "jobs").glob("*/in/dataset/manifest.json"))


def test_attempt_after_a_failed_job_makes_it_anew(step: dict[str, Any]) -> None:
    class Mended(Cluster):
        """Its first job fails, the next one does not."""

        def delete_namespaced_custom_object(self, *where: str) -> None:
            super().delete_namespaced_custom_object(*where)
            self.jobs.pop(where[-1])
            self.end = "Complete"

    cluster = Mended("Failed")
    with pytest.raises(RamenError, match="failed"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert len(cluster.jobs) == 1 and not cluster.deleted, "its pods can be looked at"
    trainjob.run_job("warmup", api=cluster, **step)
    assert open_artifact(step["outputs"]["warm_model"], "warm_model")
    assert len(cluster.deleted) == 2, "the failed one, and the finished one"


def test_step_that_was_lost_while_its_job_ran_finds_it_again(
    step: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any) -> None:
        raise SystemExit("the node is gone")

    cluster = Cluster()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(trainjob, "_wait", lost)
        trainjob.run_job("warmup", api=cluster, **step)
    assert not cluster.deleted and not step["outputs"]["warm_model"].exists()
    trainjob.run_job("warmup", api=cluster, **step)
    assert len(cluster.jobs) == 1 and open_artifact(step["outputs"]["warm_model"], "warm_model")


@pytest.mark.parametrize(("status", "said"), [(404, "Trainer is not installed"), (403, "may not make TrainJobs")])
def test_cluster_that_takes_no_job_says_why(step: dict[str, Any], status: int, said: str) -> None:
    with pytest.raises(RamenError, match=said):
        trainjob.run_job("warmup", api=Cluster(error=status), **step)


def test_stop_deletes_the_job(step: dict[str, Any]) -> None:
    cluster = Cluster("Running")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Interrupted, match="was deleted, a retry goes on from its checkpoint"):
        trainjob.run_job("warmup", api=cluster, **step)
    assert cluster.deleted == list(cluster.jobs)


def test_number_of_nodes_and_template_are_checked(
    step: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMEN_TRAIN_NODES", "two")
    with pytest.raises(ConfigError, match="RAMEN_TRAIN_NODES = 'two'"):
        trainjob.nodes()
    monkeypatch.setenv("RAMEN_TRAIN_NODES", "2")
    monkeypatch.setenv("RAMEN_TRAINJOB", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match="no template of a TrainJob"):
        trainjob.run_job("warmup", api=Cluster(), **step)


def test_shipped_template_names_what_the_pipeline_names() -> None:
    (patch,) = yaml.safe_load(trainjob.TEMPLATE.read_text())["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert job["name"] == "node"
    assert pod["serviceAccountName"] == resources.SERVICE_ACCOUNT and pod["nodeSelector"] == dict([resources.GPU_POOL])
    assert pod["tolerations"][0]["key"] == resources.GPU
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == resources.WORK_CLAIM
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == resources.WORK_PATH
    assert pod["securityContext"]["runAsUser"] == resources.USER
