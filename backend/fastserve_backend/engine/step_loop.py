"""The step loop: the only one who changes jobs and block tables.

One turn is ``select jobs and their KV blocks → send copies and the step → deliver the tokens of the
step before while the ranks work → receive tokens → update jobs``. The engine runs it on a thread
against real ranks, the simulator on a virtual clock against modelled ones.

Real ranks would be idle from one step's tokens to the arrival of the next step. So the next one is
chosen and sent a moment before the running one ends, as if that had ended: its jobs count with the
tokens that it gives them, which the ranks know first. A job that an end-of-sequence token ends runs
one token too many then, which is ignored. Where the choice needs to know how the step ends, it
waits for that.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from fastserve_backend.engine.delivery import NewToken, OnEnd
from fastserve_backend.engine.flights import Ahead, Flight, is_ending
from fastserve_backend.engine.masks import MaskAnswer, MaskedJobs, Masks
from fastserve_backend.engine.step_builder import build_copy, build_step, in_step_order
from fastserve_backend.executor.base import Executor
from fastserve_backend.job import FinishReason, Job, JobState
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.prefixes import PrefixCopies
from fastserve_backend.kv_cache.round import StepVerdict
from fastserve_backend.kv_cache.tiers import Transfer
from fastserve_backend.metrics.counters import EngineCounters, EngineSnapshot
from fastserve_backend.rank_protocol.messages import NO_TOKEN, CopyResult, Step, StepResult
from fastserve_backend.scheduler.base import Policy, Scheduled, fill_batch
from fastserve_backend.system.clock import Clock

# The next step is chosen so long before the predicted end of the running one: for choosing, sending
# and waking up, and a share of its predicted time, since predictions err.
_LEAD_S = 0.002
_LEAD_SHARE = 0.1
_NO_TOKEN = (
    "the model computed NaN instead of a token: the checkpoint is damaged, or its values are too "
    "large for dtype; check its files, or serve it with dtype: float32"
)
_log = logging.getLogger(__name__)


class Delivery(Protocol):
    """Who gets the tokens; the effects are described in ``delivery.Delivery``."""

    @property
    def is_empty(self) -> bool: ...

    def open(self, job: Job) -> None: ...

    def add(self, job: Job, token: NewToken, reason: FinishReason | None) -> None: ...

    def flush(self, on_end: OnEnd) -> None: ...

    def close(self, job: Job, reason: FinishReason, error: str | None = None) -> None: ...

    def close_all(self, reason: FinishReason, error: str) -> list[Job]: ...


class StepLoop:
    """Runs jobs to their ends. Used by one thread, but for ``snapshot`` and ``num_running``.

    Args:
        on_end: called once a job, just before its end is delivered.
        predict_s: how long a step takes; not asked if the ranks take no step ahead.
        on_iteration: called with each finished step and its seconds, from submission, or from the
            end of the step that it was sent behind, to its result, without waiting between stages.
            Not with a step that copied blocks, which no prediction counts.
        masks: asked what tokens of jobs with structured output may be; the answers go to
            ``masked``. None: no job has one.
        check_integrity: verify the block tables after every step, for tests.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVManager,
        executor: Executor,
        delivery: Delivery,
        clock: Clock,
        *,
        eos_token_ids: Sequence[int],
        counters: EngineCounters,
        predict_s: Callable[[Step], float],
        on_end: OnEnd,
        on_iteration: Callable[[Step, float], None],
        masks: Masks | None = None,
        check_integrity: bool = False,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self._executor = executor
        self._delivery = delivery
        self._clock = clock
        self._eos_token_ids = frozenset(eos_token_ids)
        self._counters = counters
        self._predict_s = predict_s
        self._on_end = on_end
        self._on_iteration = on_iteration
        self._check_integrity = check_integrity
        self.num_running = 0
        """Jobs of the latest step, of each stage's; 0 if none is left."""
        self._jobs: dict[int, Job] = {}
        self._masked = MaskedJobs(masks)
        self._flights: deque[Flight] = deque()
        self._without_token: set[int] = set()  # unfinished jobs that wait for their first
        self._num_decodes = 0  # in the latest step
        self._returned: list[Job] = []  # jobs for which a step ended since the last was sent
        self._step_ids = itertools.count()
        self._last_result_s: float | None = None
        self._copies: dict[int, Transfer] = {}  # unfinished
        self._suspended_s: float | None = None  # since when there are no ranks
        self._no_ranks_s = 0.0  # how long there were none, before that

    @property
    def is_idle(self) -> bool:
        """No job, no token and no copy is left to work on, but for jobs that wait for masks."""
        return (
            len(self._jobs) == self._masked.num_waiting
            and not self._flights
            and not self._copies
            and self._delivery.is_empty
        )

    @property
    def mask_wait_s(self) -> float:
        """Seconds for which it is worth waiting for ``masked`` before the next turn."""
        return self._masked.worth_waiting_s(self._clock.now())

    @property
    def jobs(self) -> Collection[Job]:
        """The unfinished ones in order of arrival; for the thread that calls ``turn`` alone."""
        return self._jobs.values()

    def snapshot(self, num_unfinished: int) -> EngineSnapshot:
        """From any thread.

        Args:
            num_unfinished: jobs accepted and not ended, also those not added yet.
        """
        device, host = self.kv.tiers.device, self.kv.tiers.host
        return EngineSnapshot(
            running=self.num_running,
            waiting=max(0, num_unfinished - self.num_running),
            level_sizes=tuple(self.policy.level_sizes()),
            num_demotions=self.policy.num_demotions,
            num_promotions=self.policy.num_promotions,
            swapped=self.kv.num_swapped_out,
            num_blocks=device.num_blocks,
            free_blocks=device.num_free,
            num_host_blocks=host.num_blocks,
            free_host_blocks=host.num_free,
        )

    def add(self, job: Job) -> None:
        """A new job. Its waiting counts from its arrival."""
        self._jobs[job.number] = job
        self._without_token.add(job.number)
        self._delivery.open(job)
        self.kv.on_arrival(job, self._serving_time(self._clock.now()))
        self.policy.add(job, self._serving_time(job.arrival_s))
        self._counters.prompt_tokens += len(job.prompt_ids)
        self._masked.add(job)
        self._fail_if_too_long(job)  # admission may have asked the ranks before these

    def predicted(self, number: int, num_tokens: int) -> bool:
        """The job will have about so many output tokens. Returns whether it has not ended yet."""
        job = self._jobs.get(number)
        if job is None:
            return False
        job.predicted_tokens = num_tokens
        self.policy.predicted(job)
        return True

    def masked(self, answer: MaskAnswer) -> None:
        """What jobs may go on with is known; or one ends, because nobody can say."""
        if (failed := self._masked.answered(answer)) is not None:
            self._close(failed[0], FinishReason.ERROR, failed[1])

    def cancel(self, number: int) -> None:
        """End the job with CANCELLED; unknown numbers are ignored."""
        job = self._jobs.get(number)
        if job is not None:
            self._close(job, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """Those that have ended get their last token."""
        self._flush()
        for number in list(self._jobs):
            self.cancel(number)

    def fail_all(self, reason: str) -> None:
        """End every job with ERROR, whatever state the loop has left them in."""
        for job in self._delivery.close_all(FinishReason.ERROR, reason):
            job.state = JobState.FINISHED
            job.finish_reason = FinishReason.ERROR
            self._on_end(job, FinishReason.ERROR)
        self._jobs.clear()
        self._without_token.clear()
        self.num_running = 0

    def suspend(self, kv: KVManager) -> None:
        """The ranks are lost, with all KV and whatever they had not answered: it is as if that had
        never been sent. Until ``resume`` only jobs may come and be ended, nothing runs.

        Args:
            kv: in which no job has blocks.
        """
        self._suspended_s = self._clock.now()
        self._last_result_s = None
        self.num_running = 0
        for job in self._jobs_in_flight().values():
            if job.state is JobState.FINISHED:  # while the step ran
                self.policy.remove(job)
        self._flights.clear()
        self._returned.clear()
        self._copies.clear()
        self.kv = kv
        for job in self._jobs.values():
            job.lost_ranks()
            self.policy.placed(job)
            if job.state is JobState.RUNNING:
                job.state = JobState.PREEMPTED
        self._flush()

    def resume(self, executor: Executor, kv: KVManager) -> None:
        """Go on with fresh ranks, on which no job has KV yet. Jobs that they have no room for, be
        there no other, end with ERROR."""
        assert self._suspended_s is not None
        self._no_ranks_s += self._clock.now() - self._suspended_s
        self._suspended_s = None
        self._executor = executor
        self.kv = kv
        for job in list(self._jobs.values()):
            self._fail_if_too_long(job)

    def turn(self) -> None:
        """Send a step if the ranks can take one, do the host's work, wait for what comes next.

        Raises:
            EngineError: a rank died or stopped answering.
        """
        if self._executor.can_submit:
            self._schedule()
        elif self._ahead_in_s() == 0:
            self._schedule_ahead()
        # The host's work for the last step, while the ranks compute this one. A job that a stop
        # word ends here may be part of this step and of one sent behind it: its blocks are freed
        # after those, their tokens ignored.
        self._flush()
        if not self._flights and not self._copies:
            self._last_result_s = None
            self._executor.check()
            return
        result = self._collect()
        if isinstance(result, CopyResult):
            self._finish_copy(result)
        elif result is not None:
            self._finish_step(self._flights.popleft(), result)
        if self._check_integrity:
            self.kv.tiers.check_integrity()

    def _collect(self) -> StepResult | CopyResult | None:
        if self._flights:
            return self._executor.collect(self._ahead_in_s())
        started_s = self._clock.now()
        self._last_result_s = None
        result = self._executor.collect()
        if self._jobs:
            self._counters.swap_stall_s += self._clock.now() - started_s
        return result

    def _flush(self) -> None:
        self._delivery.flush(self._delivers_end)

    def _delivers_end(self, job: Job, reason: FinishReason) -> None:
        if job.number in self._jobs:  # a stop word has ended it
            self._end(job, reason)
        job.finish_reason = reason  # a stop word may come with the last token allowed
        self._on_end(job, reason)

    def _serving_time(self, time_s: float) -> float:
        """``time_s`` on a clock that stands still while there are no ranks. Policy and KV manager
        go by it: where nobody can run, nobody starves."""
        if self._suspended_s is not None:
            time_s = min(time_s, self._suspended_s)
        return time_s - self._no_ranks_s

    def _ahead_in_s(self) -> float | None:
        """Seconds until the step after the running one is to be chosen; None: not before the
        running one has ended, as where that decides on a job's mask."""
        if not self._executor.can_submit_ahead or self.kv.holds_steps:
            return None
        flight = self._flights[0]
        if flight.ahead is not None or flight.decides_masks:
            return None
        if flight.predicted_s is None:
            flight.predicted_s = self._predict_s(flight.step)
        time_s = (1 - _LEAD_SHARE) * flight.predicted_s - _LEAD_S
        return max(0.0, flight.started_s + time_s - self._clock.now())

    def _schedule_ahead(self) -> None:
        """Choose and send the step after the running one as if that had ended."""
        flight = self._flights[0]
        going_on = [one for one in flight.batch if not is_ending(one.job)]
        flight.ahead = Ahead({job.number for job, _ in going_on})
        self._step_ended(going_on, self._clock.now())
        self._schedule(behind=flight)

    def _schedule(self, behind: Flight | None = None) -> None:
        """Choose the next batch, allocate its blocks and send it, if there is a job to run.

        Args:
            behind: the step that runs and counts as ended, whose tokens it may run.
        """
        now = self._clock.now()
        ahead = None if behind is None else behind.ahead
        allocated = self._allocate(self._serving_time(now), ahead)
        if allocated is None:
            return
        batch, copies = allocated
        if behind is not None and not batch:
            return
        for job, _ in batch:
            job.state = JobState.RUNNING
            if job.first_scheduled_s is None:
                job.first_scheduled_s = now
                job.num_cached_tokens = job.num_ready
        chosen = {job.number for job, _ in batch}
        set_aside = [
            job
            for job in self._returned
            if job.state is JobState.RUNNING and job.number not in chosen
        ]
        self._returned.clear()
        for job in set_aside:
            job.state = JobState.PREEMPTED
        if behind is None:
            self._count_preemptions(set_aside)
        else:
            assert behind.ahead is not None
            behind.ahead.set_aside = set_aside  # some may turn out to have ended
        if batch:
            self._send(in_step_order(batch), copies, behind)
        self.num_running = len(self._jobs_in_flight()) if behind is None else len(batch)

    def _count_preemptions(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.num_preemptions += 1
            self._counters.preemptions += 1

    def _allocate(
        self, now: float, ahead: Ahead | None
    ) -> tuple[list[Scheduled], PrefixCopies] | None:
        """The next batch, all its KV on the device, and the copies that its step makes. Starts the
        transfers that other jobs need.

        None: no step may be sent before transfers, or the running step, have ended.
        """
        if not self._jobs:
            return [], PrefixCopies()
        if self.kv.holds_steps:
            return None
        in_flight = set(self._jobs_in_flight())
        kv_round = self.kv.start_round(now, in_flight, None if ahead is None else ahead.going_on)
        if ahead is not None:
            in_flight -= ahead.going_on
        in_flight |= self._masked.waiting  # they run and starve as little as those
        jobs = self.policy.walk(now, in_flight)
        limits = self.policy.limits.for_load(len(self._without_token), self._num_decodes)
        batch = fill_batch(jobs, limits, in_flight, kv_round)
        result = kv_round.commit()
        for transfer in result.transfers:
            self._copies[transfer.id] = transfer
            self._executor.copy(build_copy(transfer, self.kv.tiers.device.block_size))
        return (batch, result.prefix_copies) if result.verdict is StepVerdict.SEND else None

    def _send(self, batch: list[Scheduled], copies: PrefixCopies, behind: Flight | None) -> None:
        """``batch``, in the step's order."""
        previous = None if behind is None else {n: row for row, n in enumerate(behind.rows)}
        step = build_step(next(self._step_ids), batch, self.kv.tiers.device, copies, previous)
        for job, num_tokens in batch:
            job.sent(num_tokens)
        self.kv.on_sent()
        started_s = self._clock.now()
        if self._last_result_s is not None and not self._flights:
            self._counters.between_s += started_s - self._last_result_s
        self._flights.append(Flight(batch, step, copies, started_s))
        self._num_decodes = step.num_decodes
        self._executor.submit(step)

    def _jobs_in_flight(self) -> dict[int, Job]:
        """The jobs of all unfinished steps, by number."""
        return {number: job for flight in self._flights for number, job in flight.rows.items()}

    def _finish_copy(self, result: CopyResult) -> None:
        transfer = self._copies.pop(result.transfer_id)
        if result.error is not None:
            _log.warning("copying KV blocks failed: %s", result.error)
        self.kv.on_transfer_finished(
            transfer.job_number, succeeded=result.error is None, seconds=result.seconds
        )

    def _finish_step(self, flight: Flight, result: StepResult) -> None:
        now = self._clock.now()
        elapsed_s = now - flight.started_s - result.waited_s
        counters = self._counters
        counters.iterations += 1
        counters.compute_s += result.compute_s
        counters.iteration_s += elapsed_s
        self._last_result_s = now
        ahead = flight.ahead
        if ahead is not None and self._flights:
            self._flights[0].started_s = now
        self.kv.on_step_finished(flight.copies)
        in_flight = self._jobs_in_flight()
        for number, job in flight.rows.items():
            if job.state is JobState.FINISHED and number not in in_flight:
                self._release(job)  # it ended while the step ran
        self._apply(flight, result, now, elapsed_s)
        # Those that ended, now or before, are only forgotten: they sink to no other queue.
        if ahead is None:
            unfinished = [one for one in flight.batch if one.job.state is not JobState.FINISHED]
            self._step_ended(unfinished, now)
        else:
            self._count_preemptions(
                job for job in ahead.set_aside if job.state is not JobState.FINISHED
            )
        if not flight.step.copy_from:
            self._on_iteration(flight.step, elapsed_s)

    def _step_ended(self, ran: Sequence[Scheduled], now: float) -> None:
        """For these of its jobs a step has ended, or counts as ended."""
        self._returned += [job for job, _ in ran]
        self.policy.iteration_done(ran, self._serving_time(now))

    def _apply(self, flight: Flight, result: StepResult, now: float, elapsed_s: float) -> None:
        """Update the jobs of the step, and end those that end with it."""
        for job in flight.rows.values():
            job.executed_s += elapsed_s
        sampling = itertools.islice(flight.rows.values(), flight.num_sampling)
        for job, token in zip(sampling, NewToken.from_result(result), strict=True):
            if job.state is JobState.FINISHED:
                continue  # while this iteration ran
            if token.token_id == NO_TOKEN:
                self._close(job, FinishReason.ERROR, _NO_TOKEN)
                continue
            job.num_pending -= 1
            job.output_ids.append(token.token_id)
            job.cumulative_logprob += token.logprob
            self._counters.latencies.new_token(job, now)
            if job.first_token_s is None:
                job.first_token_s = now
                self._without_token.remove(job.number)
            job.last_token_s = now
            self._counters.generation_tokens += 1
            reason = job.reason_to_end(self._eos_token_ids)
            self._delivery.add(job, token, reason)
            if reason is not None:
                self._end(job, reason)
            else:
                self._masked.has_token(job)
        self._masked.ask(now)

    def _fail_if_too_long(self, job: Job) -> None:
        needed = len(job.prompt_ids) + job.params.max_tokens
        capacity = self.kv.tiers.device.capacity
        if needed > capacity:
            reason = (
                f"prompt and output together are {needed} tokens, and since the ranks were "
                f"restarted the KV cache holds {capacity}"
            )
            self._close(job, FinishReason.ERROR, reason)

    def _close(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """End the job without a further token."""
        self._end(job, reason)
        self._on_end(job, reason)
        self._delivery.close(job, reason, error)

    def _end(self, job: Job, reason: FinishReason) -> None:
        """Forget the job. What a running step uses is released when that step has ended."""
        del self._jobs[job.number]
        self._without_token.discard(job.number)
        if not self._jobs:
            self.num_running = 0  # whatever steps still run
        job.state = JobState.FINISHED
        job.finish_reason = reason
        job.num_pending = 0
        self._masked.remove(job)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._counters.latencies.completed(job)
        if not any(job.number in flight.rows for flight in self._flights):
            self._release(job)

    def _release(self, job: Job) -> None:
        self.policy.remove(job)
        self.kv.release(job)
