"""The manifests follow Kubernetes' schemas, and the "restricted" standard of its pods."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deploy_files import KUBERNETES, PROFILES, dockerfile_stage

_KUSTOMIZE_TIMEOUT_S = 60.0


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def plain_manifests() -> list[dict[str, Any]]:
    files = [*(KUBERNETES / "base").glob("*.yaml"), KUBERNETES / "secret.example.yaml"]
    found = [one for path in files for one in documents(path.read_text(encoding="utf-8"))]
    # The engine's configuration and kustomize's own file are no resources of the cluster.
    return [one for one in found if "kind" in one and one["kind"] != "Kustomization"]


def deployments() -> Iterator[dict[str, Any]]:
    return (one for one in plain_manifests() if one["kind"] == "Deployment")


def test_manifests_follow_the_schemas() -> None:
    manifests = plain_manifests()
    assert len(manifests) > 10
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_schemas_are_strict() -> None:
    manifest = next(deployments())
    manifest["spec"]["template"]["spec"]["securityContext"]["runAsNonRooot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.parametrize("device", PROFILES)
def test_overlays(device: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERNETES / device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_KUSTOMIZE_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    built = {(one["kind"], one["metadata"]["name"]): one for one in documents(done.stdout)}
    for manifest in built.values():
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    (container,) = built["Deployment", "triton"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(f"-{device}")
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (device == "gpu")
    assert ("--device=cuda" in container["args"]) == (device == "gpu")


def test_pods_are_restricted_and_fit_their_images() -> None:
    assert {deployment["metadata"]["name"] for deployment in deployments()} == {"triton", "gateway"}
    for deployment in deployments():
        stage = dockerfile_stage(deployment["metadata"]["name"])
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"{pod['securityContext']['runAsUser']}:" in stage.user
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert "memory" in container["resources"]["limits"]


def test_the_example_has_no_key() -> None:
    (secret,) = (one for one in plain_manifests() if one["kind"] == "Secret")
    assert secret["stringData"] == {"api_keys": ""}


def test_services_stay_inside_and_triton_is_for_the_gateway() -> None:
    services = [one for one in plain_manifests() if one["kind"] == "Service"]
    assert {service["spec"]["type"] for service in services} == {"ClusterIP"}
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in plain_manifests()
        if one["kind"] == "NetworkPolicy"
    }
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    callers = {
        port["port"]: rule["from"]
        for rule in policies["triton"]["ingress"]
        for port in rule["ports"]
    }
    assert set(callers) == {8001, 8002}
    gateway = {"app.kubernetes.io/component": "gateway"}
    assert callers[8001] == [{"podSelector": {"matchLabels": gateway}}]
