"""Latency objectives first: jobs that need a token now run before all others, while it helps.

Jobs without objectives are ordered as by the Gittins policy. Three ideas are from QoServe (ASPLOS
2026): earliest deadline first, with shorter prompts preferred; chunks of prefill that the slack of
the decodes allows; and jobs whose objectives are lost step back. That a job ahead of its reader can
wait is from Andes (arXiv 2404.16283).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, Scheduled
from fastserve_backend.scheduler.deadlines import Deadlines, Standing
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.learned_lengths import LearnedLengths
from fastserve_backend.scheduler.walk import Walk

# Added to the keys of urgent jobs and of jobs that are ahead, so that they come before all others,
# but behind jobs with turns. Smaller numbers would not keep these apart: urgency is a time in
# seconds. Larger ones would round small differences away.
_URGENT_KEY, _AHEAD_KEY = -1e9, -1e6
# An iteration may take this share of the time until the first urgent token is due: predictions are
# not exact.
_SLACK_SHARE = 0.9
# When the first prompt can wait for less than this share of its objective, no seats are left for
# jobs without objectives, or for jobs that are ahead. Their tokens would make the iteration longer.
_OTHERS_WAIT, _AHEAD_WAIT = 0.8, 0.5
# With objectives, jobs that starve get this share of their usual turns and time. With all of it,
# batch jobs that starve under overload would take a third of the machine.
_TURNS_SHARE = 0.1


class SLO(Gittins):
    """Urgent jobs run first, then jobs that are ahead of their objectives, then all others.

    ``Deadlines`` says who is urgent and who is ahead. The order of urgent jobs is that of their
    deadlines. Otherwise the order is that of ``Gittins``, also for jobs whose objectives are lost:
    they step back behind all whose objectives can be kept. Starving jobs come before all others,
    see ``Promotion``, but they get fewer turns than with ``Gittins``.
    """

    name = "slo"

    def __init__(
        self,
        limits: BatchLimits,
        times: IterationTimes,
        learned: LearnedLengths,
        *,
        max_model_len: int,
        starvation_s: float,
    ) -> None:
        """Arguments as of ``Gittins``."""
        super().__init__(
            limits, times, learned, max_model_len=max_model_len, starvation_s=starvation_s
        )
        self._deadlines = Deadlines(times.prefill_s)
        self._decodes_s = 0.0  # what the decodes of the latest iteration added to its time

    def key(self, job: Job) -> float:
        standing = self._deadlines.standing(job)
        if standing is Standing.URGENT and not self.has_turn(job):
            return _URGENT_KEY + self._deadlines.urgency(job)
        if standing is Standing.AHEAD and not self.has_turn(job):
            return _AHEAD_KEY + super().key(job)
        return super().key(job)

    def add(self, job: Job, now: float) -> None:
        self._deadlines.add(job, now)
        super().add(job, now)

    def remove(self, job: Job) -> None:
        self._deadlines.remove(job)
        super().remove(job)

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        for job in self._deadlines.update(now):
            self._sort(self._entries[job.number])
        return super().walk(now, in_flight)

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        limits = super().limits_for(now, num_prompts, num_decodes)
        deadlines = self._deadlines
        prompt_slack, due_s = deadlines.prompt_slack(now), deadlines.token_due_s
        if prompt_slack is not None and prompt_slack < _OTHERS_WAIT:
            num_seats = deadlines.num_urgent + self._promotion.num_turns
            if prompt_slack >= _AHEAD_WAIT:
                num_seats += deadlines.num_ahead
            limits = replace(limits, max_seqs=min(limits.max_seqs, num_seats))
        sizes = self.limits.chunk_sizes
        if sizes is None or (prompt_slack is None and due_s is None):
            return limits
        chunk = limits.job_tokens if prompt_slack is None else max(sizes.seconds)
        if due_s is not None:
            slack_s = _SLACK_SHARE * (due_s - now) - self._decodes_s
            fitting = [size for size, seconds in sizes.seconds.items() if seconds <= slack_s]
            chunk = min(chunk, max(fitting, default=min(sizes.seconds)))
        return replace(limits, prefill_chunk_tokens=chunk)

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        self._promotion.share = _TURNS_SHARE if len(self._deadlines) else 1.0
        super().on_iteration_finished(ran, now)
        if not len(self._deadlines):
            return
        contexts = [job.num_tokens for job, num_tokens in ran if num_tokens == 1]
        if contexts:
            decodes_s = self._times.decodes_s(len(contexts), sum(contexts) // len(contexts))
            self._decodes_s = decodes_s - self._times.decode_s(1)
        for job, _ in ran:
            if self._deadlines.on_ran(job, now):
                self._sort(self._entries[job.number])

    def on_place_changed(self, job: Job) -> None:
        super().on_place_changed(job)
        if self._deadlines.standing(job) is Standing.URGENT:
            self._sort(self._entries[job.number])
