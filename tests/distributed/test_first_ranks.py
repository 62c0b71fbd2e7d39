"""The first ranks start before there is an engine. None is left if there never is one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend import SamplingParams
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.engine.rank_factory import RankFactory
from fastserve_backend.errors import ConfigError
from fastserve_backend.job import JobOutput
from started_processes import RANK, StartedProcesses, noting_processes
from waiting import wait_for

TIMEOUT_S = 150.0
# Loads a model as Triton's stub does. It prints how many ranks were started, why the model was
# refused, and what is left.
STUB = """
import os, sys, tempfile
from unittest.mock import Mock
import psutil
class Refused(Exception):
    pass
sys.modules["triton_python_backend_utils"] = Mock(TritonModelException=Refused)
from fastserve_backend.executor.rank_processes import RankProcesses
from fastserve_backend.serving.triton_model import TritonPythonModel
for name in sys.argv[2:]:
    sys.modules[name] = None
started = []
start = RankProcesses.start
def count(self, num_ranks, *arguments, **keys):
    started.append(num_ranks)
    start(self, num_ranks, *arguments, **keys)
RankProcesses.start = count
try:
    TritonPythonModel().initialize(
        {"model_name": "m", "model_version": "1", "model_repository": sys.argv[1]}
    )
except Refused as error:
    print(started, psutil.Process().children(), os.listdir(tempfile.gettempdir()))
    print(error)
"""


@pytest.fixture
def config(small_opt: Path, tokenizer: Path) -> EngineConfig:
    keys = {"device": "cpu", "device_blocks": 40, "swap_space_gib": 0.05}
    return EngineConfig().with_keys(
        model=str(small_opt), tokenizer=str(tokenizer), tensor_parallel_size=2, **keys
    )


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files, which must be empty afterwards."""
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert not list(directory.iterdir())


@pytest.fixture
def started() -> Iterator[StartedProcesses]:
    """The processes that the test starts."""
    with noting_processes() as noted:
        yield noted


def test_ranks_that_no_engine_took_end_at_once(
    config: EngineConfig, empty: Path, started: StartedProcesses
) -> None:
    factory = RankFactory(config.parallel)
    assert len(started.left(RANK)) == 2
    factory.close()
    assert not started.left(RANK)
    factory.close()


def test_an_engine_takes_the_first_ranks_and_replaces_them(
    config: EngineConfig, empty: Path, started: StartedProcesses
) -> None:
    outputs: list[JobOutput] = []
    factory = RankFactory(config.parallel)
    first = started.of(RANK)
    assert len(first) == 2
    engine = Engine(config, rank_factory=factory)
    try:
        assert started.left(RANK) == started.of(RANK) == first
        first[1].kill()
        wait_for(lambda: engine.counters.worker_restarts == 1)
        engine.submit("job", [5, 6], SamplingParams(max_tokens=2, ignore_eos=True), outputs.append)
        wait_for(lambda: bool(outputs) and outputs[-1].finish_reason is not None, TIMEOUT_S)
        assert started.left(RANK) == started.of(RANK)[2:]
        assert len(started.left(RANK)) == 2
    finally:
        engine.close()
    assert not started.left(RANK)


def test_ranks_of_a_refused_configuration_are_the_callers(
    config: EngineConfig, empty: Path, started: StartedProcesses
) -> None:
    factory = RankFactory(config.parallel)
    with pytest.raises(ConfigError, match="/nowhere"):
        Engine(config.with_keys(tenants_file="/nowhere"), rank_factory=factory)
    assert len(started.left(RANK)) == 2
    factory.close()
    assert not started.left(RANK)


@pytest.mark.parametrize(
    ("keys", "variables", "missing", "ranks", "reason"),
    [
        ("block_sise: 16", {}, "", "[]", "block_sise: unknown key"),
        ("model: {model: opt-125m, load_format: dummy, tokenizer: /nowhere}", {}, "", "[2]", "/no"),
        ("tenants: {tenants_file: /nowhere}", {}, "", "[2]", "/nowhere"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "nowhere"}, "", "[2]", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("", {}, "fastserve_backend.engine.engine", "[2]", "fastserve_backend.engine.engine"),
    ],
    ids=["configuration", "tokenizer", "tenants", "traces", "module"],
)
def test_a_model_that_cannot_load_leaves_no_rank(
    keys: str, variables: dict[str, str], missing: str, ranks: str, reason: str, tmp_path: Path
) -> None:
    engine_file = tmp_path / "engine.yaml"
    engine_file.write_text(f"parallel: {{tensor_parallel_size: 2}}\n{keys}\n", encoding="utf-8")
    (tmp_path / "t").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STUB, str(tmp_path), *missing.split()],
        env=os.environ | variables | {"TMPDIR": str(tmp_path / "t")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    left, refused = done.stdout.split("\n", 1)
    assert left == f"{ranks} [] []", done.stderr
    assert reason in refused
