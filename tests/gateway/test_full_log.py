"""A gateway whose log has no room serves."""

from __future__ import annotations

import signal
import subprocess

import httpx2
import psutil
from running_gateway import COMMAND
from waiting import DEADLINE_S, wait_for


def test_a_gateway_starts_and_ends_whose_log_has_no_room() -> None:
    command = [*COMMAND, "--port", "0", "--url", "grpc://127.0.0.1:1"]
    with open("/dev/full", "w") as full, subprocess.Popen(command, stderr=full) as process:
        try:
            ports: list[int] = []

            def listens() -> bool:
                assert process.poll() is None
                connections = psutil.Process(process.pid).net_connections("tcp")
                ports.extend(one.laddr.port for one in connections if one.status == "LISTEN")
                return bool(ports)

            wait_for(listens)
            health = httpx2.get(f"http://127.0.0.1:{ports[0]}/health", timeout=DEADLINE_S)
            assert health.status_code == 503
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
