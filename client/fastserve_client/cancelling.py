"""The end of tasks that others wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Returns when all have ended; what they raise then is nobody's."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
