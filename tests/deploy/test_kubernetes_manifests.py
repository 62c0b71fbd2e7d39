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
from fastserve_backend.serving.process import DRAIN_TIMEOUT_S

_KUSTOMIZE_TIMEOUT_S = 120.0
_OVERLAYS = (*PROFILES, "fleet", "autoscaled", "inference_gateway")
# Kinds of other projects, whose schemas no package has. docs/cluster.md says how they were checked.
_OTHER_KINDS = {"HTTPRoute", "ScaledObject"}


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def plain_manifests() -> list[dict[str, Any]]:
    files = [
        *(KUBERNETES / "base").glob("*.yaml"),
        KUBERNETES / "secret.example.yaml",
        KUBERNETES / "autoscaled" / "hpa.yaml",
    ]
    found = [one for path in files for one in documents(path.read_text(encoding="utf-8"))]
    # The engine's configuration and kustomize's own file are no resources of the cluster.
    return [one for one in found if "kind" in one and one["kind"] != "Kustomization"]


def built(overlay: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What kustomize makes of a directory, by kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUBERNETES / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_KUSTOMIZE_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in documents(done.stdout)}


def workloads() -> Iterator[dict[str, Any]]:
    return (one for one in plain_manifests() if one["kind"] in ("Deployment", "StatefulSet"))


def containers_of(workload: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in workload["spec"]["template"]["spec"]["containers"]}


def server_urls(gateway: dict[str, Any]) -> list[str]:
    flags = (argument.partition("=") for argument in gateway["args"])
    return [value for name, _, value in flags if name == "--url"]


def assert_restricted(container: dict[str, Any]) -> None:
    context = dict(container["securityContext"])
    context.pop("runAsUser", None)  # where the pod's other containers have another user
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert "memory" in container["resources"]["limits"]


def test_manifests_follow_the_schemas() -> None:
    manifests = plain_manifests()
    assert len(manifests) > 10
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_the_schemas_are_strict() -> None:
    manifest = next(workloads())
    manifest["spec"]["template"]["spec"]["securityContext"]["runAsNonRooot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.parametrize("overlay", _OVERLAYS)
def test_overlays(overlay: str) -> None:
    manifests = built(overlay)
    for (kind, _), manifest in manifests.items():
        if kind not in _OTHER_KINDS:
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    device = "cpu" if overlay == "cpu" else "gpu"
    server = containers_of(manifests["StatefulSet", "triton"])["triton"]
    assert server["image"].endswith(f"-{device}")
    assert ("nvidia.com/gpu" in server["resources"]["limits"]) == (device == "gpu")
    assert ("--device=cuda" in server["args"]) == (device == "gpu")


@pytest.mark.parametrize(("overlay", "num_servers"), [("gpu", 1), ("fleet", 2), ("autoscaled", 4)])
def test_gateways_know_every_server(overlay: str, num_servers: int) -> None:
    manifests = built(overlay)
    gateway = containers_of(manifests["Deployment", "gateway"])["gateway"]
    assert server_urls(gateway) == [f"grpc://triton-{n}.triton:8001" for n in range(num_servers)]
    spec = manifests["StatefulSet", "triton"]["spec"]
    # The names of pods are known only through a service without an address.
    assert manifests["Service", spec["serviceName"]]["spec"]["clusterIP"] == "None"
    if overlay == "autoscaled":
        assert "replicas" not in spec
        assert manifests["ScaledObject", "triton"]["spec"]["maxReplicaCount"] == num_servers
        (hpa,) = (one for one in plain_manifests() if one["kind"] == "HorizontalPodAutoscaler")
        assert hpa["spec"]["maxReplicas"] == num_servers
    else:
        assert spec["replicas"] == num_servers


def test_pods_are_restricted_and_fit_their_images() -> None:
    assert {workload["metadata"]["name"] for workload in workloads()} == {"triton", "gateway"}
    for workload in workloads():
        stage = dockerfile_stage(workload["metadata"]["name"])
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"{pod['securityContext']['runAsUser']}:" in stage.user
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert_restricted(container)


def test_a_gateway_beside_its_server_is_like_one_of_its_own() -> None:
    beside = built("inference_gateway")
    assert "gateway" not in {name for _, name in beside}
    pod = beside["StatefulSet", "triton"]["spec"]["template"]["spec"]
    containers = containers_of(beside["StatefulSet", "triton"])
    gateway = containers["gateway"]
    assert_restricted(gateway)
    assert f"{gateway['securityContext']['runAsUser']}:" in dockerfile_stage("gateway").user
    assert server_urls(gateway) == ["grpc://127.0.0.1:8001"]
    alone = containers_of(built("gpu")["Deployment", "gateway"])["gateway"]
    for key in ("image", "resources", "lifecycle"):
        assert gateway[key] == alone[key]
    kept = [one for one in alone["args"] if not one.startswith(("--url", "--keep-alive-s"))]
    assert set(kept) < set(gateway["args"])
    # The server takes no new requests once its gateway gets none.
    assert containers["triton"]["lifecycle"] == gateway["lifecycle"]
    # The pool's port, and the policies that let the gateway and the endpoint picker through.
    values = yaml.safe_load(
        (KUBERNETES / "inference_gateway" / "router_values.yaml").read_text(encoding="utf-8")
    )
    (target,) = values["router"]["modelServers"]["targetPorts"]
    assert target["number"] in {port["containerPort"] for port in gateway["ports"]}
    rules = beside["NetworkPolicy", "server"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {target["number"], 8002}
    assert pod["terminationGracePeriodSeconds"] > 5 + DRAIN_TIMEOUT_S


def test_a_pod_is_killed_only_after_its_server_has_drained() -> None:
    for workload in workloads():
        grace_s = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > 5 + DRAIN_TIMEOUT_S


def test_kserve_runs_the_same_server() -> None:
    server_pod = built("gpu")["StatefulSet", "triton"]["spec"]["template"]["spec"]
    (server,) = server_pod["containers"]
    runtime, service = (
        yaml.safe_load((KUBERNETES / "kserve" / name).read_text(encoding="utf-8"))
        for name in ("serving_runtime.yaml", "inference_service.yaml")
    )
    predictor = service["spec"]["predictor"]
    assert predictor["securityContext"] == server_pod["securityContext"]
    model = predictor["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    (container,) = runtime["spec"]["containers"]
    assert_restricted(container | {"resources": model["resources"]})
    assert container["image"] == server["image"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        server[probe]["httpGet"]["port"] = ports["http"]
        assert container[probe] == server[probe]


def test_the_example_has_no_key() -> None:
    (secret,) = (one for one in plain_manifests() if one["kind"] == "Secret")
    assert secret["stringData"] == {"api_keys": "", "operator_keys": ""}


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
