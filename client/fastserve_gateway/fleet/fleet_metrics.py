"""The gateway's metrics of its servers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary


class FleetMetrics:
    """Their labels are the model and the server's URL."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("model", "server")
        self.up = Gauge(
            "fastserve_gateway_server_up",
            "1 if the server takes requests, 0 if it is down or silent; only with several servers.",
            labels,
            registry=registry,
        )
        self.sent = Counter(
            "fastserve_gateway_jobs_sent",
            "Jobs sent to the server, those that it refused included.",
            labels,
            registry=registry,
        )
        self.retried = Counter(
            "fastserve_gateway_jobs_retried",
            "Jobs that the server refused or lost before their first token, and another one got.",
            labels,
            registry=registry,
        )
        self.moved = Counter(
            "fastserve_gateway_jobs_moved",
            "Jobs that the server lost after their first token, and a server went on with.",
            labels,
            registry=registry,
        )
        self.not_moved = Counter(
            "fastserve_gateway_moves_failed",
            "Jobs that the server lost after their first token, and that ended with an error.",
            labels,
            registry=registry,
        )
        self.expected_s = Summary(
            "fastserve_gateway_expected_first_token_seconds",
            "Expected time to the first token of streams; only with several servers.",
            labels,
            registry=registry,
        )
        self.first_token_s = Summary(
            "fastserve_gateway_first_token_seconds",
            "Time to the first token of the same streams, from when they were sent to the server.",
            labels,
            registry=registry,
        )
