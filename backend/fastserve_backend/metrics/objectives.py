"""Whether jobs keep their latency objectives. All waiting counts, whatever the reason for it."""

from __future__ import annotations

from typing import NamedTuple

from fastserve_backend.job import Job


class Attainment(NamedTuple):
    """Which objectives a job kept; None: it has no such objective, or nothing to measure."""

    ttft: bool | None
    tpot: bool | None


def attainment(job: Job) -> Attainment:
    """Of a completed job, which has at least one token. A job with one token has no ``tpot``."""
    assert job.first_token_s is not None
    assert job.last_token_s is not None
    service = job.service
    ttft = tpot = None
    if service.ttft_slo_s is not None:
        ttft = job.first_token_s - job.arrival_s <= service.ttft_slo_s
    num_later = len(job.output_ids) - 1
    if service.tpot_slo_s is not None and num_later > 0:
        tpot = (job.last_token_s - job.first_token_s) / num_later <= service.tpot_slo_s
    return Attainment(ttft, tpot)


def lateness_s(job: Job, now: float) -> float | None:
    """By how much the next token of an unfinished job is late at ``now``, in seconds.

    Negative: it has that much time left. None: the job has no objective for that token. Token
    ``n`` after the first is due ``n`` times ``tpot_slo_s`` after it.
    """
    service = job.service
    if job.first_token_s is None:
        return None if service.ttft_slo_s is None else now - job.arrival_s - service.ttft_slo_s
    if service.tpot_slo_s is None:
        return None
    return now - job.first_token_s - len(job.output_ids) * service.tpot_slo_s
