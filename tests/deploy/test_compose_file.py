"""docker-compose.yml is valid, and locks every service down as docs/deploy.md says."""

from __future__ import annotations

from typing import Any

import pytest
from deploy_files import PROFILES, compose_config, dockerfile_stage

INTERNAL = {"serving", "monitoring"}


@pytest.fixture(scope="module", params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def config(profile: str) -> dict[str, Any]:
    return compose_config(profile)


def test_a_profile_is_one_model_server_and_what_is_in_front(
    profile: str, config: dict[str, Any]
) -> None:
    assert set(config["services"]) == {f"triton-{profile}", "gateway", "prometheus", "grafana"}
    triton = config["services"][f"triton-{profile}"]
    assert triton["networks"]["serving"]["aliases"] == ["triton"]
    assert triton["build"]["args"]["DEVICE"] == profile
    devices = triton.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert bool(devices) == (profile == "gpu")
    if profile == "gpu":  # the image's own command, and no other device
        options = [one.replace("=", " ") for one in triton["command"]]
        own = " ".join(dockerfile_stage("triton").command)
        assert " ".join(options) == f"{own} --device cuda"


def test_nothing_starts_without_a_profile() -> None:
    assert compose_config()["services"] == {}


def test_only_gateway_and_grafana_are_published_and_only_on_loopback(
    config: dict[str, Any],
) -> None:
    published = {name: s["ports"] for name, s in config["services"].items() if "ports" in s}
    assert set(published) == {"gateway", "grafana"}
    for ports in published.values():
        assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert {name for name, n in config["networks"].items() if n.get("internal")} == INTERNAL
    for name, service in config["services"].items():
        assert ("edge" in service["networks"]) == (name in published)


def test_every_service_is_locked_and_limited(config: dict[str, Any]) -> None:
    for name, service in config["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert service["restart"] == "unless-stopped", name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert service["healthcheck"]["test"][0] == "CMD", name
        user = service.get("user")
        if user is None:  # that of our own image
            user = dockerfile_stage(service["build"]["target"]).user
        assert int(user.partition(":")[0]) > 0, name


def test_each_waits_for_what_it_needs(config: dict[str, Any]) -> None:
    services = config["services"]
    for name, service in services.items():
        for dependency in service.get("depends_on", {}).values():
            assert dependency["condition"] == "service_healthy", name
    assert set(services["gateway"]["depends_on"]) & set(services), "waits for no model server"


def test_keys_and_passwords_come_from_files(config: dict[str, Any]) -> None:
    for secret in config["secrets"].values():
        assert "/deploy/secrets/" in secret["file"]
    granted = {
        name: {secret["source"] for secret in service.get("secrets", [])}
        for name, service in config["services"].items()
        if "secrets" in service
    }
    assert granted == {
        "gateway": {"api_keys", "metrics_key"},
        "prometheus": {"metrics_key"},
        "grafana": {"grafana_password"},
    }
