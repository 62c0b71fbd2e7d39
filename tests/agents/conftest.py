"""Fixtures: a server, a gateway and a conductor for the programs of agents.

`make test-agents` installs the programs. Without them these tests are not collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_model import agent_engine, save_agent_model
from agent_program import KNOWN_TO_CODEX, PROGRAMS, AgentProgram, StartAgent
from conductor import Conductor, conductor
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from running_gateway import RunningGateway, running_gateway
from running_server import running_server

collect_ignore_glob = [] if (PROGRAMS / ".installed").exists() else ["test_*.py"]


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    model = save_agent_model(tmp_path_factory.mktemp("agent-model"))
    config = EngineConfig().with_keys(**agent_engine(model))
    log_path = tmp_path_factory.mktemp("agent-server") / "server.log"
    with running_server(config, log_path) as server:
        yield server


@pytest.fixture(scope="session")
def agent_gateway(
    agent_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("agent-gateway") / "gateway.log"
    url = f"grpc://{agent_server.endpoints.grpc_url}"
    flags = ("--alias", f"{KNOWN_TO_CODEX}=fastserve")
    with running_gateway(url, log_path, *flags) as running:
        yield running


@pytest.fixture
def playing(agent_gateway: RunningGateway) -> Iterator[Conductor]:
    """Plays what its test says. At the end, each part has been played, and without an error."""
    with conductor(agent_gateway.url) as playing:
        yield playing
        playing.wait_until_ended()
        assert not playing.errors()
        assert not playing.moves


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The directory in which an agent works, with a file to change."""
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "notes.txt").write_text("one\ntwo\n", encoding="utf-8")
    return directory


@pytest.fixture
def start_agent(playing: Conductor, tmp_path: Path, work: Path) -> StartAgent:
    """Makes an agent that ``fastserve launch`` starts: its name, further options of that command,
    and further variables of its environment."""

    def start(name: str, *options: str, **environment: str) -> AgentProgram:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        options = ("--url", playing.url, *options)
        return AgentProgram(name, home, work, options, environment)

    return start
