"""Whether the engine takes another job, and how many it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastserve_backend.config_sections import TenantsSection
from fastserve_backend.engine.tenant_accounts import TenantAccounts
from fastserve_backend.errors import DrainingError, EngineError, OverloadedError
from fastserve_backend.job import Job


class Admission:
    """Counts accepted jobs until they end. Thread-safe.

    Args:
        limit: most unfinished jobs, queued ones included.
        config, weights: as for ``TenantAccounts``.
    """

    def __init__(self, limit: int, config: TenantsSection, weights: Mapping[str, float]) -> None:
        self._limit = limit
        self._tenants = TenantAccounts(limit, config, weights)
        self._changed = threading.Condition()  # guards all that follows
        self._num_unfinished = 0
        self._is_draining = False
        self._failure: str | None = None

    @property
    def num_unfinished(self) -> int:
        """Jobs that were accepted and have not ended."""
        return self._num_unfinished

    @property
    def failure(self) -> str | None:
        """Why the engine is broken; None while it is not."""
        return self._failure

    @contextmanager
    def accept_job(self, job: Job) -> Iterator[None]:
        """Accept the job at the time of its arrival, and hand it over within the ``with``
        block. ``on_job_end`` waits for the end of the block, so no job ends before everybody has
        been told of its arrival.

        Raises:
            DrainingError, EngineError, OverloadedError: no job is accepted now.
            TenantLimitError: the job exceeds a limit of its tenant.
            InvalidRequestError: its tenant is unknown.
        """
        with self._changed:
            self._check_open()
            if self._num_unfinished >= self._limit:
                raise OverloadedError(f"{self._limit} requests are queued already; try again later")
            self._tenants.accept(job, self._limit - self._num_unfinished, job.arrival_s)
            self._num_unfinished += 1
            yield

    def check_not_broken(self) -> None:
        """Raises EngineError: the engine failed, and not because it was closed."""
        with self._changed:
            if self._failure is not None and not self._is_draining:
                raise EngineError(self._failure)

    def on_job_end(self, job: Job, now: float) -> None:
        """An accepted job has ended."""
        with self._changed:
            self._tenants.on_job_end(job, now)
            self._num_unfinished -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more jobs."""
        with self._changed:
            self._is_draining = True

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Whether all accepted jobs have ended within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_unfinished == 0, timeout_s)

    def fail(self, reason: str) -> None:
        """The engine is broken: new jobs are refused with ``reason``."""
        with self._changed:
            self._failure = reason

    def _check_open(self) -> None:
        if self._is_draining:  # first: an engine that was closed has a failure too
            raise DrainingError("the server is shutting down and takes no new requests")
        if self._failure is not None:
            raise EngineError(self._failure)
