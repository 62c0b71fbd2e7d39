"""A model is loaded and unloaded again and again, beside one that answers.

`make test` has a short one among the tests of several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from model_control import ModelControl, ServerHoldings, load_and_unload
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

OTHER = "other"
CYCLES, WARM_UP_CYCLES = 20, 3
# tritonserver's allocator keeps some of what the first loads took.
MOST_GROWTH_BYTES = 4 << 20


@pytest.mark.timeout(900)
def test_twenty_loads_give_everything_back(
    tiny_config: EngineConfig,
    tmp_path: Path,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    if not is_long:
        pytest.skip("it takes minutes")
    server = TritonServer(
        dict.fromkeys((MODEL_NAME, OTHER), tiny_config),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=tmp_path / "server.log",
        model_control=True,
    )
    server.start(START_TIMEOUT_S)
    try:
        control = ModelControl(server)
        control.unload(OTHER)
        for _ in range(WARM_UP_CYCLES):
            first = load_and_unload(control, server, OTHER)
        for _ in range(CYCLES):
            last = load_and_unload(control, server, OTHER)
            wait_for(lambda: ServerHoldings.of(server).counts() == first.counts())
        assert server.restarts == 0
    finally:
        server.stop()
    growth = last.tritonserver.memory_bytes - first.tritonserver.memory_bytes
    assert growth <= MOST_GROWTH_BYTES
    row(
        {
            "loads": CYCLES,
            "processes": last.num_processes,
            "names in /dev/shm": last.num_shared_memory_names,
            "listening ports": last.num_listening,
            "tritonserver's descriptors": last.tritonserver.num_descriptors,
            "its threads": last.tritonserver.num_threads,
            "its memory before, MiB": round(first.tritonserver.memory_bytes / 2**20, 1),
            "after, MiB": round(last.tritonserver.memory_bytes / 2**20, 1),
        }
    )
