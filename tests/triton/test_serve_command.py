"""``fastserve serve`` as a user types it."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

from fastserve_backend.config import EngineConfig
from waiting import wait_for_log

DEADLINE_S = 120.0
FASTSERVE = [sys.executable, "-m", "fastserve_backend"]


def test_the_command_that_it_recommends_reaches_it(
    tiny_config: EngineConfig, tmp_path: Path
) -> None:
    config, log = tmp_path / "engine.yaml", tmp_path / "serve.log"
    config.write_text(tiny_config.to_yaml(), encoding="utf-8")
    ports = [part for kind in ("http", "grpc", "metrics") for part in (f"--{kind}-port", "0")]
    command = [*FASTSERVE, "serve", "--config", str(config), *ports]
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
