"""The order in which an emitter serves tenants."""

from __future__ import annotations

import threading

from fastserve_backend.serving.outbox import Outbox

TIMEOUT_S = 60.0


def taken(outbox: Outbox[int]) -> list[int]:
    return [item for _ in range(len(outbox)) if (item := outbox.take(0.0)) is not None]


def test_a_tenant_with_many_items_holds_no_other_one_up() -> None:
    outbox = Outbox[int]()
    for number in range(100):
        outbox.put("flood", number)
    outbox.put("one", 1000)
    outbox.put("two", 2000)
    outbox.put("one", 1001)
    assert taken(outbox) == [0, 1000, 2000, 1, 1001, *range(2, 100)]
    assert outbox.take(0.0) is None


def test_a_tenant_that_comes_again_is_behind_those_that_wait() -> None:
    outbox = Outbox[int]()
    outbox.put("a", 0)
    outbox.put("b", 10)
    assert outbox.take(0.0) == 0
    outbox.put("a", 1)
    assert taken(outbox) == [10, 1]


def test_all_items_are_taken_before_it_is_over() -> None:
    outbox = Outbox[int]()
    outbox.put("a", 0)
    outbox.close()
    outbox.put("a", 1)  # there is more to send of what was taken before
    assert not outbox.is_over
    found = []
    while not outbox.is_over:
        found.append(outbox.take(None))
    assert [one for one in found if one is not None] == [0, 1]


def test_an_item_or_the_end_wakes_the_thread_that_waits() -> None:
    outbox = Outbox[int]()
    found: list[int | None] = []

    def take_all() -> None:
        while not outbox.is_over:
            found.append(outbox.take(None))

    thread = threading.Thread(target=take_all, daemon=True)
    thread.start()
    for number in range(100):
        outbox.put(str(number % 3), number)
    outbox.close()
    thread.join(TIMEOUT_S)
    assert sorted(one for one in found if one is not None) == list(range(100))
