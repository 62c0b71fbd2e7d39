"""Requests whose prompts may take long to make are prepared beside Triton's thread.

Triton hands over all requests by one thread, so others would wait for a chat template that takes
seconds, or for a long text to be tokenized.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from fastserve_backend.checkpoints.template_process import MAX_PROCESSES
from fastserve_backend.dynamic_threshold import may_take_place
from fastserve_backend.errors import OverloadedError, TenantLimitError
from fastserve_backend.tenant_queue import TenantQueue

logger = logging.getLogger(__name__)

NUM_AT_ONCE = MAX_PROCESSES
"""Requests that are prepared at a time: two of one tenant, so that there is a place for another
one. Each renders one template at most."""
# Shorter texts have their tokens within milliseconds, and are not worth another thread.
_LONG_TEXT_CHARS = 1 << 14
# The longest preparation takes about two seconds.
_RETRY_S = 2.0

Work = Callable[[], None]


def is_long_text(text: str | None) -> bool:
    """Whether it may take long to tokenize the text, if there is one."""
    return text is not None and len(text) > _LONG_TEXT_CHARS


class Preparation:
    """Threads that prepare requests. Tenants take turns as ``TenantQueue`` says.

    Args:
        most_waiting: requests that wait or are prepared, of all tenants. Once a tenant has come by
            name, each gets places as ``may_take_place`` says.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._changed = threading.Condition()  # guards all that follows
        self._queue: TenantQueue[Work] = TenantQueue(NUM_AT_ONCE)
        self._held: Counter[str] = Counter()
        """Requests that wait or are prepared, by tenant."""
        self._is_shared = False
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name="preparation", daemon=True)
            for _ in range(NUM_AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or are prepared."""
        with self._changed:
            return self._held.total()

    def add(self, tenant: str, work: Work) -> None:
        """Has ``work``, which prepares a request and must not raise, done by another thread.

        Raises:
            OverloadedError: too many requests wait, or a ``TenantLimitError``: too many of the
                tenant.
        """
        with self._changed:
            self._check_room(tenant)
            self._held[tenant] += 1
            self._queue.add(tenant, work)
            self._changed.notify()

    def close(self) -> None:
        """Returns when all that waits is done. Add nothing afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _check_room(self, tenant: str) -> None:
        num_free = self._most_waiting - self._held.total()
        if num_free <= 0:
            raise OverloadedError(
                f"{self._most_waiting} requests wait for their prompts already; try again later"
            )
        self._is_shared |= tenant != ""
        held = self._held[tenant]
        num_tenants = len(self._held.keys() | {tenant})
        if self._is_shared and not may_take_place(held, num_free, 1 / num_tenants):
            reason = f"has {held} of the {self._most_waiting} requests that may wait for a prompt"
            raise TenantLimitError(tenant, reason, _RETRY_S)

    def _run(self) -> None:
        while (started := self._next()) is not None:
            tenant, work = started
            began_s = time.monotonic()
            try:
                work()
            except Exception:
                logger.exception("preparing a request failed")
            with self._changed:
                self._queue.on_end(tenant, time.monotonic() - began_s)
                self._held[tenant] -= 1
                if not self._held[tenant]:
                    del self._held[tenant]
                if self._is_closed:
                    self._changed.notify_all()

    def _next(self) -> tuple[str, Work] | None:
        """Waits for work; None: there will be no more."""
        with self._changed:
            while (started := self._queue.start_next()) is None:
                if self._is_closed and not self._held:
                    return None
                self._changed.wait()
            return started
