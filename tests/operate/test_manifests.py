"""Manifests and images: they build, fit Kubernetes' schemas, name what the pipeline names, and run without rights."""

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
FOREIGN = {"InferenceService", "TrainJob"}
"""Kinds of other projects, whose schemas are not at hand."""
VERSION = "1.31"


def _files() -> list[Path]:
    return sorted(path for path in KUSTOMIZE.rglob("*.yaml") if path.name not in {"kustomization.yaml", "images.yaml"})


def _documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in _files():
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def _pods() -> list[tuple[str, dict[str, Any]]]:
    """(name, pod spec) of everything that runs."""
    found = []
    for path, document in _documents():
        spec = document.get("spec", {})
        if document["kind"] == "InferenceService":
            known = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "annotations", "labels"}
            found.append((path.name, {key: value for key, value in spec["predictor"].items() if key not in known}))
        elif "template" in spec:
            found.append((path.name, spec["template"]["spec"]))
    return found


@pytest.mark.parametrize(("path", "document"), list(_documents()), ids=lambda value: getattr(value, "name", ""))
def test_manifest_fits_the_schema_of_kubernetes(path: Path, document: dict[str, Any]) -> None:
    import kubernetes_validate

    if document["kind"] in FOREIGN:
        pytest.skip(f"{document['kind']} is not Kubernetes' own; its pods are validated below")
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize(("name", "pod"), _pods(), ids=lambda value: value if isinstance(value, str) else "")
def test_pod_is_valid_and_restricted(name: str, pod: dict[str, Any]) -> None:
    """Pod Security Standards, profile "restricted", and a read-only root file system."""
    import kubernetes_validate

    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(whole, VERSION, strict=True)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        locked = container["securityContext"]
        assert locked["allowPrivilegeEscalation"] is False and locked["capabilities"] == {"drop": ["ALL"]}
        assert locked["readOnlyRootFilesystem"] is True
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        for variable in container.get("env", []):
            secret = re.search("PASSWORD|SECRET|TOKEN|KEY|URI", variable["name"])
            assert not secret or "secretKeyRef" in variable["valueFrom"], f"{variable['name']} is written out"


def test_no_manifest_holds_a_secret() -> None:
    assert not [path for path, document in _documents() if document["kind"] == "Secret"]
    for path in (KUSTOMIZE / "overlays" / "dev" / "secrets.example").iterdir():
        values = dict(line.split("=", 1) for line in path.read_text().splitlines())
        secret = [value for key, value in values.items() if re.search("password|SECRET|uri", key)]
        assert all("CHANGE-ME" in value for value in secret), path
    ignored = (ROOT / ".gitignore").read_text()
    assert "/infra/kustomize/overlays/dev/secrets/" in ignored and "/infra/compose.env" in ignored


def _built(overlay: str, folder: Path) -> list[dict[str, Any]]:
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
def test_overlay_builds_and_everything_it_makes_is_valid(overlay: str, tmp_path: Path) -> None:
    import kubernetes_validate

    made = _built(overlay, tmp_path)
    names = {(one["kind"], one["metadata"]["name"]) for one in made}
    wanted = {("Namespace", "ramen"), ("Deployment", "mlflow"), ("PersistentVolumeClaim", "ramen-work")}
    assert wanted <= names and len(names) == len(made)
    for document in made:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, VERSION, strict=True)
        if document["kind"] not in {"Namespace", "PriorityClass"}:
            assert document["metadata"]["namespace"] == resources.NAMESPACE
    images = set(re.findall(r"image: (\S+)", yaml.safe_dump_all(made)))
    assert images and not [image for image in images if ":" not in image or image.endswith(":latest")]
    if overlay == "prod":
        assert all("@sha256:" in image for image in images), "production runs digests"
        assert ("InferenceService", "ramen") in names and ("StatefulSet", "postgres") not in names
    else:
        assert ("StatefulSet", "postgres") in names and ("Secret", "ramen-object-store") in names


def test_what_is_referenced_exists(tmp_path: Path) -> None:
    """Secrets, config maps, claims, accounts and priorities that pods name are made by the overlay, or optional."""
    made = _built("dev", tmp_path)
    have = {(one["kind"], one["metadata"]["name"]) for one in made}
    keys = {(one["kind"], one["metadata"]["name"]): set(one.get("data", {})) for one in made if "data" in one}
    for document in made:
        pod = document.get("spec", {}).get("template", {}).get("spec") if "spec" in document else None
        if not pod:
            continue
        assert ("ServiceAccount", pod["serviceAccountName"]) in have
        for container in pod["containers"]:
            for variable in container.get("env", []):
                for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                    if reference := variable.get("valueFrom", {}).get(field):
                        found = reference["key"] in keys.get((kind, reference["name"]), set())
                        assert found or reference.get("optional"), reference


def test_names_are_the_pipelines() -> None:
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


def test_the_server_has_memory_for_the_largest_index_that_is_built() -> None:
    (server,) = (one for _, one in _documents() if one["kind"] == "InferenceService")
    predictor = server["spec"]["predictor"]
    most = predictor["containers"][0]["resources"]["limits"]["memory"]
    disk = next(volume for volume in predictor["volumes"] if "emptyDir" in volume)["emptyDir"]["sizeLimit"]
    assert min(int(most.removesuffix("Gi")), int(disk.removesuffix("Gi"))) >= IndexConfig().memory_gb + 4


# --- images ------------------------------------------------------------------------------------------------------


def test_dockerfile_is_clean() -> None:
    program = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([program, "--format", "json", str(DOCKERFILE)], capture_output=True, text=True)
    assert json.loads(done.stdout) == []


def test_every_image_is_pinned_unprivileged_and_without_build_tools() -> None:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    stages = {line.split()[-1] for line in lines if line.startswith("FROM")}
    assert {"cpu", "gpu", "mlflow"} <= stages
    assert all(base == "${PYTHON_IMAGE}" or base in stages for base in bases), "one base, given by one argument"
    shared = text[text.index(" AS final") :]
    assert "USER 1000:1000" in shared and "USER root" not in shared and "pip install" not in shared
    assert "COPY ." not in text and "ADD " not in text, "named folders only: no secrets, no data"
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
def test_production_build_wants_a_digest(image: str, production: str, refused: bool) -> None:
    """The instruction itself, run by a shell as a builder would."""
    (command,) = re.findall(r"^RUN (case .*?esac)$", DOCKERFILE.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        ["sh", "-c", command.replace("\\\n", "")],
        env={"PYTHON_IMAGE": image, "PRODUCTION": production}, capture_output=True, text=True,
    )  # fmt: skip
    assert bool(done.returncode) is refused
    assert ("not pinned by digest" in done.stderr) is refused


def test_compose_hardens_the_server_and_writes_no_password() -> None:
    services = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())["services"]
    assert services["mlflow"]["read_only"] and services["mlflow"]["cap_drop"] == ["ALL"]
    assert all(":" in service["image"] and not service["image"].endswith("latest") for service in services.values())
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET", key) or value.startswith("${")
