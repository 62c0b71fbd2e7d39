"""``fastserve gateway`` as a process, as an operator runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from openai import AsyncOpenAI, OpenAI
from waiting import wait_for_log

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-m", "fastserve_backend", "gateway"]


@dataclass(frozen=True)
class RunningGateway:
    url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def api_url(self) -> str:
        return f"{self.url}/v1"

    def get(self, path: str, key: str | None = None) -> httpx2.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.get(f"{self.url}{path}", headers=headers, timeout=REQUEST_TIMEOUT_S)

    def num_requests(self, route: str, status: int) -> float:
        """Requests that have ended. One is counted a moment after its client has the answer."""
        name = f'fastserve_gateway_request_seconds_count{{route="{route}",status="{status}"}} '
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.api_url, api_key=key, max_retries=0, timeout=REQUEST_TIMEOUT_S)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=self.api_url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")


@contextmanager
def running_gateway(grpc_url: str, log_path: Path, *flags: str) -> Iterator[RunningGateway]:
    """Runs a gateway that listens when the block begins, and must end with exit code 0 on
    SIGTERM."""
    # A wide terminal keeps lines of the log whole.
    environment = os.environ | {"COLUMNS": "500"}
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [*COMMAND, "--port", "0", "--url", grpc_url, *flags], stderr=log, env=environment
        ) as process,
    ):
        try:
            line = r"listening on (http://\S+)/v1\n"
            url = wait_for_log(process, log_path, line, START_TIMEOUT_S)
            yield RunningGateway(url, log_path, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0, log_path.read_text(encoding="utf-8")
        finally:
            process.kill()
