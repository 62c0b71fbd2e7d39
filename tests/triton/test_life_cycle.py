"""The server stops or any of its processes dies. Afterwards nothing may be left."""

from __future__ import annotations

import fcntl
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx2
import psutil
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving import liveness, process
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.process import ServerProcess
from fastserve_backend.serving.runtime import RuntimeDirectory
from fastserve_backend.system.restart_limit import RestartPauses
from fastserve_client import protocol
from launched import (
    SERVE,
    is_serving,
    launched_alone,
    leaving_nothing,
    server_leaving_nothing,
    server_of,
    start_server,
)
from model_control import ModelControl
from running_server import job_held, rank_pid, rank_pids, rank_stopped
from serving_client import (
    ANSWER_TIMEOUT_S,
    STATUS_HEADER,
    GrpcStream,
    metric,
    used_blocks,
    wait_until_idle,
)
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

RESTART_TIMEOUT_S = START_TIMEOUT_S
END_TIMEOUT_S = 60.0
# Within this time a server that hangs is noticed.
STALL_LIMIT_S = 90.0
# What the stub logs then. The second text is faulthandler's, if the hanging call holds the
# interpreter's lock. Calls for metrics hold it, those for responses do not.
STALL_SIGNS = ("tritonserver takes no responses any more; ending", "Timeout (0:00:30)!")
# More looks than a test takes.
NEVER = 1 << 30
RESTARTS = "fastserve_worker_restarts_total"


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kill_next_rank(runtime: RuntimeDirectory, dead: set[int]) -> None:
    """Kills a rank that is not in ``dead``, and adds it there."""
    wait_for(lambda: bool(rank_pids(runtime) - dead), RESTART_TIMEOUT_S)
    (pid,) = rank_pids(runtime) - dead
    kill(pid)
    dead.add(pid)


def is_ready(server: TritonServer) -> bool:
    url = f"{server.endpoints.http_url}/v2/models/{protocol.MODEL_NAME}/ready"
    try:
        return httpx2.get(url, timeout=ANSWER_TIMEOUT_S).status_code == 200
    except httpx2.TransportError:
        return False


def long_stream(server: TritonServer, headers: dict[str, str] | None = None) -> GrpcStream:
    stream = GrpcStream(
        server.endpoints.grpc_url,
        text_input="a long one",
        stream=True,
        max_tokens=3500,
        ignore_eos=True,
        headers=headers,
    )
    stream.first_token()
    return stream


@contextmanager
def doomed_stream(
    server: TritonServer, headers: dict[str, str] | None = None
) -> Iterator[GrpcStream]:
    """A stream that cannot end before the block kills its rank, or what its rank needs."""
    wait_until_idle(server.endpoints)
    with job_held(server, lambda: long_stream(server, headers)) as stream:
        yield stream


def test_the_stub_never_imports_torch_and_ranks_do(server: TritonServer) -> None:
    stub = server.runtime.stub_pid()
    assert "libtorch" not in Path(f"/proc/{stub}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{rank_pid(server.runtime)}/maps").read_text()


def test_large_blocks_go_back_to_the_system_in_the_server_and_not_in_ranks(
    server: TritonServer,
) -> None:
    variable = b"MALLOC_MMAP_THRESHOLD_="
    assert variable in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert variable not in Path(f"/proc/{rank_pid(server.runtime)}/environ").read_bytes()


def test_no_key_loads_models_unless_model_control_is_on(server: TritonServer) -> None:
    answer = ModelControl(server).load(protocol.MODEL_NAME)
    assert (answer.status_code, "not allowed" in answer.text) == (503, True), answer.text


