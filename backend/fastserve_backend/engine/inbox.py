"""What other threads tell the engine's thread."""

from __future__ import annotations

import os
import queue
import weakref
from contextlib import suppress
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue with a descriptor that is readable when there may be items.

    Any thread may call ``put``. The engine's thread waits for items alone in ``get``, and together
    with the ranks' messages by the descriptor.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)

    def put(self, item: _Item) -> None:
        self._items.put(item)
        os.eventfd_write(self.descriptor, 1)

    def start_taking(self) -> None:
        """From now on the descriptor stands for later items; the caller takes all that are here."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def get(self, timeout_s: float = 0.0) -> _Item:
        """The next item. Raises queue.Empty: there is none within ``timeout_s``."""
        return self._items.get(block=timeout_s > 0, timeout=timeout_s)
