"""The gateway's own metrics, and the answer to its unexpected errors."""

from __future__ import annotations

import logging
import time
import traceback

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastserve_gateway.errors import ApiError

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status that nginx logs for a client that went away before the answer's end."""
_OTHER = "other"
"""The label of unknown routes, and of tenants without one."""
# A refusal takes a millisecond, a long answer minutes.
_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


_MAX_TENANTS = 100
"""Most tenants with a label of their own. The server has the same limit."""


def note_tenant(request: Request, tenant: str | None) -> None:
    """Says whose request it is, for the metrics. ``None``: nobody knows yet."""
    request.state.tenant = tenant


class RequestMetrics:
    """ASGI middleware around all routes. It counts requests and their time by route and status, and
    by tenant where ``note_tenant`` was called.

    Unexpected exceptions become a 500 here. Their messages can quote a request, so only types and
    places are logged.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._seconds = Histogram(
            "fastserve_gateway_request_seconds",
            "Time from a request to the end of its answer; the count is that of requests.",
            ("route", "status"),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._of_tenants = Counter(
            "fastserve_gateway_tenant_requests",
            "Requests for tokens by tenant, and the status of their answers.",
            ("tenant", "status"),
            registry=registry,
        )
        self._tenants: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        status: int | None = None

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            places = "".join(traceback.format_tb(error.__traceback__))
            logger.error("unexpected %s:\n%s", type(error).__name__, places)
            if status is not None:
                raise ConnectionAbortedError from None  # the server closes the connection
            answer = ApiError(500, "internal error of the gateway").response(scope["path"])
            await answer(scope, receive, observed_send)
        finally:
            route = getattr(scope.get("route"), "path", _OTHER)
            seconds = time.perf_counter() - started_s
            self._seconds.labels(route, str(status)).observe(seconds)
            tenant = scope.get("state", {}).get("tenant")
            if tenant is not None:
                self._of_tenants.labels(self._tenant_label(tenant), str(status)).inc()

    def _tenant_label(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            return _OTHER
        self._tenants.add(tenant)
        return tenant
