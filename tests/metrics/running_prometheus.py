"""A real Prometheus with the configuration of ``deploy/`` and targets on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx2
import pytest
import yaml
from waiting import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
RULES = DEPLOY / "prometheus" / "rules.yml"
START_TRIES = 5
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
QUERY_TIMEOUT_S = 60.0


def program(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``; skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60.0)


@dataclass(frozen=True)
class RunningPrometheus:
    url: str
    config_path: Path
    log_path: Path

    def get(self, path: str, **parameters: str) -> Any:
        """The answer's ``data``. Fails with Prometheus' message if it refuses the query."""
        response = httpx2.get(
            f"{self.url}/api/v1/{path}", params=parameters, timeout=QUERY_TIMEOUT_S
        )
        body = response.json()
        assert body["status"] == "success", f"{parameters}: {body['error']}"
        return body["data"]

    def values(self, expression: str) -> list[float]:
        """Current values of all series of the expression."""
        return [float(item["value"][1]) for item in self.get("query", query=expression)["result"]]


def local_config(directory: Path, targets: dict[str, str], key_path: Path) -> Path:
    """Writes the shipped files with other addresses, another key file and shorter intervals."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] |= {
        "scrape_interval": "2s",
        "scrape_timeout": "2s",
        "evaluation_interval": "2s",
    }
    assert {job["job_name"] for job in config["scrape_configs"]} == set(targets)
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(key_path)
    shutil.copy(RULES, directory / RULES.name)
    path = directory / CONFIG.name
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def running_prometheus(config_path: Path) -> Iterator[RunningPrometheus]:
    """Runs Prometheus, which is ready when the block begins."""
    log_path = config_path.with_name("prometheus.log")
    for _ in range(START_TRIES):
        address = _free_address()
        with log_path.open("wb") as log, _process(config_path, address, log) as process:
            try:
                wait_for(partial(_is_ready_or_gone, process, address), START_TIMEOUT_S)
                if process.poll() is None:
                    yield RunningPrometheus(f"http://{address}", config_path, log_path)
                    return
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
        text = log_path.read_text(encoding="utf-8")
        assert "address already in use" in text, text  # another program took the port first
    raise AssertionError(f"the port was taken {START_TRIES} times")


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _process(config_path: Path, address: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [
        program("prometheus"),
        f"--config.file={config_path}",
        f"--storage.tsdb.path={config_path.with_name('data')}",
        "--storage.tsdb.retention.time=1d",
        f"--web.listen-address={address}",
        "--log.level=debug",
    ]
    return subprocess.Popen(command, stderr=log)


def _is_ready_or_gone(process: subprocess.Popen[bytes], address: str) -> bool:
    if process.poll() is not None:
        return True
    try:
        return httpx2.get(f"http://{address}/-/ready", timeout=QUERY_TIMEOUT_S).is_success
    except httpx2.TransportError:
        return False
