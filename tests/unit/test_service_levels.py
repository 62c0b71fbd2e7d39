"""Which service levels a request may ask for, and what it gets if it asks for none."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.service_levels import resolve_service
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import ServiceLevel

CONFIG = EngineConfig().with_keys(ttft_slo_ms=200, most_urgent_priority=-2, least_urgent_priority=1)


def test_the_servers_objectives_are_those_of_requests_that_name_none() -> None:
    assert resolve_service(ServiceLevel(), EngineConfig()) == ServiceLevel()
    assert resolve_service(ServiceLevel(tenant="a"), CONFIG) == ServiceLevel(0, 0.2, None, "a")
    own = ServiceLevel(-2, 0.5, 0.05)
    assert resolve_service(own, CONFIG) == own


@pytest.mark.parametrize(
    "wanted",
    [
        ServiceLevel(-2, 1e6, 5e-324, "é" * 128),
        ServiceLevel(1, 1, 1, "an 'acme' \U0001f600"),
        ServiceLevel(ttft_slo_s=1, cache_salt="é" * 256),
    ],
)
def test_values_at_the_limits(wanted: ServiceLevel) -> None:
    assert resolve_service(wanted, CONFIG) == wanted


_PRIORITIES = r"must be an integer, -2 \(runs first\) to 1$"
_OBJECTIVES = r"must be a number of milliseconds, above 0 and at most 1000000000$"
_TENANTS = "must be text of at most 128 printable characters$"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"priority": -3}, f"^priority: got -3; {_PRIORITIES}"),
        ({"priority": 2}, f"^priority: got 2; {_PRIORITIES}"),
        ({"priority": True}, f"^priority: got True; {_PRIORITIES}"),
        ({"priority": 0.5}, f"^priority: got 0.5; {_PRIORITIES}"),
        ({"ttft_slo_s": 0}, f"^ttft_slo_ms: got 0; {_OBJECTIVES}"),
        ({"ttft_slo_s": 10**400}, f"^ttft_slo_ms: got 1000.*; {_OBJECTIVES}"),
        ({"ttft_slo_s": -0.0003}, f"^ttft_slo_ms: got -0.3; {_OBJECTIVES}"),
        ({"ttft_slo_s": float("nan")}, f"^ttft_slo_ms: got nan; {_OBJECTIVES}"),
        ({"tpot_slo_s": float("inf")}, f"^tpot_slo_ms: got inf; {_OBJECTIVES}"),
        ({"tpot_slo_s": 1.1e6}, f"^tpot_slo_ms: got 1100000000.0; {_OBJECTIVES}"),
        ({"tpot_slo_s": "5"}, f"^tpot_slo_ms: got '5'; {_OBJECTIVES}"),
        ({"tenant": "a" * 129}, f"^tenant: got 'aaa.*; {_TENANTS}"),
        ({"tenant": "a\nb"}, f"^tenant: got .*; {_TENANTS}"),
        ({"tenant": "a\x85b"}, f"^tenant: got .*; {_TENANTS}"),
        ({"tenant": "\ud800"}, f"^tenant: got .*; {_TENANTS}"),
        ({"tenant": None}, f"^tenant: got None; {_TENANTS}"),
        ({"session_id": "a" * 129}, f"^session_id: got 'aaa.*; {_TENANTS}"),
        ({"session_id": "a\nb"}, f"^session_id: got .*; {_TENANTS}"),
        ({"cache_salt": "a" * 257}, "^cache_salt: got 'aaa.*; must be text of at most 256 print"),
        ({"cache_salt": "\ud800"}, "^cache_salt: got .*; must be text of at most 256 printable"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_named(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_service(ServiceLevel(**wanted), CONFIG)
