"""Starts fail or are interrupted. Afterwards nothing may be left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from byte_tokenizer import save_byte_tokenizer
from damaged_model import save_damaged_opt
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving import launch, process
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError, ModelLoadError, PortInUseError
from fastserve_backend.serving.launch import TritonServer, serve
from fastserve_backend.serving.process import ServerProcess
from fastserve_backend.serving.runtime import RuntimeDirectory
from fastserve_client.listening import listen, reserve
from interruptions import interrupts_itself
from launched import leaving_nothing, server_leaving_nothing, start_launcher, start_server
from tiny_model import START_TIMEOUT_S
from waiting import DEADLINE_S, wait_for

ATTEMPTS = 10
END_TIMEOUT_S = 60.0


def backend_directories() -> set[Path]:
    return set(Path("/tmp").glob("python_env_??????"))


def test_a_model_that_cannot_load_says_why_in_one_line(tmp_path: Path) -> None:
    config = EngineConfig().with_keys(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="nowhere"):  # before anything is started
        start_server(config, tmp_path / "server.log")
    config = EngineConfig().with_keys(
        model="opt-125m", load_format="dummy", tokenizer=str(tmp_path / "nowhere")
    )
    with leaving_nothing(), pytest.raises(ModelLoadError, match="nowhere") as caught:
        start_server(config, tmp_path / "server.log")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_server_that_never_says_that_it_is_ready_is_started_again(
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first_pids: list[int] = []
    answers, unnoticed_s = ServerProcess._answers, process._UNNOTICED_S

    def answers_from_the_second(server: ServerProcess, path: str) -> bool:
        first_pids.append(server.pid)
        if server.pid == first_pids[0]:
            return False
        monkeypatch.setattr(process, "_UNNOTICED_S", unnoticed_s)
        return answers(server, path)

    monkeypatch.setattr(process, "_UNNOTICED_S", 0.5)
    monkeypatch.setattr(ServerProcess, "_answers", answers_from_the_second)
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        assert server.pid != first_pids[0]
    assert "start 1 of 3 failed: tritonserver has not noticed" in caplog.text


def test_a_model_that_answers_with_an_error_is_started_only_once(
    tiny_config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_damaged_opt(tmp_path / "damaged")
    keys = {"model": str(tmp_path / "damaged"), "load_format": "auto"}
    config = tiny_config.with_keys(**keys, tokenizer=str(save_byte_tokenizer(tmp_path)))
    with leaving_nothing(), pytest.raises(ModelLoadError) as caught:
        start_server(config, tmp_path / "server.log")
    assert str(caught.value).startswith("no token from the model: the model computed NaN instead")
    assert "\n" not in str(caught.value)
    assert "start 1 of" not in caplog.text


def test_a_start_whose_free_port_is_taken_succeeds_on_another(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intruders: list[socket.socket] = []
    flags = process._flags

    def take_port_before_the_first_start(
        runtime: RuntimeDirectory, endpoints: Endpoints, offered: frozenset[str]
    ) -> list[str]:
        if not intruders:
            intruders.append(listen("127.0.0.1", endpoints.grpc_port))
        return flags(runtime, endpoints, offered)

    monkeypatch.setattr(process, "_flags", take_port_before_the_first_start)
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        [intruder] = intruders
        with intruder:
            assert server.endpoints.grpc_port != intruder.getsockname()[1]


def test_a_start_whose_named_port_is_taken_names_it(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserve("127.0.0.1", 0) as reserved, ExitStack() as stack:
        port = reserved.getsockname()[1]

        def take_port(*_: object) -> None:
            stack.enter_context(listen("127.0.0.1", port))
            raise LaunchError("tritonserver cannot listen")

        monkeypatch.setattr(ServerProcess, "await_ready", take_port)
        log_path = tmp_path / "server.log"
        server = TritonServer(
            tiny_config, http_port=0, grpc_port=port, metrics_port=0, log_path=log_path
        )
        message = rf"^grpc-port: cannot listen on .*:{port} .* with --grpc-port, or 0"
        with pytest.raises(PortInUseError, match=message):
            server.start(START_TIMEOUT_S)


def test_sigterm_while_starting_ends_quietly(tiny_config: EngineConfig, tmp_path: Path) -> None:
    config_path, log_path = tmp_path / "engine.yaml", tmp_path / "server.log"
    config_path.write_text(tiny_config.to_yaml(), encoding="utf-8")
    for _ in range(ATTEMPTS):
        before = backend_directories()
        log_path.unlink(missing_ok=True)
        launcher = start_launcher(config_path, log_path)
        # From here on the launcher handles signals.
        wait_for(log_path.exists, START_TIMEOUT_S)
        wait_for(lambda before=before: bool(backend_directories() - before), START_TIMEOUT_S)
        made = backend_directories() - before
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=END_TIMEOUT_S)
        assert launcher.returncode == 0
        if output:
            continue  # the server was ready before the signal came
        if not made & backend_directories():
            return
        # It may be that of another test's server, which has started meanwhile.
    pytest.fail(f"a directory was left at each of {ATTEMPTS} attempts")


def _has_stub(runtime: RuntimeDirectory) -> bool:
    try:
        names = [psutil.Process(pid).name() for pid in runtime.processes()]
    except psutil.NoSuchProcess:
        return False
    return any(name.startswith("triton_python") for name in names)


@pytest.mark.parametrize("tokenizer", [None, "/nowhere"])
def test_a_server_ends_with_the_launcher_that_was_killed_while_it_started(
    tiny_config: EngineConfig, tmp_path: Path, tokenizer: str | None
) -> None:
    config = tiny_config if tokenizer is None else tiny_config.with_keys(tokenizer=tokenizer)
    config_path, log_path = tmp_path / "engine.yaml", tmp_path / "server.log"
    config_path.write_text(config.to_yaml(), encoding="utf-8")
    for _ in range(ATTEMPTS):
        log_path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir="/tmp") as short:
            launcher = start_launcher(config_path, log_path, {"TMPDIR": short})
            # Then the server's process is about to be started.
            wait_for(log_path.exists, START_TIMEOUT_S)
            (path,) = Path(short).glob("fastserve-*")
            runtime = RuntimeDirectory(path)

            def is_starting_or_failed(
                launcher: subprocess.Popen[str] = launcher,
                runtime: RuntimeDirectory = runtime,
            ) -> bool:
                return _has_stub(runtime) or launcher.poll() is not None

            wait_for(is_starting_or_failed, START_TIMEOUT_S)  # without a stub nobody would stop it
            is_killed = launcher.poll() is None
            launcher.kill()
            launcher.communicate()
            wait_for(lambda runtime=runtime: not runtime.processes(), END_TIMEOUT_S)
            assert not path.exists()
            assert not list(Path("/dev/shm").glob(f"{runtime.shared_memory_prefix}*"))
        if is_killed:
            return
    pytest.fail(f"the start failed before the kill at each of {ATTEMPTS} attempts")


def test_a_stop_may_be_asked_for_while_one_is_asked_for(tiny_config: EngineConfig) -> None:
    server = TritonServer(tiny_config)
    assert interrupts_itself(server.request_stop)
    assert server.stop_requested
    server.stop()


def test_sigterm_while_the_model_is_fetched_ends_at_once(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object, **__: object) -> None:
        assert callable(signal.getsignal(signal.SIGTERM))  # else it would end the tests
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(DEADLINE_S)
        pytest.fail("the model is fetched to its end")

    # A launcher that is still fetching then exits, which would end the tests.
    monkeypatch.setattr(launch, "_FETCH_END_S", 2 * DEADLINE_S)
    monkeypatch.setattr(launch, "load_model_config", fetch)
    assert serve(TritonServer(tiny_config)) == 0


def test_a_launcher_that_fails_says_so(tiny_config: EngineConfig) -> None:
    server = TritonServer(tiny_config)

    def fail() -> None:
        raise FileNotFoundError("somebody has cleaned up")

    server._keep_running = fail  # type: ignore[method-assign]
    server._supervise()
    assert server.failure == "FileNotFoundError: somebody has cleaned up"
    server.stop()
