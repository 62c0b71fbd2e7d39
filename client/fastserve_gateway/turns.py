"""Tenants take turns with work that keeps the server's processor busy and is no job."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from fastserve_gateway.errors import ApiError, share_used_up

# A model process does such work one after another. More than one at a time hides the way there.
NUM_AT_ONCE = 2
TURN_TIMEOUT_S = 60.0
"""How long a request waits for its turn, and how long the turn may last."""


class Turns:
    """Lets ``NUM_AT_ONCE`` run at a time. Where more wait, each tenant's next one gets a turn
    after that of the other tenants. So who has sent a thousand delays others by a few.

    Args:
        on_timeout: called when one has waited ``TURN_TIMEOUT_S`` in vain.
    """

    def __init__(self, on_timeout: Callable[[], None]) -> None:
        self._num_free = NUM_AT_ONCE
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant; who is first here has the next turn."""
        self._on_timeout = on_timeout

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the block.

        Raises ApiError: the turn does not come in time (429), or takes too long (503).
        """
        await self._wait(tenant)
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                yield
        except TimeoutError:
            raise ApiError(503, "the model server does not answer; try again later") from None
        finally:
            self._pass_on()

    async def _wait(self, tenant: str | None) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            self._give_up(tenant, turn)
            if not isinstance(error, TimeoutError):
                raise
            self._on_timeout()
            raise share_used_up(
                tenant,
                f"the work beside jobs: its earlier requests took more than {TURN_TIMEOUT_S:g} s; "
                "send fewer at a time",
            ) from None

    def _give_up(self, tenant: str | None, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # it has come in the same moment
            self._pass_on()
            return
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]

    def _pass_on(self) -> None:
        if not self._waiting:
            self._num_free += 1
            return
        tenant, turns = self._waiting.popitem(last=False)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[tenant] = turns  # behind the others
