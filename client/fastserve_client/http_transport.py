"""HTTP, synchronously: the asyncio transport in a thread of its own.

A blocking read would not do: neither ``close()`` from another thread or a signal handler, nor a
timeout of the whole request, could end it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from fastserve_client.cancelling import cancel_all
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientClosed
from fastserve_client.http_aio_transport import AioHttpCall, AioHttpTransport
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs

_CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")

Item = Outputs | Exception | None
"""What a call delivers: responses, then an error, or None after a good end."""


class HttpTransport:
    """A ``Transport`` with a connection for each running request."""

    only_streams = AioHttpTransport.only_streams

    def __init__(self, endpoint: Endpoint) -> None:
        self._transport = AioHttpTransport(endpoint)
        self._readers: set[asyncio.Task[None]] = set()  # the loop alone would not keep them
        self._closed = False
        # A signal handler may close the transport while its own thread is about to use it.
        self._closing = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name=f"fastserve-client {endpoint}", daemon=True
        )
        self._thread.start()
        # This also runs when the last reference is dropped, and must not wait then.
        self._stop = weakref.finalize(self, _schedule_stop, self._loop, self._transport)

    def start(self, request: InferRequest, timeout_s: float | None) -> HttpCall:
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()

        async def start() -> AioHttpCall:
            call = self._transport.start(request, timeout_s)
            reader = asyncio.create_task(_read(call, items))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
            return call

        return HttpCall(self, self._wait_for(start()), items)

    def is_ready(self, model: str, timeout_s: float) -> bool:
        with suppress(ClientClosed):
            return self._wait_for(self._transport.is_ready(model, timeout_s))
        return False

    def cancel(self, call: AioHttpCall) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing runs any more
            self._loop.call_soon_threadsafe(call.cancel)

    def close(self) -> None:
        with self._closing:
            self._closed = True
        self._stop()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises ClientClosed if the transport is closed, before or meanwhile."""
        # The loop would never run what it gets after it was told to stop.
        done = None
        with self._closing, suppress(RuntimeError):  # a closed loop raises it
            if not self._closed:
                done = asyncio.run_coroutine_threadsafe(work, self._loop)
        if done is None:
            work.close()
            raise ClientClosed("the client is closed")
        try:
            return done.result()
        except CancelledError:
            raise ClientClosed("the client was closed") from None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _schedule_stop(loop: asyncio.AbstractEventLoop, transport: AioHttpTransport) -> None:
    async def stop() -> None:
        try:
            await transport.close()
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop)


async def _read(call: AioHttpCall, items: queue.SimpleQueue[Item]) -> None:
    """Moves all that comes to ``items``.

    Only the job's own ``max_tokens`` bounds what waits there. Triton would keep it otherwise.
    """
    try:
        async for outputs in call:
            items.put(outputs)
        items.put(None)
    except Exception as error:
        items.put(error)
    except asyncio.CancelledError:
        items.put(ClientClosed("the client was closed"))
        raise


class HttpCall(Iterator[Outputs]):
    """One POST to ``generate_stream``; the transport lives as long as it does."""

    def __init__(
        self, transport: HttpTransport, call: AioHttpCall, items: queue.SimpleQueue[Item]
    ) -> None:
        self._transport = transport
        self._call = call
        self._items = items

    def __next__(self) -> Outputs:
        item = self._items.get()
        if item is None:
            raise StopIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self._transport.cancel(self._call)
        self._items.put(None)  # ends a waiting iteration at once
