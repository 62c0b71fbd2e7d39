"""The gateway's limits fit its container's memory and the proxy's limits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from deploy_files import KUBERNETES, ROOT, compose_file
from fastserve_client.listening import DEFAULT_KEEP_ALIVE_S

MIB = 1 << 20
# docs/deploy.md, *Sizing*.
BASE_BYTES = 100 * MIB
MAX_BYTES_PER_BYTE = 45


def compose_gateway() -> tuple[list[str], str]:
    gateway = compose_file()["services"]["gateway"]
    return gateway["command"], gateway["mem_limit"].upper()


def kubernetes_gateway() -> tuple[list[str], str]:
    text = (KUBERNETES / "base" / "gateway.yaml").read_text(encoding="utf-8")
    manifests: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    (deployment,) = (one for one in manifests if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container["args"], container["resources"]["limits"]["memory"].removesuffix("i")


@pytest.mark.parametrize("gateway", [compose_gateway, kubernetes_gateway])
def test_bodies_fit_in_the_memory(gateway: Any) -> None:
    arguments, limit = gateway()
    flags = dict(argument.split("=", 1) for argument in arguments)
    assert limit.endswith("M")
    held = int(flags["--max-held-bytes"])
    assert BASE_BYTES + MAX_BYTES_PER_BYTE * held <= int(limit[:-1]) * MIB
    proxy = (ROOT / "deploy" / "nginx" / "fastserve.conf").read_text(encoding="utf-8")
    (size,) = re.findall(r"client_max_body_size (\d+)m;", proxy)
    assert int(flags["--max-body-bytes"]) == int(size) * MIB


def test_proxies_let_go_of_idle_connections_before_the_gateway() -> None:
    nginx = (ROOT / "deploy" / "nginx" / "fastserve.conf").read_text(encoding="utf-8")
    caddy = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    kept_s = [
        int(seconds)
        for text, setting in ((nginx, "keepalive_timeout"), (caddy, "keepalive"))
        for seconds in re.findall(rf"^\s+{setting} (\d+)s\b", text, re.MULTILINE)
    ]
    assert len(kept_s) == 2
    arguments = [*compose_gateway()[0], *kubernetes_gateway()[0]]
    chosen_s = [int(one.partition("=")[2]) for one in arguments if "--keep-alive-s" in one]
    # Twice the time, since proxy and gateway see the end of an answer at different moments.
    assert min(DEFAULT_KEEP_ALIVE_S, *chosen_s) >= 2 * max(kept_s)
