"""Jobs from their arrival to their end.

A job ends in one of three ways: with a token that ends it (``on_token``), by a stop word in its
text (``deliver_tokens``), or at once without a further token (``cancel``, ``fail``). Each way leads
through ``_forget``. The job's client learns of exactly one end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fastserve_backend.engine.delivery import Delivery, NewToken, OnJobEnd
from fastserve_backend.engine.masks import MaskedJobs
from fastserve_backend.engine.sent_work import SentWork
from fastserve_backend.engine.serving_clock import ServingClock
from fastserve_backend.grammars.messages import FromGrammars, TimeUsed
from fastserve_backend.job import FinishReason, Job, JobState
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.scheduler.base import ChargesTenants, Policy


class UnfinishedJobs:
    """All unfinished jobs. Tells policy, KV manager, grammars and clients of arrivals and ends.

    Used by the step loop's thread alone, except for ``num_running`` and ``count_by_priority``.

    Args:
        work: the unfinished steps. A job's blocks are released once none of them runs it.
        on_job_end: called once for each job, just before its client learns of its end.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVManager,
        delivery: Delivery,
        masked: MaskedJobs,
        work: SentWork,
        clock: ServingClock,
        counters: EngineCounters,
        eos_token_ids: Sequence[int],
        on_job_end: OnJobEnd,
        rotary_switch: int | None = None,
    ) -> None:
        self.num_running = 0
        """Jobs in the latest step, or in the latest step of each pipeline stage. 0 without jobs."""
        self._jobs: dict[int, Job] = {}
        self._without_token: set[int] = set()
        self._by_priority: Counter[int] = Counter()
        self._policy = policy
        self.kv = kv
        """The one for the ranks as they are now."""
        self._delivery = delivery
        self._masked = masked
        self._work = work
        self._clock = clock
        self._counters = counters
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_job_end = on_job_end
        self._rotary_switch = rotary_switch

    def __iter__(self) -> Iterator[Job]:
        """In order of arrival."""
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, number: int) -> Job | None:
        return self._jobs.get(number)

    @property
    def num_without_token(self) -> int:
        """Jobs that wait for their first token."""
        return len(self._without_token)

    def count_by_priority(self) -> dict[int, int]:
        """Number of jobs of each priority that has any. Any thread may call it."""
        return dict(self._by_priority)

    @property
    def are_idle(self) -> bool:
        """Whether every job waits for a mask, and no token waits for delivery."""
        return len(self._jobs) == len(self._masked.waiting) and self._delivery.is_empty

    # --- Arrivals and news --------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """A new job. Its waiting time counts from its arrival."""
        self._jobs[job.number] = job
        self._without_token.add(job.number)
        self._by_priority[job.service.priority] += 1
        self._delivery.open_stream(job)
        self.kv.on_arrival(job, self._clock.now())
        self._policy.add(job, self._clock.at(job.arrival_s))
        self._counters.on_job_added(job)
        if (failed := self._masked.add(job)) is not None:
            self.fail(failed.job, failed.error)
        else:  # it may have been admitted before the ranks were replaced
            self._fail_if_too_long(job)

    def on_prediction(self, number: int, num_tokens: int) -> bool:
        """Its answer is predicted to have ``num_tokens`` tokens. False if the job has ended."""
        job = self._jobs.get(number)
        if job is None:
            return False
        job.predicted_tokens = max(1, num_tokens - job.num_earlier)
        self._policy.on_predicted(job)
        return True

    def on_mask_answer(self, answer: FromGrammars) -> None:
        """Jobs have their masks, or have to end because there is none; or a tenant pays for it."""
        if isinstance(answer, TimeUsed):
            if isinstance(self._policy, ChargesTenants):
                self._policy.charge(answer.tenant, answer.seconds)
            return
        for failed in self._masked.on_answer(answer):
            self.fail(failed.job, failed.error)

    # --- Tokens -------------------------------------------------------------------------------

    def on_token(self, job: Job, token: NewToken, now: float) -> None:
        """The job has a token, which may be its last."""
        self._counters.on_token(job, now)
        job.on_token(token.token_id, token.logprob, now)
        self._without_token.discard(job.number)
        reason = job.reason_to_end(self._eos_token_ids)
        self._delivery.add_token(job, token, reason)
        if reason is not None:
            self._forget(job, reason)
        elif (failed := self._masked.on_token(job)) is not None:
            self.fail(failed.job, failed.error)
        elif not job.num_pending and job.num_tokens - 1 == self._rotary_switch:
            # While a step sent ahead runs it, it is as long as before.
            self.kv.restart(job)

    def deliver_tokens(self) -> None:
        """Send clients the tokens that have come since the last call.

        A stop word may end a job that is in unfinished steps. They keep its blocks until they end,
        and their tokens for it are ignored.
        """
        self._delivery.flush_tokens(self._on_last_token)

    def _on_last_token(self, job: Job, reason: FinishReason) -> None:
        if job.number in self._jobs:  # a stop word ends it, which `on_token` could not know
            self._forget(job, reason)
        job.finish_reason = reason  # the last token allowed may also complete a stop word
        self._on_job_end(job, reason)

    # --- Ends without a token -----------------------------------------------------------------

    def cancel(self, number: int) -> None:
        """End the job with CANCELLED; unknown numbers are ignored."""
        job = self._jobs.get(number)
        if job is not None:
            self._end_now(job, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """Cancel every job. Jobs that have ended still get their last tokens."""
        self.deliver_tokens()
        for number in list(self._jobs):
            self.cancel(number)

    def fail(self, job: Job, error: str) -> None:
        """End the job with ERROR."""
        self._end_now(job, FinishReason.ERROR, error)

    def fail_all(self, error: str) -> None:
        """End every job with ERROR, in whatever state an exception has left the loop."""
        for job in self._delivery.end_all_streams(FinishReason.ERROR, error):
            job.state = JobState.FINISHED
            job.finish_reason = FinishReason.ERROR
            self._on_job_end(job, FinishReason.ERROR)
        self._jobs.clear()
        self._without_token.clear()
        self._by_priority.clear()
        self.num_running = 0

    def _end_now(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        self._forget(job, reason)
        self._on_job_end(job, reason)
        self._delivery.end_stream(job, reason, error)

    def _forget(self, job: Job, reason: FinishReason) -> None:
        del self._jobs[job.number]
        self._without_token.discard(job.number)
        priority = job.service.priority
        self._by_priority[priority] -= 1
        if not self._by_priority[priority]:
            del self._by_priority[priority]
        if not self._jobs:
            self.num_running = 0  # whatever unfinished steps compute, no client waits for it
        job.state = JobState.FINISHED
        job.finish_reason = reason
        job.num_pending = 0
        self._masked.remove(job)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters.on_job_completed(job)
        if not self._work.uses(job):
            self.release(job)

    def release(self, job: Job) -> None:
        """The job has ended, and no unfinished step runs it: free its blocks, or hold them for its
        session."""
        self._policy.remove(job)
        self.kv.release(job, self._clock.now())

    # --- The ranks are replaced ---------------------------------------------------------------

    def on_ranks_lost(self, kv: KVManager) -> None:
        """All KV is gone, and no unfinished step will finish.

        Args:
            kv: an empty one.
        """
        for job in self._work.jobs.values():
            if job.state is JobState.FINISHED:
                self._policy.remove(job)  # its blocks are gone with the old KV manager
        self.kv = kv
        self.num_running = 0
        for job in self:
            job.on_ranks_lost()
            self._policy.on_place_changed(job)

    def on_ranks_replaced(self, kv: KVManager) -> None:
        """Jobs that do not fit in the fresh ranks' KV cache end with ERROR.

        Args:
            kv: an empty one, of the size of that cache.
        """
        self.kv = kv
        for job in list(self):
            self._fail_if_too_long(job)

    def _fail_if_too_long(self, job: Job) -> None:
        needed = len(job.prompt_ids) + job.params.max_tokens
        longest = self.kv.tiers.longest_job
        if needed > longest:
            self.fail(
                job,
                f"prompt and output together are {needed} tokens, and since the ranks were "
                f"restarted the KV cache holds {longest}",
            )
