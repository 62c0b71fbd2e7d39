"""Processes of ranks: which is silent for too long, and what is left when one cannot be started."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import psutil
import pytest
import zmq
from fastserve_backend.errors import EngineError
from fastserve_backend.executor import rank_processes
from fastserve_backend.executor.rank_processes import RankProcesses


def test_a_rank_that_is_not_ready_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "HEARTBEAT_TIMEOUT_S", -1.0)
    ranks = RankProcesses(zmq.Poller())
    ranks.start(1, [], num_local=0)
    ranks.on_message(0)
    ranks.check_heard()
    ranks.on_all_ready()
    with pytest.raises(EngineError, match="rank 0 has not answered"):
        ranks.check_heard()


def test_a_pause_of_the_engine_is_no_silence_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause several heartbeats are unread, and the engine reads them one by one."""
    now_s = 0.0
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: now_s))
    ranks = RankProcesses(zmq.Poller())
    ranks.start(2, [], num_local=0)
    for rank in range(2):
        ranks.on_message(rank)
    ranks.on_all_ready()
    now_s = 100.0
    ranks.on_message(0)
    ranks.check_heard()
    for _ in range(7):
        now_s += 1.0
        ranks.on_message(0)
        ranks.check_heard()
    now_s += 1.0
    with pytest.raises(EngineError, match="rank 1 has not answered for 8 s"):
        ranks.check_heard()


def test_what_the_system_does_not_let_start_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    pidfd_open = os.pidfd_open

    def fail_for_the_second(pid: int) -> int:
        opened.append(pid)
        if len(opened) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", fail_for_the_second)
    descriptors = set(os.listdir("/proc/self/fd"))
    ranks = RankProcesses(zmq.Poller())
    with pytest.raises(EngineError, match=r"rank 1 cannot be started: .*Too many open files"):
        ranks.start(2, [])
    ranks.stop()
    assert not any(map(psutil.pid_exists, opened))
    assert set(os.listdir("/proc/self/fd")) == descriptors
