"""Loads and unloads models of a server that was started with ``model_control``."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.process import ADMIN_HEADER
from process_holdings import Holdings
from serving_client import post
from tiny_model import START_TIMEOUT_S
from waiting import wait_for


class ModelControl:
    """Requests to the model-repository API, with the key."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        key = server.runtime.admin_key_file.read_text(encoding="ascii")
        self._headers = {ADMIN_HEADER: key}

    def load(self, model: str, **parameters: str) -> httpx2.Response:
        """Returns when the model is loaded, or could not be loaded."""
        return self._post(f"models/{model}/load", {"parameters": parameters})

    def start_unload(self, model: str) -> None:
        assert self._post(f"models/{model}/unload", {}).status_code == 200

    def unload(self, model: str) -> None:
        """Returns when the model's processes have ended."""
        pid = self._server.runtime.stub_pid(model)
        self.start_unload(model)
        wait_for(lambda: self.state(model) == "UNAVAILABLE")
        wait_for(lambda: pid is None or not psutil.pid_exists(pid))

    def state(self, model: str) -> str | None:
        """None: the model was never loaded."""
        models = self._post("index", {}).json()
        (state,) = (one.get("state") for one in models if one["name"] == model)
        return state

    def _post(self, path: str, body: Any) -> httpx2.Response:
        url = f"{self._server.endpoints.http_url}/v2/repository/{path}"
        return httpx2.post(url, json=body, headers=self._headers, timeout=START_TIMEOUT_S)


@dataclass(frozen=True)
class ServerHoldings:
    """What a server and its launcher, which is this process, hold."""

    num_processes: int
    num_shared_memory_names: int
    num_files: int
    """In the runtime directory."""
    num_listening: int
    """TCP ports of all its processes."""
    num_launcher_descriptors: int
    tritonserver: Holdings

    @classmethod
    def of(cls, server: TritonServer) -> ServerHoldings:
        runtime = server.runtime
        names = Path("/dev/shm").glob(f"{runtime.shared_memory_prefix}*")
        pids = runtime.processes()
        connections = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                connections += psutil.Process(pid).net_connections("tcp")
        return cls(
            len(pids),
            len(list(names)),
            sum(len(folders) + len(files) for _, folders, files in os.walk(runtime.path)),
            sum(one.status == psutil.CONN_LISTEN for one in connections),
            psutil.Process().num_fds(),
            Holdings.of(server.pid),
        )

    def counts(self) -> tuple[int, ...]:
        """All but memory, which does not return to the byte."""
        return (
            self.num_processes,
            self.num_shared_memory_names,
            self.num_files,
            self.num_listening,
            self.num_launcher_descriptors,
            self.tritonserver.num_descriptors,
            self.tritonserver.num_threads,
        )

    def is_no_more_than(self, earlier: ServerHoldings) -> bool:
        """Less is no leak: whatever ran before in this process may have closed files late."""
        return all(now <= then for now, then in zip(self.counts(), earlier.counts(), strict=True))


def load_and_unload(control: ModelControl, server: TritonServer, model: str) -> ServerHoldings:
    """Loads a model, has it answer, unloads it; returns what the server holds then."""
    response = control.load(model)
    assert response.status_code == 200, response.text
    body = {"text_input": "Hello", "max_tokens": 2}
    answer = post(server.endpoints.http_url, f"/v2/models/{model}/generate", body)
    assert answer.status_code == 200, answer.text
    control.unload(model)
    return ServerHoldings.of(server)