def test_runtime_directory_is_private_and_locked(server: TritonServer) -> None:
    path = server.runtime.path
    assert path.stat().st_mode & 0o777 == 0o700
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_everything_that_dies_is_restarted_however_often(
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        # The stub dies: tritonserver would let its clients wait for ever.
        with doomed_stream(server) as stream:
            kill(server.runtime.stub_pid())
            assert stream.until_error()
            stream.cancel()
        wait_for(lambda: is_serving(server, 1), RESTART_TIMEOUT_S)

        # The server dies.
        with doomed_stream(server) as stream:
            kill(server.pid)
            assert stream.until_error()
            stream.cancel()
        wait_for(lambda: is_serving(server, 2), RESTART_TIMEOUT_S)

        kill(server.pid)
        wait_for(lambda: is_serving(server, 3), RESTART_TIMEOUT_S)

        # Nor do many deaths and starts that fail end it.
        await_ready, failing = ServerProcess.await_ready, iter(range(3))

        def ready_at_last(process: ServerProcess, *arguments: object) -> None:
            if next(failing, None) is not None:
                raise LaunchError("the start failed")
            await_ready(process, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ServerProcess, "await_ready", ready_at_last)
        kill(server.pid)
        wait_for(lambda: is_serving(server, 4), RESTART_TIMEOUT_S)
        assert "ended with code -9; restarting the server in 2 s" in caplog.text
        assert "the start failed; restarting the server in 4 s" in caplog.text

        # It need not be running to be stopped.
        monkeypatch.setattr(RestartPauses, "take_pause", lambda *_: 7200.0)
        kill(server.pid)
        wait_for(lambda: "restarting the server in 7200 s" in caplog.text)
        server.stop()
        assert (server.wait(), server.restarts) == (0, 4)


@pytest.mark.parametrize("kind", ["stub", "server"])
def test_a_stopped_process_is_noticed(
    kind: str, tiny_config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not died, and tritonserver still says that the model is ready."""
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        with doomed_stream(server) as stream:
            pid = server.pid if kind == "server" else server.runtime.stub_pid()
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        assert stream.until_error()
        stream.cancel()
        wait_for(lambda: is_serving(server, 1), RESTART_TIMEOUT_S)
    name = "tritonserver" if kind == "server" else "the process of fastserve"
    assert f"{name} has been stopped for 3 s; restarting the server" in caplog.text


def test_a_server_that_says_nothing_any_more_is_restarted(
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(liveness, "STOPPED_LOOKS", NEVER)  # else this would be noticed first
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        wait_for(lambda: is_serving(server, 1), RESTART_TIMEOUT_S)
    assert "tritonserver has shown no sign of life for 15 s; restarting the server" in caplog.text


def test_a_server_that_takes_no_responses_is_restarted(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub ends itself, if the launcher has not noticed anything."""
    for limit in ("STOPPED_LOOKS", "SILENT_LOOKS"):
        monkeypatch.setattr(liveness, limit, NEVER)
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        with job_held(server, lambda: long_stream(server)) as stream:
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
        assert stream.until_error(STALL_LIMIT_S)
        stream.cancel()
        wait_for(lambda: is_serving(server, 1), RESTART_TIMEOUT_S)
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert sum(sign in log for sign in STALL_SIGNS) == 1


def pressing_streams(server: TritonServer) -> list[GrpcStream]:
    """Streams that need more KV than the device has: 36 blocks each, of 240."""
    rng = random.Random(4)
    return [
        GrpcStream(
            server.endpoints.grpc_url,
            input_ids=[rng.randrange(3, 1024) for _ in range(500)],
            stream=True,
            max_tokens=60,
            temperature=(0.0, 0.8)[number % 2],
            seed=number,
            ignore_eos=True,
            return_finish_reason=True,
        )
        for number in range(12)
    ]


def test_streams_outlive_their_rank_until_it_has_died_too_often(
    tiny_config: EngineConfig, tmp_path: Path
) -> None:
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        runtime, metrics_url = server.runtime, server.endpoints.metrics_url
        undisturbed = [stream.finish() for stream in pressing_streams(server)]
        streams = pressing_streams(server)
        streams[0].first_token()
        dead: set[int] = set()
        kill_next_rank(runtime, dead)
        wait_for(lambda: metric(metrics_url, RESTARTS) == 1, RESTART_TIMEOUT_S)
        assert is_ready(server)  # jobs wait, and new ones may arrive
        for stream, other in zip(streams, undisturbed, strict=True):
            answer = stream.finish()
            assert answer.error is None
            assert answer.num_finals == 1
            assert (answer.token_ids, answer.text) == (other.token_ids, other.text)
            assert answer.outputs["finish_reason"] == b"length"
        wait_for(lambda: used_blocks(metrics_url) == 0)

        with doomed_stream(server, headers=STATUS_HEADER) as stream:
            kill_next_rank(runtime, dead)
        for _ in range(2):
            assert stream.answer.error is None
            kill_next_rank(runtime, dead)
        error = stream.until_error()
        assert error.status() == "StatusCode.INTERNAL"
        assert "given up after 3 restarts in 10 minutes" in error.message()
        stream.cancel()
        assert server.wait() == 1
        assert "rank 0 died with exit code -9 (SIGKILL: " in (server.failure or "")
        assert "; given up after" in (server.failure or "")
        assert server.restarts == 0
        assert not is_ready(server)
    # Each death was noticed at once, not by missing heartbeats.
    assert "has not answered for" not in (tmp_path / "server.log").read_text(encoding="utf-8")


BROKEN_ENGINE = """
import os, signal, sys, threading
from types import SimpleNamespace
from fastserve_backend.serving.guard import ParentGuard

guard = ParentGuard(None)
guard.watch(SimpleNamespace(failure=None, gave_up=False), lambda: True, [])
print("works", flush=True)
sys.stdin.readline()
guard.watch(SimpleNamespace(failure="rank 0 died", gave_up=True), lambda: True, [])
threading.Event().wait()
"""
SERVER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_a_server_without_a_launcher_ends_when_its_engine_is_broken() -> None:
    command = [sys.executable, "-c", SERVER, BROKEN_ENGINE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "works\n"
        server.communicate("break\n", timeout=END_TIMEOUT_S)
        assert server.returncode == -signal.SIGTERM


def test_sigterm_finishes_streams_in_flight(tiny_config: EngineConfig, tmp_path: Path) -> None:
    with launched_alone(tiny_config, tmp_path) as (launcher, runtime, endpoints):
        request = {"text_input": "a", "stream": True, "max_tokens": 400, "ignore_eos": True}
        streams = [GrpcStream(endpoints.grpc_url, **request) for _ in range(3)]
        for stream in streams:
            stream.first_token()
        # Triton's refusal of this request pins the model, which must not delay the end.
        pinning = GrpcStream(endpoints.grpc_url, raw_inputs=[_wrong_shape()], text_input="a")
        pinning.until_error()
        pinning.cancel()

        with rank_stopped(runtime):  # else they might end before
            launcher.send_signal(signal.SIGTERM)
            wait_for(lambda: _refuses(endpoints))
        for stream in streams:
            answer = stream.finish()
            assert answer.error is None
            assert len(answer.token_ids) == 400
            assert answer.num_finals == 1
        assert launcher.wait(END_TIMEOUT_S) == 0


def test_a_second_ctrl_c_ends_streams_in_flight(tiny_config: EngineConfig, tmp_path: Path) -> None:
    with launched_alone(tiny_config, tmp_path) as (launcher, runtime, endpoints):
        request = {"text_input": "a", "stream": True, "max_tokens": 3500, "ignore_eos": True}

        def start() -> GrpcStream:
            stream = GrpcStream(endpoints.grpc_url, **request)
            stream.first_token()
            return stream

        server = SimpleNamespace(runtime=runtime, endpoints=endpoints)
        with job_held(server, start) as stream:  # type: ignore[arg-type]
            launcher.send_signal(signal.SIGINT)
            wait_for(runtime.drain_wanted.is_set)
            assert not runtime.end_wanted.is_set()
            launcher.send_signal(signal.SIGINT)
            wait_for(runtime.end_wanted.is_set)
        assert "shutting down and could not finish" in str(stream.finish().error)
        assert launcher.wait(END_TIMEOUT_S) == 0


def test_what_is_unfinished_when_time_is_up_ends_with_an_error(
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Moreover, the server's shell gets no paths that it could not handle."""
    strange = tmp_path / "a temporary directory"
    strange.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(strange))
    server = start_server(tiny_config, tmp_path / "server.log")
    monkeypatch.setattr(process, "DRAIN_TIMEOUT_S", 1)  # only now: tritonserver writes this, too
    with leaving_nothing() as started:
        started.append((server.runtime, server.endpoints))
        stopping = threading.Thread(target=server.stop)
        with job_held(server, lambda: long_stream(server)) as stream:
            stopping.start()
            wait_for(lambda: "ending the unfinished requests" in caplog.text)
        answer = stream.finish()
        stopping.join()
        assert "shutting down and could not finish" in str(answer.error)
        assert answer.num_finals == 1
    assert "waiting up to 1 s for requests that still run" in caplog.text
    assert "did not end after SIGTERM" not in caplog.text


def test_server_ends_with_its_launcher(tiny_config: EngineConfig, tmp_path: Path) -> None:
    with launched_alone(tiny_config, tmp_path) as (launcher, _, _):
        launcher.kill()
        launcher.wait()


def test_a_server_has_its_own_limits_and_removes_no_others_directory(
    tiny_config: EngineConfig, tmp_path: Path
) -> None:
    config_path = tmp_path / "engine.yaml"
    config_path.write_text(tiny_config.to_yaml(), encoding="utf-8")
    most_files = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    limited = f'ulimit -Sn 256; ulimit -Hn {most_files}; exec "$@"'
    files = (str(config_path), str(tmp_path / "server.log"))
    command = ["/bin/sh", "-c", limited, "sh", sys.executable, "-c", SERVE, *files]
    with leaving_nothing() as started:
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: bool(_servers_of(launcher)), START_TIMEOUT_S)
        # The name is unique, as a killed run may have left an old file.
        others = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
        try:
            started.append(server_of(launcher))
            (server,) = _servers_of(launcher)
            assert server.rlimit(resource.RLIMIT_NOFILE) == (most_files, most_files)
            # Else it would die with the reader of its output.
            status = Path(f"/proc/{server.pid}/status").read_text()
            (ignored,) = re.findall(r"SigIgn:\s*(\w+)", status)
            assert int(ignored, 16) >> (signal.SIGPIPE - 1) & 1
            launcher.terminate()
            assert launcher.wait(END_TIMEOUT_S) == 0
            assert others.exists()
        finally:
            others.rmdir()


def _servers_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """A launcher may also compile kernels, in a process of its own."""
    found = []
    for child in psutil.Process(launcher.pid).children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child.name() == "tritonserver":
                found.append(child)
    return found


def _refuses(endpoints: Endpoints) -> bool:
    """Whether a new request is refused as UNAVAILABLE. One that is accepted gets no answer while
    the rank stands still."""
    late = GrpcStream(endpoints.grpc_url, headers=STATUS_HEADER, text_input="late", max_tokens=1)
    with suppress(queue.Empty):
        late.step(1.0)
    late.cancel()
    error = late.answer.error
    return error is not None and error.status() == "StatusCode.UNAVAILABLE"


def _wrong_shape() -> object:
    import numpy as np
    import tritonclient.grpc as grpcclient

    wrong = grpcclient.InferInput("max_tokens", [2], "INT32")
    wrong.set_data_from_numpy(np.array([4, 5], np.int32))
    return wrong
