"""Other users of the host cannot reach the ranks, neither while these connect nor later."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from hosts import listening
from waiting import wait_for

JOIN = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from fastserve_backend.worker.groups import join_process_group
join_process_group(torch.device("cpu"), Path(sys.argv[1]), "")
number = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(number)
print(number.item(), flush=True)
sys.stdin.readline()
"""
# Another user, who connects as often as it can, names either rank as gloo does and sends garbage.
STRANGER = """
import os, select, socket, struct, sys
from contextlib import suppress
os.setgid(65534)
os.setuid(65534)
calls = []
while not select.select([0], [], [], 0.01)[0]:
    if len(calls) < 50:
        calls.append(socket.socket())
        calls[-1].setblocking(False)
        calls[-1].connect_ex(("127.0.0.1", int(sys.argv[1])))
    for number, call in enumerate(calls):
        with suppress(OSError):
            call.send(struct.pack("<q", number % 2) + os.urandom(64))
    print("knocked", flush=True)
connected = 0
for call in calls:
    with suppress(OSError):
        call.getpeername()
        connected += 1
print(connected, "connected")
"""
TIMEOUT_S = 150.0


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's processes need root")
def test_a_stranger_cannot_connect_while_the_ranks_do_nor_later(tmp_path: Path) -> None:
    with ExitStack() as running:

        def start(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, "-c", code, *arguments]
            process = subprocess.Popen(command, env=os.environ | variables, text=True, **pipes)
            running.enter_context(process)
            running.callback(process.kill)
            return process

        def start_rank(number: int) -> subprocess.Popen[str]:
            place = {"RANK": str(number), "LOCAL_RANK": str(number)}
            size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            return start(JOIN, str(tmp_path / "ranks"), **place, **size)

        first = start_rank(0)
        process = psutil.Process(first.pid)
        wait_for(lambda: listening([process]), TIMEOUT_S)
        ((_, port),) = listening([process])
        stranger = start(STRANGER, str(port))
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "knocked\n"
        second = start_rank(1)
        for rank in (first, second):
            assert rank.stdout is not None
            assert rank.stdout.readline() == "3\n"
        assert not listening([process, psutil.Process(second.pid)])
        assert stranger.communicate(timeout=TIMEOUT_S)[0].endswith("0 connected\n")
        for rank in (first, second):
            rank.communicate("end\n", timeout=TIMEOUT_S)
            assert rank.returncode == 0
