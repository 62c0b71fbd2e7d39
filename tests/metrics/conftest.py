from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from metric_traffic import (
    BLOCK_SIZE,
    DEVICE_BLOCKS,
    MAX_NUM_SEQS,
    TPOT_SLO_MS,
    TTFT_SLO_MS,
    Traffic,
    drive,
)
from running_server import running_server
from tiny_model import TINY_OPT, engine_options


@pytest.fixture(scope="session")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log."""
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="session")
def server(log_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server short of blocks, with short quanta and starvation limits, so that every counted
    event happens: preemption, demotion, promotion, swapping. Lengths are predicted, which this
    policy ignores."""
    directory = tmp_path_factory.mktemp("tiny-opt")
    (directory / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    options = engine_options(directory) | {
        "device_blocks": DEVICE_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "strategy": "reactive",
        "base_quantum_ms": 2.0,
        "starvation_ms": 100.0,
        "ttft_slo_ms": TTFT_SLO_MS,
        "tpot_slo_ms": TPOT_SLO_MS,
        "length_prediction": "on",
        "length_prediction_dir": str(tmp_path_factory.mktemp("lengths")),
    }
    config = EngineConfig().with_keys(**options)
    with running_server(config, log_path) as triton:
        yield triton


@pytest.fixture(scope="session")
def traffic(server: TritonServer) -> Traffic:
    return drive(server)
