"""What waits for an emitter's thread, served tenant by tenant."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Outbox(Generic[_Item]):
    """Items of tenants, who take turns: one with many items holds no other one up by more than one
    of them. Each tenant's own come in their order. Any thread may put, and one takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next two
        self._of_tenant: dict[str | None, deque[_Item]] = {}  # none of them empty
        self._turns: deque[str | None] = deque()
        # True for each item, and False for the end. (A Condition costs 8% of all responses.)
        self._arrivals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_closed = False

    def __len__(self) -> int:
        """How many items, or the end, wait."""
        return self._arrivals.qsize()

    @property
    def is_over(self) -> bool:
        """Whether it is closed, and all items are taken."""
        return self._is_closed and not self._turns

    def put(self, tenant: str | None, item: _Item) -> None:
        """Returns at once."""
        with self._lock:
            waiting = self._of_tenant.get(tenant)
            if waiting is None:
                waiting = self._of_tenant[tenant] = deque()
                self._turns.append(tenant)
            waiting.append(item)
        self._arrivals.put(True)

    def close(self) -> None:
        """It ``is_over`` once all items are taken."""
        self._is_closed = True
        self._arrivals.put(False)

    def take(self, timeout_s: float | None) -> _Item | None:
        """The next item. None: there is none after the timeout, or it has been closed.

        Args:
            timeout_s: None: there is no limit.
        """
        try:
            is_item = self._arrivals.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not is_item:
            return None
        with self._lock:
            tenant = self._turns.popleft()
            waiting = self._of_tenant[tenant]
            item = waiting.popleft()
            if waiting:
                self._turns.append(tenant)
            else:
                del self._of_tenant[tenant]
        return item
