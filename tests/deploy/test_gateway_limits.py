"""What the gateway's containers may hold fits in their memory, and passes the proxy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from deploy_files import KUBERNETES, ROOT, compose_file

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
