"""Which service level a request gets."""

from __future__ import annotations

from fastserve_client import protocol

from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import MAX_MS
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import ServiceLevel

# Names of tenants go to metrics and the live view. Ids of sessions are kept.
MAX_NAME_CHARS = 128
# A gateway puts the tenant's name before the salt of a request.
MAX_SALT_CHARS = 256


def resolve_service(wanted: ServiceLevel, config: EngineConfig) -> ServiceLevel:
    """``wanted`` with the server's objectives in place of those that it does not name.

    Raises:
        InvalidRequestError: a value is not allowed. It is named and shown as clients send it, so
            objectives are in ms.
    """
    _check_priority(wanted.priority, config)
    _check_objective(protocol.TTFT_SLO_MS, wanted.ttft_slo_s)
    _check_objective(protocol.TPOT_SLO_MS, wanted.tpot_slo_s)
    _check_name(protocol.TENANT, wanted.tenant)
    _check_name(protocol.SESSION_ID, wanted.session_id)
    _check_name(protocol.CACHE_SALT, wanted.cache_salt, MAX_SALT_CHARS)
    scheduler = config.scheduler
    return wanted.with_default_objectives(scheduler.ttft_slo_ms, scheduler.tpot_slo_ms)


def _check_priority(priority: object, config: EngineConfig) -> None:
    low, high = config.tenants.most_urgent_priority, config.tenants.least_urgent_priority
    if isinstance(priority, bool) or not isinstance(priority, int) or not low <= priority <= high:
        allowed = f"must be an integer, {low} (runs first) to {high}"
        raise InvalidRequestError(protocol.PRIORITY, priority, allowed)


def _check_objective(field: str, seconds: object) -> None:
    if seconds is None:
        return
    allowed = f"must be a number of milliseconds, above 0 and at most {MAX_MS:.0f}"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidRequestError(field, seconds, allowed)
    # NaN is in no range, so the comparison refuses it too.
    if not 0 < seconds <= MAX_MS / 1e3:
        # Rounded, because 0.3 times 1000 is not quite 300.
        raise InvalidRequestError(field, round(seconds * 1000, 9), allowed)


def _check_name(field: str, name: object, max_chars: int = MAX_NAME_CHARS) -> None:
    if not isinstance(name, str) or len(name) > max_chars or not name.isprintable():
        allowed = f"must be text of at most {max_chars} printable characters"
        raise InvalidRequestError(field, name, allowed)
