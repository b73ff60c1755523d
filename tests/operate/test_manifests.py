"""Manifests and images: valid against Kubernetes' schemas, restricted, and consistent with the pipeline's names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from components import resources
from ramen.config import IndexConfig

ROOT = Path(__file__).resolve().parents[2]
KUSTOMIZE = ROOT / "infra" / "kustomize"
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"
OVERLAYS = ("dev", "prod")
CUSTOM_KINDS = {"InferenceService", "TrainJob"}
"""Kinds of KServe and Kubeflow Trainer; their schemas are not available here."""
KUBERNETES_VERSION = "1.31"


def _files() -> list[Path]:
    return sorted(path for path in KUSTOMIZE.rglob("*.yaml") if path.name not in {"kustomization.yaml", "images.yaml"})


def _documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in _files():
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def _pods() -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, pod spec) of every workload."""
    pods = []
    for path, document in _documents():
        spec = document.get("spec", {})
        if document["kind"] == "InferenceService":
            predictor_fields = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "annotations", "labels"}
            pods.append(
                (path.name, {key: value for key, value in spec["predictor"].items() if key not in predictor_fields})
            )
        elif "template" in spec:
            pods.append((path.name, spec["template"]["spec"]))
    return pods


@pytest.mark.parametrize(("path", "document"), list(_documents()), ids=lambda value: getattr(value, "name", ""))
def test_manifest_is_valid_kubernetes(path: Path, document: dict[str, Any]) -> None:
    import kubernetes_validate

    if document["kind"] in CUSTOM_KINDS:
        pytest.skip(f"{document['kind']} is a custom kind; test_pod_is_valid_and_restricted validates its pods")
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize(("name", "pod"), _pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_pod_is_valid_and_restricted(name: str, pod: dict[str, Any]) -> None:
    """Checks the Pod Security Standards, profile "restricted", and a read-only root file system."""
    import kubernetes_validate

    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(whole, KUBERNETES_VERSION, strict=True)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        for variable in container.get("env", []):
            secret = re.search("PASSWORD|SECRET|TOKEN|KEY|URI", variable["name"])
            assert not secret or "secretKeyRef" in variable["valueFrom"], f"{variable['name']} is in plain text"


def test_manifests_contain_no_secrets() -> None:
    assert not [path for path, document in _documents() if document["kind"] == "Secret"]
    for path in (KUSTOMIZE / "overlays" / "dev" / "secrets.example").iterdir():
        values = dict(line.split("=", 1) for line in path.read_text().splitlines())
        secret = [value for key, value in values.items() if re.search("password|SECRET|uri", key)]
        assert all("CHANGE-ME" in value for value in secret), path
    ignored = (ROOT / ".gitignore").read_text()
    assert "/infra/kustomize/overlays/dev/secrets/" in ignored and "/infra/compose.env" in ignored


def _build_overlay(overlay: str, folder: Path) -> list[dict[str, Any]]:
    """Return the documents that `kubectl kustomize` prints."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    shutil.copytree(KUSTOMIZE, folder / "kustomize")
    dev = folder / "kustomize" / "overlays" / "dev"
    shutil.copytree(dev / "secrets.example", dev / "secrets", dirs_exist_ok=True)
    command = ["kubectl", "kustomize", str(folder / "kustomize" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_builds_valid_documents(overlay: str, tmp_path: Path) -> None:
    import kubernetes_validate

    documents = _build_overlay(overlay, tmp_path)
    names = {(one["kind"], one["metadata"]["name"]) for one in documents}
    wanted = {("Namespace", "ramen"), ("Deployment", "mlflow"), ("PersistentVolumeClaim", "ramen-work")}
    assert wanted <= names and len(names) == len(documents)
    for document in documents:
        if document["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
        if document["kind"] not in {"Namespace", "PriorityClass"}:
            assert document["metadata"]["namespace"] == resources.NAMESPACE
    images = set(re.findall(r"image: (\S+)", yaml.safe_dump_all(documents)))
    assert images and not [image for image in images if ":" not in image or image.endswith(":latest")]
    if overlay == "prod":
        assert all("@sha256:" in image for image in images), "production images are pinned by digest"
        assert ("InferenceService", "ramen") in names and ("StatefulSet", "postgres") not in names
    else:
        assert ("StatefulSet", "postgres") in names and ("Secret", "ramen-object-store") in names


def test_referenced_objects_exist_or_are_optional(tmp_path: Path) -> None:
    """Checks the accounts, secrets and config maps that pods refer to."""
    documents = _build_overlay("dev", tmp_path)
    existing = {(one["kind"], one["metadata"]["name"]) for one in documents}
    keys = {(one["kind"], one["metadata"]["name"]): set(one.get("data", {})) for one in documents if "data" in one}
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec") if "spec" in document else None
        if not pod:
            continue
        assert ("ServiceAccount", pod["serviceAccountName"]) in existing
        for container in pod["containers"]:
            for variable in container.get("env", []):
                for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                    if reference := variable.get("valueFrom", {}).get(field):
                        is_defined = reference["key"] in keys.get((kind, reference["name"]), set())
                        assert is_defined or reference.get("optional"), reference


def test_manifests_use_the_names_of_the_pipeline() -> None:
    text = "\n".join(path.read_text() for path in _files())
    documents = {(one["kind"], one["metadata"]["name"]): one for _, one in _documents()}
    assert ("Namespace", resources.NAMESPACE) in documents
    assert ("ServiceAccount", resources.SERVICE_ACCOUNT) in documents
    assert ("PersistentVolumeClaim", resources.WORK_CLAIM) in documents
    settings = documents["ConfigMap", resources.SETTINGS]["data"]
    assert set(settings) <= set(resources.SETTINGS_KEYS)
    assert settings["RAMEN_WORK"].startswith(resources.WORK_PATH + "/")
    assert settings["RAMEN_SPOOL"].startswith(resources.WORK_PATH + "/")
    assert f"name: {resources.STORE_SECRET}" in text and f"name: {resources.MLFLOW_SECRET}" in text
    for key in resources.STORE_KEYS:
        assert f"name: {resources.STORE_SECRET}, key: {key}" in text
    for key in resources.MLFLOW_KEYS:
        assert f"name: {resources.MLFLOW_SECRET}, key: {key}" in text


def test_server_has_memory_and_disk_for_the_largest_index() -> None:
    (server,) = (one for _, one in _documents() if one["kind"] == "InferenceService")
    predictor = server["spec"]["predictor"]
    memory = predictor["containers"][0]["resources"]["limits"]["memory"]
    disk = next(volume for volume in predictor["volumes"] if "emptyDir" in volume)["emptyDir"]["sizeLimit"]
    assert min(int(memory.removesuffix("Gi")), int(disk.removesuffix("Gi"))) >= IndexConfig().memory_gb + 4


# --- images ------------------------------------------------------------------------------------------------------


def test_dockerfile_passes_hadolint() -> None:
    program = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([program, "--format", "json", str(DOCKERFILE)], capture_output=True, text=True)
    assert json.loads(done.stdout) == []


def test_images_share_one_base_run_unprivileged_and_have_no_build_tools() -> None:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    stages = {line.split()[-1] for line in lines if line.startswith("FROM")}
    assert {"cpu", "gpu", "mlflow"} <= stages
    assert all(base == "${PYTHON_IMAGE}" or base in stages for base in bases), "one base image, set by one argument"
    shared = text[text.index(" AS final") :]
    assert "USER 1000:1000" in shared and "USER root" not in shared and "pip install" not in shared
    assert "COPY ." not in text and "ADD " not in text, (
        "copy only named folders, so that images contain no secrets and no data"
    )
    installs = re.findall(r"pip install (.*?)(?:&&|$)", text, re.MULTILINE)
    assert len(installs) == 3 and all("-c constraints.txt" in one for one in installs)


@pytest.mark.parametrize(
    ("image", "production", "refused"),
    [
        ("python:3.11-slim", "true", True),
        ("python:3.11-slim", "false", False),
        ("python:3.11-slim@sha256:" + "0" * 64, "true", False),
    ],
)
def test_production_build_requires_a_digest(image: str, production: str, refused: bool) -> None:
    """Runs the instruction of the Dockerfile in a shell, as a builder does."""
    (command,) = re.findall(r"^RUN (case .*?esac)$", DOCKERFILE.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["sh", "-c", command.replace("\\\n", "")],
        env={"PYTHON_IMAGE": image, "PRODUCTION": production}, capture_output=True, text=True,
    )  # fmt: skip
    assert bool(done.returncode) is refused
    assert ("not pinned by digest" in done.stderr) is refused


def test_compose_hardens_the_server_and_contains_no_password() -> None:
    services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    assert services["mlflow"]["read_only"] and services["mlflow"]["cap_drop"] == ["ALL"]
    assert all(":" in service["image"] and not service["image"].endswith("latest") for service in services.values())
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET", key) or value.startswith("${")
