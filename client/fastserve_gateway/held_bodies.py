"""How much of the gateway's memory requests may take together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from fastserve_gateway.errors import ApiError

Take = Callable[[int], None]
"""Counts so many bytes more of a request's body. Raises ApiError (429): they are too many."""


class HeldBodies:
    """The bytes of all bodies whose requests have not been answered to their end.

    What a request takes grows with its body, up to some forty times as much (docs/deploy.md,
    *Sizing*), and stays until its answer has ended. Nobody waits for a place: that would keep the
    parts of bodies that have come.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def of_request(self) -> AsyncGenerator[Take, None]:
        """A dependency of a route: what it takes is free again when the answer has been sent."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self._num_bytes + num_bytes > self._max_bytes:
                raise ApiError(
                    429,
                    "the gateway holds as many bytes of unanswered requests as it may; "
                    "send it again later",
                    code="gateway_full",
                )
            self._num_bytes += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self._num_bytes -= taken
