"""What the containers run, under the limits of docker-compose.yml, as far as that goes without an
engine: the images' commands, users and environments; a read-only root; no capabilities; the health
checks; the names of the services. A tritonserver is found on PATH, as in NVIDIA's image; it is the
one that the tests have.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deploy_files import ROOT, compose_file, dockerfile_stage
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_kernels.cpu.builder import BuildError, build
from sandbox import Container, RunningContainer
from tiny_model import START_TIMEOUT_S, TINY_OPT, engine_options

# The first test may compile the kernels.

KEY = "sk-for-this-test-only"
OPERATOR_KEY = "sk-to-look-at-this-test"
# Runs in the model server's container: the status of each path without the operator's key.
ASK = """
import sys, urllib.error, urllib.request
for path in sys.argv[1:]:
    body = b"{}" if path.endswith("index") else None
    try:
        urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000" + path, data=body))
        print(200)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
COMPLETE = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"model": "fastserve", "prompt": "Hello", "max_tokens": 4, "temperature": 0})
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[1]}
url = "http://127.0.0.1:9000/v1/completions"
try:
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        print(json.load(answer)["usage"]["completion_tokens"])
except urllib.error.HTTPError as error:
    print("status", error.code)
"""
WRITE = """
import os, sys
for folder in sys.argv[1:]:
    try:
        open(os.path.join(folder, "written"), "w").close()
        print(folder)
    except OSError:
        pass
"""


def service(name: str) -> dict[str, Any]:
    return compose_file()["services"][name]


def container_environment(stage: str, *folders: Path) -> dict[str, str]:
    """The image's environment. Its folder of programs is the one of the running tests."""
    environment = dict(dockerfile_stage(stage).environment)
    programs = [str(Path(sys.executable).parent), *map(str, folders)]
    environment["PATH"] = ":".join([*programs, "/usr/local/bin", "/usr/bin", "/bin"])
    environment["GOMP_SPINCOUNT"] = "1000"  # the cores are shared with other programs
    return environment


def sources() -> dict[Path, str]:
    """Folders of the source tree and of the tests' Python environment."""
    return {path: str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix))}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningContainer]:
    directory = tmp_path_factory.mktemp("triton")
    cache = directory / "cache"
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    _add_compiled_kernels(cache / "fastserve" / "kernels")
    engine = directory / "engine.yaml"
    config = EngineConfig().with_keys(**engine_options(Path("/cache/tiny")))
    engine.write_text(config.to_yaml(), encoding="utf-8")
    server = directory / "opt"
    _install_tritonserver(server)
    stage = dockerfile_stage("triton")
    container = Container(
        command=[
            *stage.command,
            "--allow-old-triton",
        ],  # nvidia-pytriton's is older than the image's
        user=stage.user,
        environment=container_environment("triton", server / "bin"),
        read_only=sources() | {server: str(server), engine: "/etc/fastserve/engine.yaml"},
        writable={cache: "/cache"},
    )
    with container.run(directory / "container.log") as running:
        running.until_logged("/metrics", START_TIMEOUT_S)  # the last of the printed endpoints
        yield running


@pytest.fixture(scope="module")
def gateway(
    triton: RunningContainer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningContainer]:
    directory = tmp_path_factory.mktemp("gateway")
    keys, operator_keys = directory / "api_keys", directory / "metrics_key"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    operator_keys.write_text(f"{OPERATOR_KEY}\n", encoding="utf-8")
    stage = dockerfile_stage("gateway")
    container = Container(
        command=[*stage.entrypoint, *service("gateway")["command"]],
        user=stage.user,
        environment=container_environment("gateway"),
        read_only=sources()
        | {keys: "/run/secrets/api_keys", operator_keys: "/run/secrets/metrics_key"},
        writable={},
        hosts="triton",
        network_of=triton,
    )
    with container.run(directory / "container.log") as running:
        running.until_logged("listening on", START_TIMEOUT_S)
        yield running


def _add_compiled_kernels(folder: Path) -> None:
    """Adds kernels that the server would compile itself. After the first start, a volume has
    them."""
    folder.mkdir(parents=True, mode=0o700)
    with suppress(BuildError):  # no compiler: the server will do without the kernels, too
        shutil.copy(build(), folder)


def _install_tritonserver(directory: Path) -> None:
    """Writes ``directory/bin/tritonserver``, which needs neither flags nor variables."""
    installation = TritonInstallation.find()
    flags = installation.prepare_backends(directory / "backends")
    libraries = installation.environment({}).get("LD_LIBRARY_PATH", "")
    program = directory / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    words = shlex.join([str(installation.binary), *flags])
    program.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH={shlex.quote(libraries)}\nexec {words} "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)


def test_health_checks_hold(triton: RunningContainer, gateway: RunningContainer) -> None:
    for container, name in ((triton, "triton-gpu"), (triton, "triton-cpu"), (gateway, "gateway")):
        kind, *check = service(name)["healthcheck"]["test"]
        assert kind == "CMD"
        done = container.execute(*check)
        assert done.returncode == 0, done.stderr


def test_what_changes_the_server_is_locked(triton: RunningContainer) -> None:
    locked = [
        "/v2/repository/index",
        "/v2/systemsharedmemory/status",
        "/v2/trace/setting",
        "/v2/logging",
    ]
    done = triton.execute("python3", "-c", ASK, *locked, "/v2/health/live")
    assert done.stdout.split() == ["403"] * len(locked) + ["200"], done.stderr


def test_an_answer_needs_a_key(gateway: RunningContainer) -> None:
    assert gateway.execute("python3", "-c", COMPLETE, KEY).stdout == "4\n"
    assert gateway.execute("python3", "-c", COMPLETE, "sk-other").stdout == "status 401\n"


def test_only_what_compose_grants_can_be_written(
    triton: RunningContainer, gateway: RunningContainer
) -> None:
    folders = ["/", "/etc/fastserve", "/usr", str(ROOT), "/cache", "/tmp", "/dev/shm"]
    done = triton.execute("python3", "-c", WRITE, *folders)
    assert done.stdout.split() == ["/cache", "/tmp", "/dev/shm"]
    assert gateway.execute("python3", "-c", WRITE, *folders).stdout.split() == ["/tmp", "/dev/shm"]


def test_processes_have_no_rights(triton: RunningContainer, gateway: RunningContainer) -> None:
    for container in (triton, gateway):
        status = Path(f"/proc/{container.pid}/status").read_text(encoding="utf-8")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        done = container.execute("python3", "-c", "import os; print(os.getuid())")
        assert int(done.stdout) > 0
