"""Whose responses wait, because they take more than a tenant's share of an emitter's time."""

from __future__ import annotations

import math

# Above it, tenants' shares count (docs/security.md has the effect). Less would help requests beside
# a flood more, and would group the tokens of two ordinary tenants, too.
_BUSY = 0.25
# Bursts that are shorter cost nobody anything.
_AVERAGED_S = 0.5
_FORGOTTEN_AFTER_S = 5 * _AVERAGED_S
# Nobody should see that a stream stands still.
_LONGEST_WAIT_S = 0.2


class SendingShares:
    """The time that one emitter's thread spends on each tenant.

    A response costs processor time here, in tritonserver and in the gateway. Shares of the ranks'
    time do not count it. So while the thread is busy for more than a quarter of its time, a tenant
    that takes more than its share of that quarter has to wait before its next response. Its tokens
    gather meanwhile, and are sent as one response. A tenant alone never waits.

    Times are seconds of one clock that never goes back.
    """

    def __init__(self) -> None:
        self._all = _Load()
        self._of_tenant: dict[str, _Load] = {}  # the latest to be charged is the last

    def charge(self, tenant: str | None, seconds: float, now_s: float) -> None:
        """The thread has spent ``seconds`` on a response. None: it was no tenant's."""
        self._all.add(seconds, now_s)
        if tenant is None:
            return
        load = self._of_tenant.pop(tenant, None) or _Load()
        load.add(seconds, now_s)
        self._of_tenant[tenant] = load
        while (first := next(iter(self._of_tenant.values()))).since_s < now_s - _FORGOTTEN_AFTER_S:
            assert first is not load
            del self._of_tenant[next(iter(self._of_tenant))]

    def wait_s(self, tenant: str | None, now_s: float) -> float:
        """How long the tenant's next response has to wait, in seconds; at most 0.2."""
        load = self._of_tenant.get(tenant) if tenant is not None else None
        if load is None or len(self._of_tenant) < 2 or self._all.at(now_s) <= _BUSY:
            return 0.0
        excess = load.at(now_s) * len(self._of_tenant) / _BUSY
        return min(_AVERAGED_S * math.log(excess), _LONGEST_WAIT_S) if excess > 1.0 else 0.0


class _Load:
    """Which part of the time was used lately: an exponential average."""

    def __init__(self) -> None:
        self._value = 0.0
        self.since_s = 0.0  # when it was used last

    def at(self, now_s: float) -> float:
        return self._value * math.exp((self.since_s - now_s) / _AVERAGED_S)

    def add(self, seconds: float, now_s: float) -> None:
        self._value = self.at(now_s) + seconds / _AVERAGED_S
        self.since_s = now_s
