"""A limit on the memory that all requests take together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from fastserve_gateway.errors import ApiError

Take = Callable[[int], None]
"""Counts more bytes of a request's body. Raises ApiError (429) if there are too many."""


class HeldBodies:
    """Counts the bytes of the bodies of all requests whose answers have not ended.

    A request takes memory in proportion to its body, up to some forty times as much
    (docs/deploy.md, *Sizing*), until its answer has ended. No request waits for room, because it
    would keep the part of its body that has come.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def of_request(self) -> AsyncGenerator[Take, None]:
        """A dependency of a route. It frees the request's bytes when the answer has been sent."""
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
