"""Tenants take turns at having their grammars checked, by the processor time that they use."""

from __future__ import annotations

from collections import Counter, deque

from fastserve_backend.grammars.check_queue import CheckQueue
from hypothesis import given
from hypothesis import strategies as st


def test_a_flood_leaves_a_place_for_another_tenant() -> None:
    checks: CheckQueue[int] = CheckQueue(3)
    for number in range(24):
        checks.add("flood", number)
    assert [checks.start_next(), checks.start_next()] == [("flood", 0), ("flood", 1)]
    assert checks.start_next() is None
    checks.add("other", 0)
    assert checks.start_next() == ("other", 0)


def test_who_has_used_more_comes_later_and_nobody_saves() -> None:
    checks: CheckQueue[str] = CheckQueue(2)
    for name in "aabbb":
        checks.add(name, name)
    order = []
    while (started := checks.start_next()) is not None:
        name, _ = started
        order.append(name)
        checks.on_end(name, 1.0 if name == "a" else 0.3)
        if len(order) == 4:
            checks.add("c", "c")  # it has used nothing, and begins where the others are
    assert order == ["a", "b", "b", "b", "a", "c"]
    checks.add("a", "a")  # all is forgotten
    checks.add("b", "b")
    assert checks.start_next() == ("a", "a")


@given(
    arrivals=st.lists(st.sampled_from("abc"), max_size=60),
    costs_s=st.lists(st.floats(0.001, 1.0), min_size=1),
    most_started=st.integers(2, 4),
)
def test_every_check_starts_once_in_the_order_of_its_tenant(
    arrivals: list[str], costs_s: list[float], most_started: int
) -> None:
    checks: CheckQueue[int] = CheckQueue(most_started)
    waiting: dict[str, deque[int]] = {name: deque() for name in "abc"}
    used_s: Counter[str] = Counter()
    for number, name in enumerate(arrivals):
        checks.add(name, number)
        waiting[name].append(number)
    under_way: deque[str] = deque()
    contended = True  # all have had checks that wait
    while under_way or any(waiting.values()):
        while (started := checks.start_next()) is not None:
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
        checks.on_end(name, cost_s)
        if contended:  # one is ahead by what it had under way, at most
            assert max(used_s.values()) - min(used_s[one] for one in "abc") <= most_started
    assert checks.start_next() is None
