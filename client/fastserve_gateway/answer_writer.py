"""Writes large answers away from the event loop, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from fastserve_gateway.json_size import SMALL_BODY_BYTES

T = TypeVar("T")


class AnswerWriter:
    """A thread that makes large answers of what the server has sent.

    There is one, because an answer takes many times its memory while it is written (see
    ``answer_size``).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answer")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of ``work`` on an answer that counts as ``num_bytes``.

        Raises what ``work`` raises.
        """
        if num_bytes <= SMALL_BODY_BYTES:
            return work()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, copy_context().run, work)

    def close(self) -> None:
        """Ends the thread. Work that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
