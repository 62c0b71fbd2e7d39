"""A helper process alone: its messages, death, silence and end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from fastserve_backend.system.helper_process import HelperProcess
from started_processes import StartedProcesses, noting_processes
from waiting import DEADLINE_S, wait_for

# It returns each message. At "die" it exits with code 7; after "stay" it ignores the request to
# end.
CHILD = """
import msgspec, select, sys, time
from fastserve_backend.system.helper_process import connect_to_engine
class Word(msgspec.Struct, array_like=True):
    text: str
engine = connect_to_engine(msgspec.msgpack.Decoder(Word))
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
    for word in messages:
        if word.text == "die":
            sys.exit(7)
        stubborn |= word.text == "stay"
        if word.text != "hush":
            engine.send(word)
"""


LOGGER = "fastserve_backend.system.helper_process"


class Word(msgspec.Struct, array_like=True):
    text: str


class Started(NamedTuple):
    pass


class Ended(NamedTuple):
    pass


class Echo(HelperProcess[Word]):
    """Records events; patient unless told otherwise."""

    name = "the echo"
    meanwhile = "nobody waits"

    def __init__(self) -> None:
        super().__init__(["-c", CHILD], msgspec.msgpack.Decoder(Word))
        self.events: queue.SimpleQueue[Word | Started | Ended | str] = queue.SimpleQueue()
        self.has_jobs = True
        self.patience_s = DEADLINE_S

    def event(self) -> Word | Started | Ended | str:
        return self.events.get(timeout=DEADLINE_S)

    def is_needed(self) -> bool:
        return self.has_jobs

    def on_started(self) -> None:
        self.events.put(Started())

    def on_message(self, message: Word) -> None:
        self.events.put(message)

    def patience(self) -> tuple[float, float]:
        return 0.0, self.patience_s

    def on_ended(self) -> None:
        self.events.put(Ended())

    def on_restart_refused(self, limit: str) -> None:
        if self.has_jobs:
            self.has_jobs = False
            self.events.put(limit)


@pytest.fixture
def started() -> Iterator[StartedProcesses]:
    with noting_processes() as noted:
        yield noted


@pytest.fixture
def echo(started: StartedProcesses) -> Iterator[Echo]:
    echo = Echo()
    echo.start()
    assert echo.event() == Started()
    yield echo
    echo.stop(0.0)
    assert started.of(CHILD)
    assert not started.left(CHILD)


def test_messages_of_any_size_come_back_in_order(echo: Echo) -> None:
    words = [Word(text) for text in ("a", "b" * 3_000_000, "", "c" * 70_000)]
    for word in words:
        assert echo.send(word)
    assert [echo.event() for _ in words] == words
    assert echo.num_unsent_bytes == 0


def test_a_dead_child_is_replaced_until_the_limit(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        assert echo.send(Word("die"))
        assert echo.event() == Ended()
        if number < 3:
            assert echo.event() == Started()
    assert echo.event() == "3 restarts in 10 minutes"
    assert not echo.send(Word("nobody is there"))
    messages = [one.getMessage() for one in caplog.records if one.name == LOGGER]
    assert messages[0].startswith("the echo ended with exit code 7; nobody waits (restart 1 of")
    assert "there were 3 restarts in 10 minutes already" in messages[-1]


def test_a_child_is_not_replaced_before_it_is_needed(echo: Echo) -> None:
    echo.has_jobs = False
    echo.send(Word("die"))
    assert echo.event() == Ended()
    with pytest.raises(queue.Empty):
        echo.events.get(timeout=0.3)
    echo.has_jobs = True
    echo.start()
    assert echo.event() == Started()


def test_a_silent_child_is_killed_and_replaced(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    echo.send(Word("hush"))
    echo.patience_s = 0.2
    assert echo.event() == Ended()
    echo.patience_s = DEADLINE_S
    assert echo.event() == Started()
    assert "the echo has not answered for 0 s; nobody waits" in caplog.text


def test_what_was_sent_before_the_end_is_answered(echo: Echo) -> None:
    echo.send(Word("last"))
    echo.stop(DEADLINE_S)
    assert [echo.event(), echo.event()] == [Word("last"), Ended()]
    echo.start()  # this changes nothing now
    assert not echo.send(Word("too late"))


def test_a_child_that_does_not_end_is_killed(echo: Echo, started: StartedProcesses) -> None:
    echo.send(Word("stay"))
    assert echo.event() == Word("stay")
    [child] = started.of(CHILD)
    closing = threading.Thread(target=echo.stop, args=(0.5,))
    closing.start()
    wait_for(lambda: not child.is_running())
    closing.join(DEADLINE_S)
    assert echo.event() == Ended()
