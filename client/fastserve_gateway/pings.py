"""Words in a stream whose first event takes long, so that no client and no proxy gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastserve_client.cancelling import cancel_all

PING_S = 5.0
"""Until a stream says that it waits, and between such words. Proxies wait for 30 s and more. What a
server refuses it mostly refuses sooner, so that a refusal has a status of its own."""


async def with_pings(
    events: AsyncGenerator[bytes, None], ping: bytes
) -> AsyncGenerator[bytes, None]:
    """The events, with pings before the first one. Closes them. Raises what they raise."""
    first = asyncio.ensure_future(anext(events))
    try:
        while not first.done():
            await asyncio.wait((first,), timeout=PING_S)
            if not first.done():
                yield ping
        yield first.result()
        async for one in events:
            yield one
    finally:
        await cancel_all((first,))
        await events.aclose()
