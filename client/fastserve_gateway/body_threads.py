"""Work on the bodies of requests, away from the event loop if they are large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from fastserve_gateway.errors import ApiError
from fastserve_gateway.json_size import SMALL_BODY_BYTES

# More would not be quicker: they share one interpreter's lock with the event loop.
NUM_THREADS = 2
# The work on the largest body takes about a second.
_DEADLINE_S = 60.0

T = TypeVar("T")


class RunWork(Protocol):
    """Runs work on the body of one request. Raises what the work raises, and ApiError (503)."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class BodyThreads:
    """Threads that read large bodies, and make jobs of them. Small bodies need none.

    The event loop so never waits for one request's work. At most ``NUM_THREADS`` large bodies are
    worked on at a time, and the others wait in order.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="body")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of ``work`` on a body of ``num_bytes``.

        Raises what the work raises, and ApiError: others take all the time (503).
        """
        if num_bytes <= SMALL_BODY_BYTES:
            return work()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await loop.run_in_executor(self._threads, work)
        except TimeoutError:
            raise ApiError(
                503, "the gateway has too many large bodies to read; send it again later"
            ) from None

    def close(self) -> None:
        """Ends the threads. Work that has begun ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
