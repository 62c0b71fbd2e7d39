"""Jobs that cannot end, for tests on an event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastserve_backend.serving.launch import TritonServer
from running_server import job_held

T = TypeVar("T")


@asynccontextmanager
async def job_held_meanwhile(
    server: TritonServer, start: Callable[[], Coroutine[Any, Any, T]]
) -> AsyncIterator[T]:
    """As ``job_held``. The event loop goes on, and runs ``start``."""
    loop = asyncio.get_running_loop()

    def start_in_loop() -> T:
        return asyncio.run_coroutine_threadsafe(start(), loop).result()

    held = job_held(server, start_in_loop)
    started = await asyncio.to_thread(held.__enter__)
    try:
        yield started
    finally:
        await asyncio.to_thread(held.__exit__, *sys.exc_info())
