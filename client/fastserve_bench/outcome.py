"""The outcome of one run: records of finished jobs, failures, and the client's own load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fastserve_client.errors import (
    ClientError,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerOverloaded,
    ServerUnavailable,
)

from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass


class FailureKind(StrEnum):
    REFUSED = "refused"
    """The queue is full, or the tenant is at its limit (HTTP 429)."""
    UNAVAILABLE = "unavailable"
    """No connection, a broken one, or a server that shuts down (HTTP 503)."""
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"
    """Cancelled by Ctrl-C or by the server."""
    INVALID = "invalid"
    """The server does not accept the request (HTTP 400)."""
    WRONG_LENGTH = "wrong length"
    """The answer did not have the number of tokens that was asked for."""
    FAILED = "failed"
    """Anything else (HTTP 500)."""

    @classmethod
    def of(cls, error: ClientError) -> FailureKind:
        return next((kind for type_, kind in _KINDS if isinstance(error, type_)), cls.FAILED)


_KINDS = (
    (ServerOverloaded, FailureKind.REFUSED),
    (ServerUnavailable, FailureKind.UNAVAILABLE),  # base class of the one above, so it comes later
    (RequestTimeout, FailureKind.TIMED_OUT),
    (RequestCancelled, FailureKind.CANCELLED),
    (InvalidRequest, FailureKind.INVALID),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A job without a record."""

    arrival_s: float
    kind: FailureKind
    message: str
    service: ServiceClass = NO_CLASS


@dataclass(slots=True)
class LoadOutcome:
    """One run. Times are seconds since it began."""

    records: list[JobRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    send_lateness_s: list[float] = field(default_factory=list)
    """How long after its arrival each job was sent."""
    cpu_share: float = 0.0
    """CPU time of this process over the time of the run. At 1, Python can do no more."""
    interrupted: bool = False
    last_failure_s: float = 0.0
    """When the last failed job failed."""

    @property
    def num_jobs(self) -> int:
        """Jobs that were sent."""
        return len(self.records) + len(self.failures)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the end of the last job, failed or not. Needs a job."""
        arrivals_s = [record.arrival_s for record in self.records]
        arrivals_s += [failure.arrival_s for failure in self.failures]
        ends_s = [self.last_failure_s, *(record.last_token_s for record in self.records)]
        return max(ends_s) - min(arrivals_s)


def count_kinds(failures: Sequence[Failure]) -> dict[str, int]:
    """Numbers of failures by kind, in the order of ``FailureKind``, without zeros."""
    counts = Counter(failure.kind for failure in failures)
    return {kind.value: counts[kind] for kind in FailureKind if kind in counts}
