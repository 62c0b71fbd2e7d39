"""How urgent a request is, and whose: from its body, its headers and its key."""

from __future__ import annotations

from fastserve_client import protocol
from fastserve_client.options import ServiceOptions
from fastserve_client.positive_number import positive_number
from starlette.datastructures import Headers

from fastserve_gateway.auth import Caller
from fastserve_gateway.errors import ApiError, invalid
from fastserve_gateway.schemas import MAX_SESSION_ID_CHARS, RequestBody

# llm-d's router, an endpoint picker of Kubernetes' inference gateways, has these names beside ours.
_LLM_D_HEADERS = {
    protocol.TTFT_SLO_MS: "x-llm-d-slo-ttft-ms",
    protocol.TPOT_SLO_MS: "x-llm-d-slo-tpot-ms",
}
# A header may be long, and a message should not.
_MAX_SHOWN_CHARS = 40


def service_options(
    body: RequestBody, headers: Headers, caller: Caller, *, share_kv: bool
) -> ServiceOptions:
    """What the request's jobs ask for. The server checks the ranges of these values.

    Args:
        share_kv: tenants use each other's KV.

    Raises:
        ApiError: an objective is no time, the session's header is too long, or the request names a
            tenant although it has a key (400); or its key does not allow the priority (403).
    """
    priority, most_urgent = body.wanted_priority, caller.most_urgent_priority
    if most_urgent is not None:
        if priority is None:
            priority = max(0, most_urgent)
        elif priority < most_urgent:
            raise ApiError(
                403,
                f"{body.priority_field}: got priority {priority}; this key allows {most_urgent} "
                "and more, which is less urgent",
                code="priority_not_allowed",
                param=body.priority_field,
            )
    if body.tenant is not None and caller.tenant is not None:
        raise invalid("tenant", "must be left out; the API key says who the tenant is")
    return ServiceOptions(
        priority=priority,
        ttft_slo_ms=_objective(headers, protocol.TTFT_SLO_MS),
        tpot_slo_ms=_objective(headers, protocol.TPOT_SLO_MS),
        tenant=body.tenant if caller.tenant is None else caller.tenant,
        session_id=body.session_id or _session(headers),
        cache_salt=_cache_salt("" if share_kv else caller.tenant or "", body.cache_salt or ""),
    )


def _cache_salt(tenant: str, salt: str) -> str | None:
    """The salt that the server gets. No request of another tenant has it, also at other gateways:
    names of tenants have no slash."""
    return f"{tenant}/{salt}" if tenant or salt else None


def _session(headers: Headers) -> str | None:
    """The gateway remembers sessions, so their length is bounded as in a body."""
    session = headers.get(protocol.SESSION_HEADER)
    if session is not None and len(session) > MAX_SESSION_ID_CHARS:
        allowed = f"must have at most {MAX_SESSION_ID_CHARS} characters"
        raise invalid(protocol.SESSION_ID, f"got {len(session)} characters; {allowed}")
    return session


def _objective(headers: Headers, field: str) -> float | None:
    value = _milliseconds(headers, protocol.SLO_HEADERS[field])
    return _milliseconds(headers, _LLM_D_HEADERS[field]) if value is None else value


def _milliseconds(headers: Headers, name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    value = positive_number(text)
    if value is None:
        raise invalid(name, f"got {text[:_MAX_SHOWN_CHARS]!r}; must be milliseconds above 0")
    return value
