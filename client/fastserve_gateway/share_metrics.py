"""A metric of the requests that find the share of their tenant used up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

Resource = Literal["held_bytes", "turns", "connections"]


class ShareMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._refusals = Counter(
            "fastserve_gateway_share_refusals",
            "What was refused because a share was used up: room for a request or its answer, a "
            "turn, or a connection.",
            ("resource",),
            registry=registry,
        )

    def on_refusal(self, resource: Resource) -> Callable[[], None]:
        """What to call when there is no room."""
        return self._refusals.labels(resource).inc
