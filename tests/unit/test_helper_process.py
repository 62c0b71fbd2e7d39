"""A helper process by itself: its messages, its death, its silence and its end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import psutil
import pytest
from fastserve_backend.system.helper_process import HelperOwner, HelperProcess
from waiting import DEADLINE_S, wait_for

# It sends back what it gets; at "die" it exits with code 7, at "end" it goes on after the end.
CHILD = """
import select, sys, time
from fastserve_backend.system.helper_process import connect_to_engine
engine = connect_to_engine()
stubborn = False
while True:
    poller = select.poll()
    poller.register(engine, engine.events)
    poller.poll()
    try:
        engine.flush()
        messages = engine.receive()
    except OSError:
        while stubborn:
            time.sleep(60)
        sys.exit(0)
    for data in messages:
        if b"die" in data:
            sys.exit(7)
        stubborn |= b"stay" in data
        if b"hush" not in data:
            engine.send(data)
"""


class Word(msgspec.Struct, array_like=True):
    text: str


class Started(NamedTuple):
    pass


class Ended(NamedTuple):
    pass


class Owner(HelperOwner[Word]):
    """Records what happens; patient unless told otherwise."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Word | Started | Ended | str] = queue.SimpleQueue()
        self.is_needed = True
        self.patience_s = DEADLINE_S
        self.helper: HelperProcess[Word] = HelperProcess(
            "the echo", "nobody waits", ["-c", CHILD], msgspec.msgpack.Decoder(Word), self
        )

    def event(self) -> Word | Started | Ended | str:
        return self.events.get(timeout=DEADLINE_S)

    def is_helper_needed(self) -> bool:
        return self.is_needed

    def on_helper_started(self) -> None:
        self.events.put(Started())

    def on_helper_message(self, message: Word) -> None:
        self.events.put(message)

    def reason_to_kill(self, heard_s: float) -> str | None:
        return "is silent" if time.monotonic() - heard_s > self.patience_s else None

    def on_helper_ended(self) -> None:
        self.events.put(Ended())

    def on_restart_refused(self, limit: str) -> None:
        if self.is_needed:
            self.is_needed = False
            self.events.put(limit)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    owner.helper.start()
    assert owner.event() == Started()
    yield owner
    owner.helper.close()
    assert not [one for one in psutil.Process().children() if CHILD in one.cmdline()]


def test_messages_of_any_size_come_back_in_order(owner: Owner) -> None:
    words = [Word(text) for text in ("a", "b" * 3_000_000, "", "c" * 70_000)]
    for word in words:
        assert owner.helper.send(word)
    assert [owner.event() for _ in words] == words
    assert owner.helper.num_unsent_bytes == 0


def test_a_dead_child_is_replaced_until_the_limit(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        assert owner.helper.send(Word("die"))
        assert owner.event() == Ended()
        if number < 3:
            assert owner.event() == Started()
    assert owner.event() == "3 restarts in 10 minutes"
    assert not owner.helper.send(Word("nobody is there"))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("the echo ended with exit code 7; nobody waits (restart 1 of")
    assert "there were 3 restarts in 10 minutes already" in messages[-1]


def test_a_child_is_not_replaced_before_it_is_needed(owner: Owner) -> None:
    owner.is_needed = False
    owner.helper.send(Word("die"))
    assert owner.event() == Ended()
    with pytest.raises(queue.Empty):
        owner.events.get(timeout=0.3)
    owner.is_needed = True
    owner.helper.start()
    assert owner.event() == Started()


def test_a_silent_child_is_killed_and_replaced(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.helper.send(Word("hush"))
    owner.patience_s = 0.2
    assert owner.event() == Ended()
    owner.patience_s = DEADLINE_S
    assert owner.event() == Started()
    assert "the echo is silent; nobody waits" in caplog.text


def test_what_was_sent_before_the_end_is_answered(owner: Owner) -> None:
    owner.helper.send(Word("last"))
    owner.helper.close(DEADLINE_S)
    assert [owner.event(), owner.event()] == [Word("last"), Ended()]
    owner.helper.start()  # which changes nothing now
    assert not owner.helper.send(Word("too late"))


def test_a_child_that_does_not_end_is_killed(owner: Owner) -> None:
    owner.helper.send(Word("stay"))
    assert owner.event() == Word("stay")
    [child] = [one for one in psutil.Process().children() if CHILD in one.cmdline()]
    closing = threading.Thread(target=owner.helper.close, args=(0.5,))
    closing.start()
    wait_for(lambda: not child.is_running())
    closing.join(DEADLINE_S)
    assert owner.event() == Ended()
