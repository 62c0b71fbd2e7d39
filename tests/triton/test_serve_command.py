"""``fastserve serve`` as a user types it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import psutil
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.errors import LaunchError
from fastserve_backend.serving.launch import TritonServer
from waiting import wait_for_log

DEADLINE_S = 120.0
FASTSERVE = [sys.executable, "-m", "fastserve_backend"]


def serve_command(config: EngineConfig, directory: Path) -> list[str]:
    """``fastserve serve`` on free ports, with a configuration file in ``directory``."""
    file = directory / "engine.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    ports = [part for kind in ("http", "grpc", "metrics") for part in (f"--{kind}-port", "0")]
    return [*FASTSERVE, "serve", "--config", str(file), *ports]


def test_the_command_that_it_recommends_reaches_it(
    tiny_config: EngineConfig, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    command = serve_command(tiny_config, tmp_path)
    with log.open("wb") as written, subprocess.Popen(command, stderr=written) as server:
        try:
            line = r"\(fastserve (generate .*)\)\n"
            recommended = wait_for_log(server, log, line, DEADLINE_S)
            generate = [*FASTSERVE, *shlex.split(recommended), "--max-tokens", "2"]
            done = subprocess.run(generate, capture_output=True, text=True, timeout=DEADLINE_S)
            server.send_signal(signal.SIGTERM)
            assert server.wait(DEADLINE_S) == 0
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr
    assert "2 tokens" in done.stderr


def test_nobody_reads_its_log(tiny_config: EngineConfig, tmp_path: Path) -> None:
    """The server still answers, replaces a dead rank, and ends."""
    command = serve_command(tiny_config, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = takewhile(lambda line: "  metrics  " not in line, server.stderr)
            (recommended,) = re.findall(r"\(fastserve (generate .*)\)\n", "".join(lines))
            _fill(server.stderr.fileno())
            _rank_of(server).kill()
            generate = [*FASTSERVE, *shlex.split(recommended), "--max-tokens", "2"]
            subprocess.run(generate, check=True, timeout=DEADLINE_S)
            server.send_signal(signal.SIGTERM)
            assert server.wait(DEADLINE_S) == 0
        finally:
            server.kill()


def _rank_of(server: subprocess.Popen[str]) -> psutil.Process:
    for process in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "fastserve_backend.worker" in process.cmdline():
                return process
    raise AssertionError("the server has no rank")


def _fill(pipe: int) -> None:
    # The pipe is opened anew, so that other writers still block.
    end = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while os.write(end, b"."):
            pass
    os.close(end)


def test_a_full_directory_for_temporary_files_is_one_line(
    tiny_config: EngineConfig, tmp_path: Path
) -> None:
    command = serve_command(tiny_config, tmp_path)
    # Its path is short, as the sockets in it need.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        done = subprocess.run(
            # No file over 512 bytes can be written, as on a full disk.
            ["/bin/sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *command],
            env=os.environ | {"TMPDIR": temporary},
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot write the server's files to {temporary}: ")
        assert "File too large" in done.stderr
        assert done.stderr.endswith("or set TMPDIR to another directory with a short path\n")
        assert list(Path(temporary).iterdir()) == []


def test_no_directory_for_temporary_files_is_an_error_too(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/fastserve/none")
    server = TritonServer(tiny_config, http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(
        LaunchError, match=r"^cannot write .* to /tmp/fastserve/none: \[Errno 2\] No such file"
    ):
        server.start()
    server.stop()
