"""A line of the log for each request that ends. It never has words of a prompt or an answer."""

from __future__ import annotations

import logging

from fastserve_backend.job import FinishReason, Job
from fastserve_backend.metrics.objectives import attainment

_log = logging.getLogger(__name__)


def log_end(job: Job, reason: FinishReason, now: float) -> None:
    """Log whose request ended, why, and how long it took; ``now`` is on the engine's clock.

    The id and the tenant are the client's words, so they are quoted.
    """
    service = job.service
    first_s = None if job.first_token_s is None else job.first_token_s - job.arrival_s
    _log.info(
        "request %r of tenant %r at priority %d: %s after %.3f s, first token after %s, %d + %d "
        "tokens%s",
        job.id,
        service.tenant,
        service.priority,
        reason.value,
        now - job.arrival_s,
        "-" if first_s is None else f"{first_s:.3f} s",
        len(job.prompt_ids),
        len(job.output_ids),
        _objectives(job, reason),
    )


def _objectives(job: Job, reason: FinishReason) -> str:
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return ""
    kept = attainment(job)._asdict()
    return "".join(
        f", {name} {'kept' if was_kept else 'missed'}"
        for name, was_kept in kept.items()
        if was_kept is not None
    )
