from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx2
import psutil
import pytest
from attacker import ENDLESS
from byte_tokenizer import save_byte_tokenizer
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fuzzed_values import VOCAB_SIZE
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway, running_gateway
from running_server import running_server
from serving_client import wait_until_idle
from tiny_model import TINY_OPT, engine_options
from waiting import wait_for

CHAT_TEMPLATE = (
    f"{{% set endless = '{ENDLESS}' %}}"
    + """\
{% for message in messages %}
{% if message.content == endless %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% endif %}
{% if message.role not in ("system", "user", "assistant", "tool") %}
{{ raise_exception("no such role: " + message.role) }}
{% endif %}
<s>{{ message.role }}: {{ message.content }}</s>
{% endfor %}
<s>assistant: """
)


LONGEST_QUEUE, SHORT_QUEUE = 10_000, 1000


@pytest.fixture(scope="session")
def chatty_config(tmp_path_factory: pytest.TempPathFactory, is_long: bool) -> EngineConfig:
    """A tiny model that accepts every kind of request, conversations and structured output
    included."""
    model = save_byte_tokenizer(tmp_path_factory.mktemp("chatty-opt"))
    config = TINY_OPT | {"vocab_size": VOCAB_SIZE}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return EngineConfig().with_keys(
        **engine_options(model)
        | {
            "max_model_len": 256,  # short, as some requests ask for as many tokens as fit
            "max_num_seqs": 64,
            "max_queued_requests": LONGEST_QUEUE if is_long else SHORT_QUEUE,
        }
    )


@pytest.fixture(scope="session")
def chatty_log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of ``chatty_server``."""
    return tmp_path_factory.mktemp("chatty-server") / "server.log"


@pytest.fixture(scope="session")
def chatty_server(chatty_config: EngineConfig, chatty_log_path: Path) -> Iterator[TritonServer]:
    with running_server(chatty_config, chatty_log_path) as running:
        yield running


@pytest.fixture(scope="session")
def chatty_gateway(
    chatty_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("chatty-gateway") / "gateway.log"
    with running_gateway(f"grpc://{chatty_server.endpoints.grpc_url}", log_path) as running:
        yield running


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--endurance"))


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Callable[[Mapping[str, object]], None]:
    """Records the test's row of the table, by column."""

    def record(columns: Mapping[str, object]) -> None:
        for name, value in columns.items():
            record_property(name, value)

    return record


@pytest.fixture
def note(row: Callable[[Mapping[str, object]], None]) -> Callable[..., None]:
    """Records a row of the table of caps."""

    def record(what: str, number: int, result: str, worst_s: float) -> None:
        row({"what": what, "number": number, "result": result, "worst time, s": f"{worst_s:.2f}"})

    return record


@pytest.fixture(scope="module")
def unharmed(chatty_server: TritonServer, chatty_gateway: RunningGateway) -> Iterator[None]:
    """Checks that a module's tests leave the same processes, no job and no open connection."""
    server, gateway = psutil.Process(chatty_server.pid), chatty_gateway.process
    stub = chatty_server.runtime.stub_pid()
    assert httpx2.get(
        f"{chatty_gateway.url}/health", timeout=REQUEST_TIMEOUT_S
    ).is_success  # then it has its connection
    wait_until_idle(chatty_server.endpoints)
    num_sockets = connections(server), connections(psutil.Process(gateway.pid))
    yield
    wait_until_idle(chatty_server.endpoints)
    assert (chatty_server.pid, chatty_server.runtime.stub_pid()) == (server.pid, stub)
    assert gateway.poll() is None
    wait_for(lambda: connections(server) <= num_sockets[0])
    wait_for(lambda: connections(psutil.Process(gateway.pid)) <= num_sockets[1])


def connections(process: psutil.Process) -> int:
    return len(process.net_connections("tcp"))


@pytest.fixture
def all_files_that_may_be_open() -> Iterator[None]:
    """Lifts this process's limit of open files, as gateway and launcher lift theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
