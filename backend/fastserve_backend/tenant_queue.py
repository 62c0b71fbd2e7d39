"""Which piece of work is done next, so that no tenant waits for all the work of another one."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass(slots=True)
class _Tenant(Generic[_Item]):
    used_s: float
    waiting: deque[_Item] = field(default_factory=deque)
    num_started: int = 0

    @property
    def is_active(self) -> bool:
        return bool(self.waiting) or self.num_started > 0


class TenantQueue(Generic[_Item]):
    """The tenant whose items have used the least time comes first; in its own queue, what came
    first. It decides only, and neither starts nor times an item.

    Some items are under way at a time, of one tenant fewer than that. So a tenant that comes finds
    a free place, unless two others are there already.

    **No saving**: a tenant that was away starts with the least that a tenant with items has used,
    or with what it had used itself if that is more. When no item waits or is under way, all is
    forgotten.

    Args:
        most_started: items under way at a time; at least 2.
    """

    def __init__(self, most_started: int) -> None:
        self._most_started = most_started
        self._num_started = 0
        self._tenants: dict[str, _Tenant[_Item]] = {}

    def add(self, name: str, item: _Item) -> None:
        """The item waits behind the others of its tenant."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(0.0)
        if not tenant.is_active:
            tenant.used_s = max(tenant.used_s, self._least_used_s(0.0))
        tenant.waiting.append(item)

    def start_next(self) -> tuple[str, _Item] | None:
        """The tenant and the item that start now; None: no other one may start.

        ``on_end`` must follow.
        """
        if self._num_started == self._most_started:
            return None
        ready = [
            (tenant.used_s, tenant.num_started, name)
            for name, tenant in self._tenants.items()
            if tenant.waiting and tenant.num_started < self._most_started - 1
        ]
        if not ready:
            return None
        _, _, name = min(ready)
        tenant = self._tenants[name]
        self._num_started += 1
        tenant.num_started += 1
        return name, tenant.waiting.popleft()

    def on_end(self, name: str, used_s: float) -> None:
        """A started item of the tenant has ended, and has used so much time."""
        tenant = self._tenants[name]
        tenant.num_started -= 1
        tenant.used_s += used_s
        self._num_started -= 1
        least_s = self._least_used_s(math.inf)
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.is_active or tenant.used_s > least_s
        }

    def _least_used_s(self, without_tenants: float) -> float:
        """By a tenant that has items; ``without_tenants``: where there is none."""
        active = (tenant.used_s for tenant in self._tenants.values() if tenant.is_active)
        return min(active, default=without_tenants)
