"""When the launcher takes a process for one that hangs."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fastserve_backend.serving.liveness import (
    SILENT_LOOKS,
    STOPPED_LOOKS,
    AnswerCount,
    ProcessLife,
)
from waiting import wait_for

NEVER_SILENT = itertools.count()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as running:
        yield running
        running.kill()


def send(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    is_stopped = number == signal.SIGSTOP
    status = psutil.Process(process.pid).status
    wait_for(lambda: (status() == psutil.STATUS_STOPPED) == is_stopped)


def faults(life: ProcessLife, num_looks: int) -> list[str | None]:
    """What so many looks find at a process that shows signs of life."""
    return [life.find_fault(next(NEVER_SILENT)) for _ in range(num_looks)]


def test_a_stopped_process_is_found_unless_it_goes_on_soon(
    process: subprocess.Popen[bytes],
) -> None:
    life = ProcessLife(process.pid)
    for _ in range(3):
        send(process, signal.SIGSTOP)
        assert faults(life, STOPPED_LOOKS) == [None] * STOPPED_LOOKS
        send(process, signal.SIGCONT)
        assert faults(life, 1) == [None]
    send(process, signal.SIGSTOP)
    *before, fault = faults(life, STOPPED_LOOKS + 1)
    assert before == [None] * STOPPED_LOOKS
    assert fault == "has been stopped for 3 s"


def test_a_silent_process_is_found_later(process: subprocess.Popen[bytes]) -> None:
    life = ProcessLife(process.pid)
    *before, fault = [life.find_fault("the same") for _ in range(SILENT_LOOKS + 1)]
    assert before == [None] * SILENT_LOOKS
    assert fault == "has shown no sign of life for 15 s"
    assert life.find_fault("another") is None
    assert not any(life.find_fault(None) for _ in range(2 * SILENT_LOOKS))  # it loads


def test_only_a_server_that_holds_the_question_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not listen any more is about to end."""
    monkeypatch.setattr("fastserve_backend.serving.liveness._ASK_INTERVAL_S", 0.001)
    questions = itertools.count()
    num_asked, hangs = 0, True

    def ask() -> None:
        nonlocal num_asked
        num_asked = next(questions)
        raise TimeoutError if hangs else ConnectionRefusedError

    answers = AnswerCount(ask)
    try:
        wait_for(lambda: num_asked > 3)
        assert answers.number == 0
        hangs = False
        wait_for(lambda: answers.number > 3)
    finally:
        answers.close()


GUARDED = """
import os, sys, threading
from pathlib import Path
from types import SimpleNamespace
from fastserve_backend.serving.guard import ParentGuard
from fastserve_backend.serving.runtime import RuntimeDirectory

class Engine:
    failure = None
    num_looks = 0
    hangs = False

    @property
    def progress(self):
        self.num_looks += 1
        print(reports.alive.set_at_ns(), flush=True)
        return 0 if self.hangs else self.num_looks

runtime = RuntimeDirectory(Path(sys.argv[1]))
runtime.clear_reports()
reports = runtime.own_reports()
reports.start("a")
engine = Engine()
guard = ParentGuard(runtime)
guard.watch(engine, lambda: True, [])
sys.stdin.readline()
engine.hangs = True
print("hangs", flush=True)
sys.stdin.readline()
"""


def test_a_stub_shows_life_only_while_its_engine_moves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GUARDED, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as stub:
        assert stub.stdin is not None
        assert stub.stdout is not None
        times = iter(stub.stdout.readline, "hangs\n")
        moving = {next(times) for _ in range(6)}
        assert len(moving - {"None\n"}) >= 4
        stub.stdin.write("hang\n")
        stub.stdin.flush()
        for _ in times:
            pass
        # The guard may have seen it move just before.
        *_, third, fourth, fifth = [stub.stdout.readline() for _ in range(5)]
        assert third == fourth == fifth
        stub.kill()
