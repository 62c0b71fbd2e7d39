"""Requests are prepared beside each other, and no tenant waits for all those of another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fastserve_backend.errors import OverloadedError, TenantLimitError
from fastserve_backend.serving.preparation import NUM_AT_ONCE, Preparation
from waiting import DEADLINE_S, wait_for


class Slow:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        self.num_begun, self.num_done = 0, 0
        self._lock = threading.Lock()

    def work(self) -> None:
        with self._lock:
            self.num_begun += 1
        assert self._go_on.wait(DEADLINE_S)
        with self._lock:
            self.num_done += 1

    def let_go(self) -> None:
        self._go_on.set()


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.let_go()


def test_a_slow_tenant_leaves_a_place(slow: Slow) -> None:
    preparation = Preparation(100)
    for _ in range(10):
        preparation.add("mallory", slow.work)
    wait_for(lambda: slow.num_begun == NUM_AT_ONCE - 1)
    for _ in range(5):
        done = threading.Event()
        preparation.add("alice", done.set)
        assert done.wait(DEADLINE_S)
    assert slow.num_begun == NUM_AT_ONCE - 1
    assert preparation.num_unfinished >= 10
    slow.let_go()
    preparation.close()
    assert (slow.num_done, preparation.num_unfinished) == (10, 0)


def test_a_tenant_cannot_take_all_places(slow: Slow) -> None:
    preparation = Preparation(10)
    for _ in range(8):
        preparation.add("mallory", slow.work)
    with pytest.raises(TenantLimitError, match=r"^tenant 'mallory' has 8 of the 10 requests that"):
        preparation.add("mallory", slow.work)
    preparation.add("alice", slow.work)
    slow.let_go()
    preparation.close()
    assert slow.num_done == 9


def test_without_tenants_all_places_may_be_taken(slow: Slow) -> None:
    preparation = Preparation(10)
    for _ in range(10):
        preparation.add("", slow.work)
    with pytest.raises(OverloadedError, match=r"^10 requests wait for their prompts already"):
        preparation.add("", slow.work)
    slow.let_go()
    preparation.close()


def test_a_failure_is_logged_and_others_are_done(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    preparation, done = Preparation(10), threading.Event()

    def fail() -> None:
        raise RuntimeError

    for _ in range(2 * NUM_AT_ONCE):
        preparation.add("", fail)
    preparation.add("", done.set)
    preparation.close()
    assert done.is_set()
    assert caplog.text.count("preparing a request failed") == 2 * NUM_AT_ONCE
