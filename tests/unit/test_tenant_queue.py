"""Tenants take turns at work that takes long, by the time that they use."""

from __future__ import annotations

from collections import Counter, deque

from fastserve_backend.tenant_queue import TenantQueue
from hypothesis import given
from hypothesis import strategies as st


def test_a_flood_leaves_a_place_for_another_tenant() -> None:
    queue: TenantQueue[int] = TenantQueue(3)
    for number in range(24):
        queue.add("flood", number)
    assert [queue.start_next(), queue.start_next()] == [("flood", 0), ("flood", 1)]
    assert queue.start_next() is None
    queue.add("other", 0)
    assert queue.start_next() == ("other", 0)


def test_who_has_used_more_comes_later_and_nobody_saves() -> None:
    queue: TenantQueue[str] = TenantQueue(2)
    for name in "aabbb":
        queue.add(name, name)
    order = []
    while (started := queue.start_next()) is not None:
        name, _ = started
        order.append(name)
        queue.on_end(name, 1.0 if name == "a" else 0.3)
        if len(order) == 4:
            queue.add("c", "c")  # it has used nothing, and begins where the others are
    assert order == ["a", "b", "b", "b", "a", "c"]
    queue.add("a", "a")  # all is forgotten
    queue.add("b", "b")
    assert queue.start_next() == ("a", "a")


@given(
    arrivals=st.lists(st.sampled_from("abc"), max_size=60),
    costs_s=st.lists(st.floats(0.001, 1.0), min_size=1),
    most_started=st.integers(2, 4),
)
def test_every_item_starts_once_in_the_order_of_its_tenant(
    arrivals: list[str], costs_s: list[float], most_started: int
) -> None:
    queue: TenantQueue[int] = TenantQueue(most_started)
    waiting: dict[str, deque[int]] = {name: deque() for name in "abc"}
    used_s: Counter[str] = Counter()
    for number, name in enumerate(arrivals):
        queue.add(name, number)
        waiting[name].append(number)
    under_way: deque[str] = deque()
    contended = True  # all have had queue that wait
    while under_way or any(waiting.values()):
        while (started := queue.start_next()) is not None:
            name, number = started
            assert number == waiting[name].popleft()
            under_way.append(name)
        assert len(under_way) <= most_started
        assert max(Counter(under_way).values()) < most_started
        free = len(under_way) < most_started
        may_start = [name for name in "abc" if under_way.count(name) < most_started - 1]
        assert not (free and any(waiting[name] for name in may_start))
        contended &= all(waiting.values())
        name = under_way.popleft()
        cost_s = costs_s[sum(map(len, waiting.values())) % len(costs_s)]
        used_s[name] += cost_s
        queue.on_end(name, cost_s)
        if contended:  # one is ahead by what it had under way, at most
            assert max(used_s.values()) - min(used_s[one] for one in "abc") <= most_started
    assert queue.start_next() is None
