"""Whose responses wait for others, and how long."""

from __future__ import annotations

from collections.abc import Callable

from fastserve_backend.serving.sending_shares import SendingShares

LONGEST_WAIT_S = 0.2
SECONDS = 20.0


def times_of(tenants: dict[str | None, Callable[[float], float]]) -> dict[str | None, float]:
    """The share of the thread's time that each gets. A tenant's function says how many seconds its
    next response takes, that many seconds after its last one; 0: it has none."""
    shares = SendingShares()
    now_s = 0.0
    used = dict.fromkeys(tenants, 0.0)
    due_s = dict.fromkeys(tenants, 0.0)
    sent_s = dict.fromkeys(tenants, 0.0)
    while now_s < SECONDS:
        is_idle = True
        for tenant, cost_after in tenants.items():
            if due_s[tenant] > now_s:
                continue
            if wait_s := shares.wait_s(tenant, now_s):
                assert 0.0 < wait_s <= LONGEST_WAIT_S
                due_s[tenant] = now_s + wait_s
                continue
            if cost_s := cost_after(now_s - sent_s[tenant]):
                now_s += cost_s
                shares.charge(tenant, cost_s, now_s)
                used[tenant] += cost_s
                sent_s[tenant] = now_s
                is_idle = False
        if is_idle:
            now_s += 0.001
    return {tenant: seconds / SECONDS for tenant, seconds in used.items()}


def always(_: float) -> float:
    return 0.001


def every_50_ms(idle_s: float) -> float:
    return 0.001 if idle_s >= 0.05 else 0.0


def test_a_tenant_alone_never_waits() -> None:
    assert times_of({"one": always})["one"] > 0.99


def test_what_is_no_tenants_never_waits_and_makes_none_wait_alone() -> None:
    assert min(times_of({None: always, "one": always}).values()) > 0.49


def test_a_flood_leaves_most_of_the_time_and_a_small_tenant_never_waits() -> None:
    used = times_of({"flood": always, "small": every_50_ms})
    assert used["flood"] + used["small"] < 0.35
    # One response takes 1 ms after 50 ms, and one of the flood's may be under way.
    assert used["small"] > 0.9 * 0.001 / 0.053


def test_tenants_share_the_time_alike() -> None:
    used = times_of(dict.fromkeys("abcd", always))
    assert sum(used.values()) < 0.4
    assert max(used.values()) < 1.2 * min(used.values())


def test_tenants_that_have_gone_do_not_count() -> None:
    shares = SendingShares()
    now_s = 0.0
    for number in range(1000):
        now_s += 0.001
        shares.charge(str(number), 0.001, now_s)
    for _ in range(10_000):
        now_s += 0.001
        shares.charge("last", 0.001, now_s)
    assert shares.wait_s("last", now_s) == 0.0


def test_nobody_waits_while_the_thread_is_not_busy() -> None:
    shares = SendingShares()
    now_s = 0.0
    for _ in range(10_000):
        now_s += 0.01
        for tenant in ("one", "two"):
            assert shares.wait_s(tenant, now_s) == 0.0
            shares.charge(tenant, 0.001, now_s)
