"""Several models in one server, beside Triton models of the operator."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.repository import ENGINE_FILE
from fastserve_client import FastServeClient
from fastserve_client.errors import ClientError, InvalidRequest
from fastserve_client.protocol import MODEL_NAME
from fastserve_client.terminal import generate_to_terminal
from held_thread import main_thread_held
from model_control import ModelControl, ServerHoldings, load_and_unload
from running_server import rank_pids
from serving_client import ANSWER_TIMEOUT_S, metric, post, server_sent_events
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

# With all that names may have.
OTHER = "tiny-2.b_C"
MODELS = (MODEL_NAME, OTHER)
PIPELINES = Path(__file__).parents[2] / "examples" / "pipelines"
RESTART_TIMEOUT_S = START_TIMEOUT_S
ERROR_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    running = TritonServer(
        dict.fromkeys(MODELS, tiny_config.with_keys(swap_space_gib=0.01)),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_path=tmp_path_factory.mktemp("several") / "server.log",
        model_repository=PIPELINES,
        model_control=True,
    )
    running.start(START_TIMEOUT_S)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def whole_configuration(server: TritonServer) -> str:
    return (server.runtime.repository / OTHER / ENGINE_FILE).read_text(encoding="utf-8")


@pytest.fixture
def control(server: TritonServer, whole_configuration: str) -> ModelControl:
    """All models are loaded, with their first configuration, whatever other tests did."""
    control = ModelControl(server)
    file = server.runtime.repository / OTHER / ENGINE_FILE
    is_changed = file.read_text(encoding="utf-8") != whole_configuration
    if is_changed:
        file.write_text(whole_configuration, encoding="utf-8")
    wait_for(lambda: control.state(OTHER) in ("READY", "UNAVAILABLE"))
    if is_changed or control.state(OTHER) != "READY":
        assert control.load(OTHER).status_code == 200
    return control


def ask(server: TritonServer, model: str, **body: Any) -> httpx2.Response:
    url = server.endpoints.http_url
    return post(url, f"/v2/models/{model}/generate", {"text_input": "Hello", **body})


def answers(server: TritonServer, model: str) -> bool:
    try:
        return ask(server, model, max_tokens=1).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("control")
def test_each_model_answers(model: str, server: TritonServer) -> None:
    grpc_url, out, err = f"grpc://{server.endpoints.grpc_url}", io.StringIO(), io.StringIO()
    options = {"max_tokens": 3, "ignore_eos": True}
    code = generate_to_terminal("Hello", url=grpc_url, model=model, out=out, err=err, **options)
    assert code == 0, err.getvalue()
    assert "3 tokens" in err.getvalue()
    url = server.endpoints.metrics_url
    wait_for(lambda: metric(url, "fastserve_generation_tokens_total", model=model) >= 3)


def test_models_are_loaded_and_unloaded_with_the_key_only(server: TritonServer) -> None:
    url = f"{server.endpoints.http_url}/v2/repository/models/{OTHER}/unload"
    for headers in ({}, {"fastserve-admin": "0" * 32}):
        refused = httpx2.post(url, headers=headers, timeout=ANSWER_TIMEOUT_S)
        assert refused.status_code == 403
    assert server.runtime.admin_key_file.parent.stat().st_mode & 0o777 == 0o700


def test_a_model_is_reloaded_with_another_configuration(
    control: ModelControl, server: TritonServer
) -> None:
    file, restarts = server.runtime.repository / OTHER / ENGINE_FILE, server.restarts
    changed = EngineConfig.from_yaml(file).with_keys(max_model_len=3000).to_yaml()

    # A configuration that is refused leaves the loaded model alone.
    file.write_text("scheduler: {quantum_ratio: 0}", encoding="utf-8")
    refused = control.load(OTHER)
    assert refused.status_code == 400
    assert "scheduler.quantum_ratio: got 0" in refused.json()["error"]
    assert answers(server, OTHER)

    file.write_text(changed, encoding="utf-8")
    assert control.load(OTHER).status_code == 200
    assert "3000" in ask(server, OTHER, max_tokens=3500).json()["error"]
    assert server.restarts == restarts


def test_requests_of_an_unloaded_model_end(control: ModelControl, server: TritonServer) -> None:
    restarts = server.restarts
    with FastServeClient(f"grpc://{server.endpoints.grpc_url}", model=OTHER) as client:
        chunks = client.stream("a", max_tokens=2000, ignore_eos=True)
        num_tokens = len(next(chunks).token_ids)
        with ExitStack() as until_refused:
            for pid in rank_pids(server.runtime):  # else the request might end before
                until_refused.enter_context(main_thread_held(pid))
            control.start_unload(OTHER)
            wait_for(lambda: control.state(OTHER) != "READY")
        wait_for(lambda: ask(server, OTHER, max_tokens=1).status_code == 404)
        num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
    assert num_tokens == 2000
    wait_for(lambda: control.state(OTHER) == "UNAVAILABLE")
    assert server.restarts == restarts


def test_unloading_gives_everything_back(control: ModelControl, server: TritonServer) -> None:
    control.unload(OTHER)
    first = load_and_unload(control, server, OTHER)
    load_and_unload(control, server, OTHER)
    wait_for(lambda: ServerHoldings.of(server).is_no_more_than(first))


@pytest.mark.parametrize(
    ("pipeline", "prompt", "output"),
    [("ask", {"question": "why?"}, "answer"), ("first_line", {"text_input": "a"}, "text_output")],
)
def test_another_triton_model_calls_ours(
    pipeline: str,
    prompt: dict[str, str],
    output: str,
    control: ModelControl,
    server: TritonServer,
) -> None:
    """An ensemble, and a Python model that calls it by BLS; both stream."""
    loaded = control.load(pipeline)
    assert loaded.status_code == 200, loaded.text

    def events(**sampling: Any) -> list[dict[str, Any]]:
        body = {**prompt, "sampling_parameters": json.dumps(sampling)}
        if pipeline == "ask":
            body["stream"] = True
        url = f"{server.endpoints.http_url}/v2/models/{pipeline}/generate_stream"
        with httpx2.stream("POST", url, json=body, timeout=60.0) as response:
            return list(server_sent_events(response.iter_lines()))

    def texts() -> list[str]:
        return [event[output] for event in events(max_tokens=500, ignore_eos=True)]

    if pipeline == "ask":
        # A busy server may send all tokens together.
        wait_for(lambda: len(texts()) > 1)
    assert "".join(text := texts())
    if pipeline == "first_line":
        assert "\n" not in "".join(text)
    (refused,) = events(max_tokens=-1)
    assert "max_tokens: got -1" in refused["error"]
    control.start_unload(pipeline)


def test_a_dead_process_restarts_the_loaded_models(
    control: ModelControl, server: TritonServer, caplog: pytest.LogCaptureFixture
) -> None:
    restarts = server.restarts
    is_running = {model: threading.Event() for model in MODELS}

    def run_until_an_error(model: str) -> ClientError:
        with FastServeClient(f"grpc://{server.endpoints.grpc_url}", model=model) as client:
            try:
                ends_s = time.monotonic() + ERROR_TIMEOUT_S
                while time.monotonic() < ends_s:  # a job may end before the server does
                    for _ in client.stream("a", max_tokens=2900, ignore_eos=True):
                        is_running[model].set()
            except ClientError as error:
                return error
        raise AssertionError(f"no job of {model} failed")

    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_until_an_error, model) for model in MODELS]
        for event in is_running.values():
            assert event.wait(ERROR_TIMEOUT_S)
        pid = server.runtime.stub_pid(OTHER)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert not any(isinstance(run.result(), InvalidRequest) for run in runs)
    wait_for(lambda: server.restarts == restarts + 1, RESTART_TIMEOUT_S)
    assert f"the process of {OTHER} ended; restarting the server" in caplog.text
    assert all(answers(server, model) for model in MODELS)

    # What was unloaded stays so.
    control.unload(OTHER)
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: server.restarts == restarts + 2, RESTART_TIMEOUT_S)
    assert answers(server, MODEL_NAME)
    assert not answers(server, OTHER)
