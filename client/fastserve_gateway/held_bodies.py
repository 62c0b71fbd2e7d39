"""A limit on the memory that all requests take together, and on each tenant's share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fastserve_gateway.errors import ApiError, share_used_up
from fastserve_gateway.shares import Shares

Take = Callable[[int], None]
"""Counts more bytes of a request or of its answer. Raises ApiError (429) if there are too many."""


class HeldBodies:
    """Counts the bytes of the bodies of all requests whose answers have not ended, and of these
    answers (``answer_size.py``).

    A request takes memory in proportion to its body, up to some forty times as much
    (docs/deploy.md, *Sizing*), until its answer has been sent. No request waits for room, because
    it would keep the part of its body that has come.

    Args:
        are_shared, weights: among several tenants; see ``Shares``.
        on_refusal: called when there is no room.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        are_shared: bool,
        on_refusal: Callable[[], None],
        weights: Mapping[str | None, float] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._are_shared = are_shared
        self._shares = Shares(max_bytes, are_divided=are_shared, weights=weights)
        self._on_refusal = on_refusal

    @contextmanager
    def of_request(self, tenant: str | None) -> Iterator[Take]:
        """Gives a request of this tenant its ``Take``. In the end it frees what was taken."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if not self._shares.allows(tenant, num_bytes):
                self._on_refusal()
                raise self._full(tenant)
            self._shares.add(tenant, num_bytes)
            taken += num_bytes

        try:
            yield take
        finally:
            self._shares.remove(tenant, taken)

    def _full(self, tenant: str | None) -> ApiError:
        if not self._are_shared:
            return ApiError(
                429,
                "the gateway holds as many bytes of unanswered requests and of their answers as "
                "it may; send it again later",
                code="gateway_full",
            )
        return share_used_up(
            tenant,
            f"the {self._max_bytes} bytes that the gateway holds of unanswered requests and of "
            f"their answers: it has {self._shares.held(tenant)}, and may have "
            f"{self._shares.most(tenant)} now; send it again when one of its answers has ended",
        )
