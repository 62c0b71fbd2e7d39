"""When to repeat a request that the server did not take."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_client.errors import InvalidRequest

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Repeats a request that met ``ServerUnavailable``: no server, a full queue, a shutdown.

    It does so only before the first response, so no text ever comes twice. Other errors are final
    at once. The waits are 0.1 s, 0.2 s and so on, each twice as long as the one before, up to 2 s,
    or what the server asks for if that is longer.

    Raises:
        InvalidRequest: ``max_retries`` is negative.
    """

    max_retries: int = 0
    """How often one request is repeated."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise InvalidRequest(f"max_retries: got {self.max_retries}; must be 0 or more")

    def delay_s(self, num_retries: int) -> float | None:
        """Seconds to wait after ``num_retries`` failed retries; ``None``: give up."""
        if num_retries >= self.max_retries:
            return None
        return min(FIRST_DELAY_S * 2.0**num_retries, MAX_DELAY_S)
